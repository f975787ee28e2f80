"""Rank pools shared by all tests of this folder: starting a worker costs seconds, using it again nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroshard.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks3() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
