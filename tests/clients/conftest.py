"""Ranks that run other people's trainers on the stand-in for deepspeed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zeroshard.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
