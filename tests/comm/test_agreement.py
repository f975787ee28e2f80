from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.comm import ballot, unanimous

checksums = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(checksums, checksums), min_size=1, max_size=64))
def test_unanimous_means_all_equal_in_the_low_bits(votes: list[tuple[int, int]]) -> None:
    sums = [sum(column) for column in zip(*map(ballot, votes), strict=True)]
    expected = [len({vote[i] & 0xFFFF for vote in votes}) == 1 for i in range(2)]
    assert unanimous(sums, len(votes)) == expected


def test_a_thousand_ranks_of_which_one_differs() -> None:
    agree, differ = ballot([0xFFFF]), ballot([0xFFFE])
    assert unanimous([1024 * x for x in agree], 1024) == [True]
    assert unanimous([1023 * x + y for x, y in zip(agree, differ, strict=True)], 1024) == [False]
