"""Cores, cut into one part per rank."""

from __future__ import annotations

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.cores import cut_cores, parse_core_list


def test_a_core_list() -> None:
    assert parse_core_list("0-3,8") == (0, 1, 2, 3, 8)
    assert parse_core_list("5") == (5,)


@pytest.mark.parametrize("text", ["", "3-1", "0-3,2", "1,1", "a", "1-", "-2", "0-3,,5"])
def test_a_core_list_that_does_not_ascend(text: str) -> None:
    with pytest.raises(LaunchError, match="--bind_core_list"):
        parse_core_list(text)


def test_parts_are_neighbours_of_equal_size() -> None:
    assert cut_cores((0, 1, 2, 3, 8), 2) == [(0, 1), (2, 3)]
    with pytest.raises(LaunchError, match="3 ranks, and only 2 cores"):
        cut_cores((0, 1), 3)
