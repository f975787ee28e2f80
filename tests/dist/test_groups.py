"""Shard groups (MiCS) and second shards (hpZ), four ranks as 2 x 2: the numbers of plain PyTorch from the first
step on, and which bytes cross groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import Odd, features, tokens
from pairs import Net, Pair, adamw, attempt, config, momentum
from torch import nn

import zeroshard
from zeroshard.assembly import build_engine, policy_of
from zeroshard.comm import CountingCollectives
from zeroshard.config import parse, resolve_batch
from zeroshard.initialization import open_groups
from zeroshard.optimizers import Lamb
from zeroshard.testing import FP32_TOLERANCE, RankPool, assert_parity
from zeroshard.trace import Kind
from zeroshard.world import join

MICS, HPZ = {"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}
FP32: dict[str, Any] = {}
BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "communication_data_type": "fp32"}
WINDOW = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=1e-2, eps=1e-3)


@pytest.mark.parametrize(
    ("groups", "stage", "precision", "window", "optimizer", "loop"),
    [
        (MICS, 3, FP32, {}, adamw, "managed"),
        (MICS, 3, FP32, WINDOW, sgd, "plain"),
        (MICS, 3, BF16, WINDOW, sgd, "managed"),
        (MICS, 2, FP16, WINDOW, sgd, "managed"),
        (MICS, 1, FP32, WINDOW, adamw, "no_sync"),
        (MICS, 3, FP32, {"gradient_accumulation_steps": 2}, lamb, "several_backwards"),
        (HPZ, 3, FP32, {}, adamw, "managed"),
        (HPZ, 3, FP32, WINDOW, sgd, "several_forwards"),
        (HPZ, 3, BF16, WINDOW, sgd, "managed"),
    ],
)
def test_the_numbers_are_those_of_plain_pytorch(
    ranks4: RankPool,
    groups: dict[str, int],
    stage: int,
    precision: dict[str, Any],
    window: dict[str, Any],
    optimizer: Any,
    loop: str,
) -> None:
    difference = assert_parity(
        Odd,
        tokens,
        config(stage, **precision, **window, zero=groups),
        optimizer_fn=optimizer,
        ranks=4,
        steps=3,
        pool=ranks4,
        loop=loop,
        tolerance=FP32_TOLERANCE,
    )
    losses = zip(difference.losses, difference.reference_losses, strict=True)
    assert all(ours == pytest.approx(theirs, rel=1e-5) for ours, theirs in losses)


def counted(zero: dict[str, Any]) -> tuple[Any, dict[str, CountingCollectives]]:
    """An engine of three blocks in windows of two micro-batches, and what its groups carry."""
    world = join()
    parsed = parse(config(3, gradient_accumulation_steps=2, zero=zero))
    batch = resolve_batch(None, 4, 2, world.size, world.size_origin)
    groups = open_groups(policy_of(parsed, batch, world.size), world)
    names = [name for name in ("gather", "reduce", "replicate", "secondary") if getattr(groups, name)]
    counters = {name: CountingCollectives(getattr(groups, name)) for name in names}
    torch.manual_seed(0)
    model = Net()
    engine = build_engine(model, parsed, batch, replace(groups, **counters), world.device, momentum(model))
    return engine, counters


def traffic(rank: int, world: int, zero: dict[str, Any]) -> dict[str, Any]:
    """By step, group and verb: (calls, bytes of the buffers); sizes of the buckets; gathers of a micro-batch."""
    engine, counters = counted(zero)
    found = []
    for step in range(3):
        for counter in counters.values():
            counter.reset()
        for micro in range(2):
            engine.backward(engine(features(step, micro, rank)).square().mean())
            engine.step()
        found.append(
            {
                (name, verb): (carried.calls, carried.buffer_bytes)
                for name, counter in counters.items()
                for verb, carried in counter.counts().items()
                if counter.size > 1
            }
        )
    buckets = [(bucket.padded, bucket.shard_numel) for bucket in engine.layout.buckets]
    gathers = [buckets[action.bucket][0] for action in engine.schedule.actions if action.kind is Kind.GATHER]
    used = [full for index, (full, _) in enumerate(buckets) if f" {index}F" in str(engine.schedule)]
    sizes = {name: counter.size for name, counter in counters.items()}
    engine.close()
    return {"steps": found, "buckets": buckets, "gathers": gathers, "used": used, "sizes": sizes}


def test_between_shard_groups_only_the_gradient_of_a_shard_is_averaged(ranks4: RankPool) -> None:
    for result in ranks4.run(traffic, MICS):
        assert result["sizes"] == {"gather": 2, "reduce": 2, "replicate": 2}
        buckets = result["buckets"]
        for step in result["steps"]:
            across = {verb: carried for (name, verb), carried in step.items() if name == "replicate"}
            # Once per window, whatever the micro-batches, and the shard of 1/2 only.
            assert across.pop("all_reduce") == (len(buckets), 4 * sum(shard for _, shard in buckets))
            assert set(across) == {"sum_to_host"}
            assert across["sum_to_host"][0] == 1
            assert step["reduce", "reduce_scatter"] == (
                2 * len(buckets),
                8 * sum(full for full, _ in buckets),
            )


def test_after_the_first_gather_of_a_step_second_shards_are_read(ranks4: RankPool) -> None:
    for result in ranks4.run(traffic, HPZ):
        assert result["sizes"] == {"gather": 4, "reduce": 4, "replicate": 1, "secondary": 2}
        used, gathers = result["used"], result["gathers"]
        for number, step in enumerate(result["steps"]):
            assert step["gather", "all_gather"] == (len(used), 4 * sum(used))
            if number:  # the first micro-batch is not planned
                near = (2 * len(gathers) - len(used), 4 * (2 * sum(gathers) - sum(used)))
                assert step["secondary", "all_gather"] == near
            assert {verb for name, verb in step if name == "secondary"} == {"all_gather"}


def changes(rank: int, world: int, zero: dict[str, Any]) -> dict[str, float]:
    """Weights change in every way there is while second shards hold the old ones; distances from plain PyTorch."""
    pair = Pair.of(rank, world, 3, zero=zero)
    frozen = [*pair.model.blocks[1].parameters()], [*pair.reference.blocks[1].parameters()]
    found = {}

    def agree(when: str) -> None:
        with torch.no_grad():
            ours, theirs = pair.engine(features(9, 0, 0)), pair.reference(features(9, 0, 0))
        found[when] = float((ours - theirs).abs().max())

    def backward(step: int) -> None:
        pair.engine.backward(pair.engine(features(step, 0, rank)).square().mean())
        pair.everybody(lambda net, at: net(features(step, 0, at)).square().mean())

    agree("before the first step")
    backward(0)
    agree("in evaluation between backward and step")
    pair.engine.step()
    pair.update()
    agree("after a step")
    for values in frozen:
        for parameter in values:
            parameter.requires_grad_(False)
    backward(1)
    with pair.engine.gathered(pair.model, modifier_rank=3), torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.mul_(2.0 if rank == 3 else 0.0)
    with torch.no_grad():
        for parameter in pair.reference.parameters():
            parameter.mul_(2.0)
    agree("after an edit")
    pair.engine.step()
    pair.update()
    weight, expected = pair.model.blocks[0].up.weight, pair.reference.blocks[0].up.weight
    agree("after the step")
    zeroshard.safe_set_full_fp32_param(weight, torch.ones(weight.shape))
    with torch.no_grad():
        expected.fill_(1.0)
    agree("after setting a value")
    for values in frozen:
        for parameter in values:
            parameter.requires_grad_(True)
    backward(2)
    found["gradient"] = float(
        (zeroshard.safe_get_full_grad(weight) - expected.grad).abs().max()  # type: ignore[operator]
    )
    pair.engine.step()
    pair.update()
    agree("after unfreezing")
    found["left behind"] = pair.finish()
    return found


@pytest.mark.parametrize("zero", [HPZ, MICS, MICS | {"stage3_param_persistence_threshold": 10}])
def test_no_copy_is_ever_stale(ranks4: RankPool, zero: dict[str, int]) -> None:
    for found in ranks4.run(changes, zero):
        assert max(found.values()) <= 2e-6, found


def bills(rank: int, world: int, zero: dict[str, Any]) -> list[tuple[str, int | None, int]]:
    engine, _ = counted(zero)
    engine.backward(engine(features(0, 0, rank)).square().mean())
    found = engine.memory()
    engine.close()
    return found


def test_the_bill_shows_both(ranks4: RankPool) -> None:
    by_axis = [{row[0]: row[1:] for row in ranks4.run(bills, zero)[0]} for zero in ({}, HPZ, MICS)]
    for bill in by_axis:
        predicted, measured = bill["parameters"]
        assert predicted == measured
    plain, second, halves = (bill["parameters"][0] for bill in by_axis)
    assert second == 3 * plain  # a quarter, and a half besides
    assert plain < halves <= 2 * plain  # a half; padding makes the quarters longer than they must be


def refused(rank: int, world: int, zero: dict[str, Any]) -> tuple[str, str]:
    return attempt(lambda: zeroshard.initialize(model=Net(), optimizer=None, config=config(3, zero=zero)))


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (
            {"mics_shard_size": 3},
            "zero_optimization.mics_shard_size = 3: the 4 ranks of the run cannot be cut into groups of 3; choose "
            "one of 1, 2, 4",
        ),
        ({"mics_shard_size": 8}, "mics_shard_size = 8"),
        ({"zero_hpz_partition_size": 3}, "zero_hpz_partition_size = 3: the 4 ranks of the run cannot be cut"),
    ],
)
def test_ranks_that_cannot_be_cut_are_told_everywhere(
    ranks4: RankPool, zero: dict[str, int], message: str
) -> None:
    for kind, text in ranks4.run(refused, zero):
        assert kind == "ConfigError"
        assert message in text
