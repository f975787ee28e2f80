from __future__ import annotations

from zeroshard.unwinding import NEVER, Unwinding


def forwards(*buckets: int) -> tuple[Unwinding, list[tuple[int, int]]]:
    """Forwards that use these buckets one after the other; when each began and ended."""
    order = Unwinding()
    spans = []
    for bucket in buckets:
        began = order.tick()
        order.begin_use(bucket)
        spans.append((began, order.tick()))
        order.end_use(bucket)
    return order, spans


def test_worked_example_of_the_module() -> None:
    order, spans = forwards(0, 1, 0)
    order.enter(7)
    seen = []
    for (began, ended), bucket in zip(reversed(spans), (0, 1, 0), strict=True):
        seen.append((list(order.finished(ended)), order.over(7, ended)))
        assert order.open(7, bucket, began)
    assert seen == [([], []), ([], [0]), ([1], [1])]
    assert order.over(7, -1) == [0]
    order.leave(7)
    assert not order.is_running


def test_a_use_inside_another_does_not_end_it() -> None:
    order = Unwinding()
    outer = order.tick()
    order.begin_use(0)
    inner = order.tick()
    order.begin_use(1)
    ended_inner, ended_outer = order.tick(), order.tick()
    order.enter(1)
    assert order.over(1, ended_outer) == list(order.finished(ended_outer)) == []
    order.open(1, 0, outer)
    assert order.over(1, ended_inner) == list(order.finished(ended_inner)) == []
    order.open(1, 1, inner)
    assert order.over(1, -1) == [0, 1]


def test_after_a_backward_nothing_is_known_of_older_forwards() -> None:
    order, spans = forwards(0, 1)
    order.enter(1)
    order.leave(1)
    order.enter(2)  # through a graph that was kept
    assert list(order.finished(spans[0][1])) == []


def test_two_forwards_and_one_backward() -> None:
    order, spans = forwards(0, 1, 0, 1)
    order.enter(1)
    assert list(order.finished(spans[2][1])) == []  # bucket 1 has another use to come
    assert list(order.finished(spans[0][1])) == [1]


def test_tasks_are_apart() -> None:
    order, spans = forwards(0, 1)
    order.enter(1)
    order.open(1, 1, spans[1][0])
    order.enter(2)
    assert order.over(2, -1) == []
    assert not order.is_open(2, 1)
    order.leave(2)
    assert order.is_open(1, 1)
    assert order.knows(1)
    assert not order.open(1, 1, 9)


def test_a_forward_without_order_ends_nothing() -> None:
    order, spans = forwards(0, 1)
    order.enter(1)
    order.open(1, 1, spans[1][0])
    assert order.over(1, NEVER) == list(order.finished(NEVER)) == []


def test_what_is_recomputed_stands_where_it_was() -> None:
    order, spans = forwards(0, 1)
    assert order.repeated([0]) == spans[0][1]
    assert order.repeated([0, 1]) == spans[1][1]
    assert order.repeated([5]) == NEVER
