"""What follows from the positions of ranks, without any process."""

from __future__ import annotations

from dataclasses import replace

from zeroshard.comm.divergence import GroupView, Launch, Position, doomed, first_difference, report


def launches(*labels: str) -> tuple[Launch, ...]:
    return tuple(Launch(number, "all_gather", label, 8, "float32") for number, label in enumerate(labels))


def position(rank: int, *labels: str, waits: bool = True, group: str = "gather", **more: object) -> Position:
    """A rank that launched these in one group of ranks 0 to 2, and waits for the last of them."""
    view = GroupView((0, 1, 2), len(labels), launches(*labels))
    waiting = (group, len(labels) - 1) if waits else None
    return replace(
        Position(rank, waiting, "forward" if waits else "", "train.py:3 in main", groups={group: view}),
        **more,  # type: ignore[arg-type]
    )


def test_positions_survive_the_store() -> None:
    told = position(1, "a", "b", frozen=("w",), idle=1.5)
    assert Position.decode(told.encode()) == told


def test_ranks_that_wait_for_each_other_are_doomed() -> None:
    one, other = position(0, "a", "b"), position(1, "x", group="reduce")
    running = position(2, "a", "b", waits=False)
    assert doomed({0: one, 1: other, 2: running}) == {0, 1}


def test_who_waits_for_a_rank_that_runs_is_not_doomed() -> None:
    behind = position(1, "a", waits=False)
    assert doomed({0: position(0, "a", "b"), 1: behind, 2: position(2, "a", "b")}) == set()


def test_who_waits_for_a_rank_that_is_over_is_doomed() -> None:
    ended = Position(1, ended="its script has finished")
    assert doomed({0: position(0, "a"), 1: ended, 2: position(2, "a")}) == {0, 2}


def test_nobody_is_doomed_where_all_have_launched() -> None:
    assert doomed({rank: position(rank, "a", "b") for rank in range(3)}) == set()


def test_the_first_difference_and_the_last_match() -> None:
    positions = {0: position(0, "a", "b", "c"), 1: position(1, "a", "d", "c"), 2: position(2, "a", "b")}
    found = first_difference("gather", positions)
    assert {rank: launch.label for rank, launch in found.items()} == {0: "b", 1: "d", 2: "b"}
    text = report(0, positions, range(3))
    assert (
        "ranks 0, 2 launched all_gather of b (number 1); rank 1 launched all_gather of d (number 1)" in text
    )
    assert "The last one that matched: all_gather of a (number 0)." in text


def test_likely_causes() -> None:
    waiting = position(0, "a", "b")
    alone = position(1, "a", waits=True, entry="gathered")
    for other, cause, cure in (
        (
            Position(1, ended="its script has finished"),
            "rank 1 left the loop earlier",
            "same number of batches",
        ),
        (Position(1, ended="ended with ValueError: no"), "rank 1 ended with an error", "log"),
        (position(1, "a", frozen=("w",)), "parameter 'w', frozen on rank 1 only", "requires_grad"),
        (alone, "only rank 1 called gathered(), which all ranks must call", "on every rank"),
        (position(1, "a", entry="close"), "rank 1 left the loop earlier", "same number of batches"),
        (position(1, "a", training=False), "rank 1 evaluates or generates", "engine.unwrap_for_generation()"),
        (position(1, "a", waits=False), "rank 1 is slower than the others", "longer time-out"),
        (position(1, "a", "a"), "those of a are 1 on rank 0, 2 on rank 1", "control flow"),
        (None, "rank 1 died", "memory"),
    ):
        positions = {0: waiting} if other is None else {0: waiting, 1: other}
        text = report(0, positions, range(2))
        assert cause in text.split("Likely cause: ")[1].split("Cure: ")[0], text
        assert cure in text.split("Cure: ")[1], text


def test_many_ranks_take_few_lines() -> None:
    positions = {rank: position(rank, "a") for rank in range(64)}
    positions[7] = Position(7, ended="its script has finished")
    text = report(0, positions, range(64))
    assert text.count("\n") < 8
    assert "rank 7: its script has finished" in text
