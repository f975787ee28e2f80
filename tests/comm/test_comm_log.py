"""The log of collectives without ranks: bandwidths, what is counted, and times read from events of a device."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from zeroshard.comm import CommsLog, CountingCollectives, FakeCollectives, TimedCollectives, timing
from zeroshard.comm.bandwidth import OPERATIONS, bandwidth, sent_share
from zeroshard.comm.log import UNITS, configure_log
from zeroshard.config import parse
from zeroshard.config.sections import CommsLogger
from zeroshard.errors import ConfigError
from zeroshard.wording import size_in_words


def test_bandwidth_by_hand() -> None:
    """100 MB in 10 ms on 4 ranks."""
    found = {operation: bandwidth(operation, 1e8, 1e-2, 4) for operation in OPERATIONS}
    assert {algorithm for algorithm, _ in found.values()} == {1e10}
    assert {operation: bus for operation, (_, bus) in found.items()} == {
        "all_reduce": 1.5e10,
        "all_gather": 0.75e10,
        "reduce_scatter": 0.75e10,
        "all_to_all": 0.75e10,
        "broadcast": 1e10,
        "point_to_point": 1e10,
    }


def test_a_group_of_one_sends_nothing_and_no_time_is_no_bandwidth() -> None:
    assert all(sent_share(operation, 1) == 0 for operation in OPERATIONS)
    assert sent_share("all_reduce", 3) == Fraction(4, 3)
    assert bandwidth("all_reduce", 100, 0.0, 2) == (0.0, 0.0)
    with pytest.raises(ValueError, match="'all_sum' is not one of"):
        sent_share("all_sum", 2)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KB"), (1_310_720, "1.25 MB")]
)
def test_sizes_in_words(nbytes: int, text: str) -> None:
    assert size_in_words(nbytes, UNITS) == text


def exercise(seam: Any) -> None:
    full, shard = torch.zeros(8), torch.zeros(2)
    seam.all_gather(full, shard).wait()
    seam.all_gather(full, shard, stable=True).wait()
    seam.reduce_scatter(shard, full, average=True).wait()
    seam.all_reduce(full, average=False).wait()
    seam.broadcast(shard, 0)
    seam.sum_to_host(torch.zeros(3, dtype=torch.float64))


def test_what_is_logged_is_what_is_counted() -> None:
    counting, log = CountingCollectives(FakeCollectives(0, 4)), CommsLog()
    exercise(TimedCollectives(counting, log, "gather"))
    assert {row.name: (row.count, row.count * row.nbytes) for row in log.rows()} == {
        verb: (traffic.calls, traffic.buffer_bytes) for verb, traffic in counting.counts().items()
    }
    assert all(row.finished == row.count and row.latency >= row.blocked > 0 for row in log.rows())


def test_only_what_is_wanted_is_logged() -> None:
    log = CommsLog()
    log.configure(CommsLogger(prof_all=False, prof_ops=("all_gather_into_tensor", "reduce_scatter")))
    exercise(TimedCollectives(FakeCollectives(0, 4), log, "gather"))
    assert [(row.name, row.count) for row in log.rows()] == [("all_gather", 2), ("reduce_scatter", 1)]


def test_debug_names_the_caller_and_the_bucket() -> None:
    log = CommsLog()
    log.configure(CommsLogger(debug=True))
    exercise(TimedCollectives(FakeCollectives(0, 4), log, "gather").labelled("'blocks.0' (w, b)"))
    assert "all_gather in exercise for 'blocks.0' (w, b)" in {row.name for row in log.rows()}
    assert "broadcast in exercise for 'blocks.0' (w, b)" in {row.name for row in log.rows()}


def test_a_label_reaches_every_wrapper() -> None:
    log = CommsLog()
    log.configure(CommsLogger(debug=True))
    counting = CountingCollectives(TimedCollectives(FakeCollectives(0, 4), log, "gather"))
    counting.labelled("'blocks.0' (w, b)").broadcast(torch.zeros(2), 0)
    assert [row.name for row in log.rows()] == [
        "broadcast in test_a_label_reaches_every_wrapper for 'blocks.0' (w, b)"
    ]
    assert counting.counts()["broadcast"].calls == 1


class Event:
    """A device's event: its time is known once the device has come to it."""

    device_is_at = 0.0
    clock = 0.0
    synchronised = 0

    def __init__(self) -> None:
        Event.clock += 1.0
        self.at = Event.clock

    def query(self) -> bool:
        return self.at <= Event.device_is_at

    def synchronize(self) -> None:
        Event.synchronised += 1
        Event.device_is_at = max(Event.device_is_at, self.at)

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return 1e3 * (other.at - self.at)


def test_a_device_is_read_when_it_has_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "mark", lambda device: Event())
    log = CommsLog()
    seam = TimedCollectives(FakeCollectives(0, 4), log, "gather")
    works = [seam.all_gather(torch.zeros(8), torch.zeros(2)) for _ in range(2)]  # events 1, 2 and 3, 4
    for work in reversed(works):
        work.wait()  # 5, 6 of the second one; 7, 8 of the first one
        work.wait()  # once is enough
    (row,) = log.rows()
    assert (row.count, row.finished) == (2, 0)
    Event.device_is_at = 6.0
    seam.sum_to_host(torch.zeros(1))  # 9 and 10: reads what there is of the others
    assert (row.finished, row.latency, row.blocked) == (1, 3.0, 2.0)
    assert Event.synchronised == 0
    log.settle()
    assert (row.finished, row.latency, row.blocked) == (2, 10.0, 4.0)
    assert list(row.recent) == [2.0, 2.0]
    assert log.rows()[1].finished == 1


def test_measurements_of_a_device_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "mark", lambda device: Event())
    log = CommsLog()
    seam = TimedCollectives(FakeCollectives(0, 4), log, "gather")
    for _ in range(1001):
        seam.all_gather(torch.zeros(8), torch.zeros(2)).wait()
    assert log.rows()[0].finished == 1001


def test_a_misspelt_operation_is_refused_and_one_that_never_comes_is_told() -> None:
    with pytest.raises(ConfigError, match=r'prof_ops = "all_gahter".*did you mean all_gather\?'):
        parse({"comms_logger": {"enabled": True, "prof_ops": ["all_gahter"]}})
    with pytest.raises(ConfigError, match=r'prof_ops = "all_gahter".*did you mean all_gather\?'):
        configure_log(prof_all=False, prof_ops=("all_gahter",))
    section = {"enabled": True, "prof_all": False, "prof_ops": ["send", "all_reduce"]}
    assert "an engine launches no send" in parse({"comms_logger": section}).notes[0]
    section["prof_all"] = True
    assert "has no effect, because prof_all is true" in parse({"comms_logger": section}).notes[0]
    section["enabled"] = False
    assert parse({"comms_logger": section}).notes == ()
