"""`comms_logger`: what is logged of a real run, and who waited for whom."""

from __future__ import annotations

import contextlib
import io
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.assembly import build_engine, policy_of
from zeroshard.comm import (
    CommsLog,
    CountingCollectives,
    RecordingCollectives,
    TimedCollectives,
    configure_log,
    has_log,
    log_summary,
    logged_operations,
    reset_log,
)
from zeroshard.comm.log import LOG
from zeroshard.config import parse, resolve_batch
from zeroshard.initialization import open_groups
from zeroshard.testing import RankPool
from zeroshard.testing.models import tiny, tiny_batch
from zeroshard.watching import timed
from zeroshard.world import join


def settings(stage: int, logger: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            **zero,
        },
        **({} if logger is None else {"comms_logger": logger}),
    }


def train(engine: Any, rank: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        loss = engine(tiny_batch(step, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def count_both_ways(rank: int, world: int, stage: int, zero: dict[str, Any]) -> list[dict[Any, Any]]:
    """(calls, bytes) by group and verb: of the log, and of counters below it."""
    joined = join()
    config = parse(settings(stage, **zero))
    batch = resolve_batch(None, 4, None, joined.size, joined.size_origin)
    groups = open_groups(policy_of(config, batch, joined.size), joined)
    names = [name for name in ("gather", "reduce", "replicate", "secondary") if getattr(groups, name)]
    counters = {name: CountingCollectives(getattr(groups, name)) for name in names}
    log = CommsLog()
    engine = build_engine(tiny(), config, batch, timed(replace(groups, **counters), log), joined.device)
    assert engine.optimizer is not None
    train(engine, rank)
    logged: dict[Any, Any] = {}
    for row in log.rows():
        calls, nbytes = logged.get((row.group.name, row.verb), (0, 0))
        logged[row.group.name, row.verb] = calls + row.count, nbytes + row.count * row.nbytes
        assert 0 < row.finished <= row.count  # what follows the last step has not been waited for
    counted = {
        (name, verb): (traffic.calls, traffic.buffer_bytes)
        for name, counter in counters.items()
        if counter.size > 1
        for verb, traffic in counter.counts().items()
    }
    engine.close()
    return [logged, counted]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_log_says_what_counters_say(ranks2: RankPool, stage: int) -> None:
    for logged, counted in ranks2.run(count_both_ways, stage, {}):
        assert logged == counted
        assert any(verb in ("all_reduce", "reduce_scatter") for _, verb in logged)


def test_groups_of_ranks_are_logged_each(ranks4: RankPool) -> None:
    for logged, counted in ranks4.run(count_both_ways, 3, {"mics_shard_size": 2}):
        assert logged == counted
        assert {name for name, _ in logged} == {"gather", "reduce", "replicate"}


def summarise(rank: int, world: int, logger: dict[str, Any], late: float, **zero: Any) -> dict[str, Any]:
    """A run in which the last rank comes late to each step by `late` seconds."""
    torch.manual_seed(0)
    engine, *_ = zeroshard.initialize(model=tiny(), config=settings(3, logger, **zero))
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        for step in range(3):
            if rank == world - 1:
                time.sleep(late)
            engine.backward(engine(tiny_batch(step, 0, rank)))
            engine.step()
        told = log_summary(show_straggler=True, return_dict=True)
    assert told is not None
    counts = logged_operations()
    engine.close()
    after = log_summary(return_dict=True)
    assert after is not None
    reset_log()
    return {"text": heard.getvalue(), "dict": told, "counts": counts, "after": after, "empty": not has_log()}


def test_the_straggler_is_named_and_the_others_have_waited(ranks2: RankPool) -> None:
    first, last = ranks2.run(summarise, {"enabled": True}, 0.05)
    for found in (first, last):
        told = found["dict"]
        assert set(told["summary"]) == {"all_gather", "reduce_scatter", "sum_to_host", "broadcast"}
        assert found["counts"] == {
            name: sum(row["count"] for row in sizes.values()) for name, sizes in told["summary"].items()
        }
        for name, sizes in told["summary"].items():
            for nbytes, row in sizes.items():
                waited = told["straggler_analysis"][name][nbytes]
                assert row["msg_size_bytes"] == nbytes
                assert waited["count"] == row["count"]
                assert row["total_blocked_ms"] <= row["total_latency_ms"]
                assert row["avg_latency_ms"] == pytest.approx(row["total_latency_ms"] / row["count"])
                assert row["busbw_avg_gbps"] == pytest.approx(
                    row["tput_avg_gbps"] * (0.5 if name in ("all_gather", "reduce_scatter") else 1)
                )
                total = waited["total_comm_lat_ms"] + waited["total_straggler_ms"]
                assert total == pytest.approx(row["total_blocked_ms"])
        after = found["after"]["summary"]  # the log outlives the engine, which gathered once more to close
        assert after["reduce_scatter"] == told["summary"]["reduce_scatter"]
        assert found["after"]["straggler_analysis"] is None
        assert found["empty"]
    waited = [
        sum(
            row["total_straggler_ms"]
            for sizes in found["dict"]["straggler_analysis"].values()
            for row in sizes.values()
        )
        for found in (first, last)
    ]
    assert waited[0] > 100  # of 150
    assert waited[0] > 4 * waited[1]
    lines = first["text"].splitlines()
    assert lines[0].split()[:4] == ["operation", "size", "ranks", "count"]
    assert lines[0].rstrip().endswith("slowest")
    worst = max(lines[1:-1], key=lambda line: float(line.split()[-3]))
    assert worst.split()[-1] == "1"
    assert last["text"] == ""


def test_who_waits_for_whom_inside_groups(ranks4: RankPool) -> None:
    found = ranks4.run(summarise, {"enabled": True}, 0.05, mics_shard_size=2)
    of_replicas = [result["dict"]["straggler_analysis"]["all_gather"] for result in found]
    assert all(row["slowest_rank"] in (2, 3) for sizes in of_replicas[2:] for row in sizes.values())
    assert all(row["slowest_rank"] in (0, 1) for sizes in of_replicas[:2] for row in sizes.values())


def test_single_operations_at_once(ranks2: RankPool) -> None:
    logger = {
        "enabled": True,
        "prof_all": False,
        "prof_ops": ["reduce_scatter"],
        "verbose": True,
        "debug": True,
    }
    first, last = ranks2.run(summarise, logger, 0.0)
    assert all(name.startswith("reduce_scatter in ") for name in first["counts"])
    assert any("'blocks.0' (blocks.0." in name for name in first["counts"])
    said = [line for line in first["text"].splitlines() if line.startswith("comm reduce_scatter in ")]
    assert len(said) == sum(first["counts"].values())
    assert "busbw" in said[0]
    assert not last["text"]


def switched(rank: int, world: int) -> dict[str, Any]:
    """What is around the collectives, with and without the log; and the losses."""
    found: dict[str, Any] = {}

    def run(name: str, logger: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        engine, *_ = zeroshard.initialize(model=tiny(), config=settings(3, logger))
        groups = engine._states.groups
        found[name] = type(groups.gather), type(groups.reduce), type(groups.replicate), train(engine, rank)
        engine.close()

    run("off", None)
    run("in the config", {"enabled": True})
    run("not any more", {"enabled": False})
    configure_log()
    run("by the call", None)
    configure_log(enabled=False)
    run("off again", None)
    reset_log()
    found["left"] = len(LOG.groups)
    return found


def test_off_is_nothing_at_all_and_on_changes_no_number(ranks2: RankPool) -> None:
    for found in ranks2.run(switched):
        left = found.pop("left")
        assert left == 0
        for name, (gather, reduce, replicate, losses) in found.items():
            on = name in ("in the config", "by the call")
            assert gather is reduce is (TimedCollectives if on else RecordingCollectives)
            assert replicate is not TimedCollectives  # of one rank
            assert losses == found["off"][-1]


def train_two(rank: int, world: int) -> tuple[list[float], list[float]]:
    """A second engine is made while the first one is at work, both logged."""
    first, second = (
        zeroshard.initialize(model=tiny(), config=settings(3, {"enabled": True}))[0] for _ in range(2)
    )
    losses = train(first, rank), train(second, rank)
    first.close()
    second.close()
    reset_log()
    return losses


def test_a_second_engine_leaves_the_groups_of_the_first_alone(ranks2: RankPool) -> None:
    for first, second in ranks2.run(train_two):
        assert len(first) == len(second) == 3


def disagree(rank: int, world: int) -> dict[str, Any]:
    """Ranks that have not logged the same are not compared, and do not wait for each other."""
    model = nn.Linear(4, 4)
    engine, *_ = zeroshard.initialize(model=model, config=settings(1, {"enabled": True}))
    if rank == 0:
        reset_log()
    told = log_summary(show_straggler=True, return_dict=True)
    engine.close()
    reset_log()
    assert told is not None
    return told


def test_ranks_that_logged_different_things(ranks2: RankPool) -> None:
    first, last = ranks2.run(disagree)
    assert first["summary"] == {}
    assert all(row["count"] == 0 for sizes in last["straggler_analysis"].values() for row in sizes.values())
