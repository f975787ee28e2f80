"""The sizes of the config as bounds of what really happens, and memory that does not grow with the steps."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import features
from pairs import STAGES, Net, config, momentum
from test_properties import Drawn, Shape, batch, shapes
from torch import Tensor

import zeroshard
from zeroshard.guard import Status
from zeroshard.testing import FP32_TOLERANCE, RankPool
from zeroshard.testing.parity import SMALLEST_SCALE
from zeroshard.trace import Action, Kind

limits = st.fixed_dictionaries(
    {
        "stage3_param_persistence_threshold": st.sampled_from([0, 10]),
        "stage3_model_persistence_threshold": st.sampled_from([20, 1000]),
        "stage3_max_live_parameters": st.sampled_from([0, 100, 300, 1_000_000]),
        "stage3_prefetch_bucket_size": st.sampled_from([0, 50, 1_000_000]),
        "stage3_max_reuse_distance": st.sampled_from([0, 100, 1_000_000]),
        "sub_group_size": st.sampled_from([1, 30, 1_000_000]),
    }
)


class Watch:
    """Looks at every gather of an executor, and remembers where a bound did not hold."""

    def __init__(self, engine: Any, zero: dict[str, int]) -> None:
        self.executor, self.buffers = engine.executor, engine._states.buffers
        self.max_live = zero["stage3_max_live_parameters"]
        self.prefetch = zero["stage3_prefetch_bucket_size"]
        self.broken: list[str] = []
        self.executor.on_action = self.see

    def see(self, action: Action) -> None:
        """Called before the action runs."""
        if action.kind is not Kind.GATHER or self.buffers[action.bucket].is_live:
            return
        live = [b for b in self.buffers if b.is_live and not b.layout.resident] + [
            self.buffers[action.bucket]
        ]
        uses = [self.executor.uses[b.layout.index] for b in live]
        pinned = [b for b, use in zip(live, uses, strict=True) if use.pinned]
        open_ = [b for b, use in zip(live, uses, strict=True) if use.is_open or b is live[-1]]
        # What autograd needs until the step, and no plan knows of, comes on top.
        bound = max(self.max_live, elements(open_)) + elements(pinned)
        if elements(live) > bound:
            self.broken.append(f"{action}: {elements(live)} gathered, {elements(open_)} in use")
        flying = [b for b in live[:-1] if b.status is Status.INFLIGHT] + live[-1:]
        if elements(flying) > self.prefetch + max(b.layout.padded for b in flying):
            self.broken.append(f"{action}: {elements(flying)} in flight")


def elements(buffers: list[Any]) -> int:
    return sum(buffer.layout.padded for buffer in buffers)


def bounded(rank: int, world: int, shape: Shape, zero: dict[str, int]) -> tuple[list[str], float]:
    """Bounds that broke; the largest difference of the weights from plain PyTorch, relative to their scale."""
    torch.manual_seed(0)
    reference = Drawn(shape)
    model = copy.deepcopy(reference)
    engine, _, _, _ = zeroshard.initialize(
        model=model, optimizer=momentum(model), config=config(3, zero=zero, gradient_clipping=0)
    )
    watch = Watch(engine, zero)
    expected = momentum(reference)
    for step in range(4):
        skips = step == 2
        engine.backward(engine(batch(step, 0, rank), skips))
        with torch.no_grad():
            engine(batch(9, 0, 0))
        engine.step()
        for at in range(world):
            (reference(batch(step, 0, at), skips) / world).backward()
        expected.step()
        expected.zero_grad()
    persistent = sum(b.layout.numel for b in engine._states.buffers if b.layout.resident)
    if persistent > zero["stage3_model_persistence_threshold"]:
        watch.broken.append(f"{persistent} elements persist")
    executor = engine.executor
    if executor.peak_gathered > executor.paths.predicted_peak():
        watch.broken.append(
            f"{executor.peak_gathered} bytes gathered, {executor.paths.predicted_peak()} predicted"
        )
    engine.close()
    worst = 0.0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if ours.numel():
            scale = max(float(theirs.detach().abs().max()), SMALLEST_SCALE)
            worst = max(worst, float((ours - theirs).detach().abs().max()) / scale)
    return watch.broken, worst


@settings(
    max_examples=8,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(shape=shapes, zero=limits)
def test_the_sizes_are_bounds_of_what_runs(ranks2: RankPool, shape: Shape, zero: dict[str, int]) -> None:
    for broken, error in ranks2.run(bounded, shape, zero):
        assert not broken
        assert error <= FP32_TOLERANCE


# ---- growth ---------------------------------------------------------------------------------------------


class Newborn:
    """What Python knows of tensors that were not there when this was made."""

    def __init__(self) -> None:
        self.before = [weakref.ref(tensor) for tensor in self._all()]

    @staticmethod
    def _all() -> list[Tensor]:
        gc.collect()
        return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]

    def count(self) -> tuple[int, int]:
        """(tensors, bytes of their storages)."""
        old = {id(ref()) for ref in self.before}
        tensors = [tensor for tensor in self._all() if id(tensor) not in old]
        with torch._C.DisableTorchFunctionSubclass():  # also of what is sharded
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return len(tensors), sum(storages.values())


def growth(rank: int, world: int, stage: int) -> list[tuple[int, int]]:
    """What is alive after steps 3 and 20 of a student that learns from a teacher, with evaluations in between."""
    newborn = Newborn()
    torch.manual_seed(0)
    student, teacher = Net(), Net().requires_grad_(False)
    more = {"gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    taught, _, _, _ = zeroshard.initialize(
        model=student, optimizer=momentum(student), config=config(stage, **more)
    )
    teaches, _, _, _ = zeroshard.initialize(model=teacher, config=config(stage, bf16={"enabled": True}))
    found = []
    for step in range(1, 21):
        for micro in range(2):
            x = features(step, micro, rank)
            with torch.no_grad():
                target = teaches(x)
            loss = (taught(x) - target).float().square().mean()
            taught.backward(loss)
            taught.step()
        with torch.no_grad():
            taught(features(0, 0, 0))
        del loss, target, x
        if step in (3, 20):
            found.append(newborn.count())
    taught.close()
    teaches.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_as_many_tensors_live_after_step_20_as_after_step_3(ranks2: RankPool, stage: int) -> None:
    """I 97, with two engines at once."""
    for early, late in ranks2.run(growth, stage):
        assert early == late


@pytest.mark.parametrize("zero", [{"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}])
def test_nor_with_groups(ranks4: RankPool, zero: dict[str, int]) -> None:
    for early, late in ranks4.run(growth_in_groups, zero):
        assert early == late


def growth_in_groups(rank: int, world: int, zero: dict[str, int]) -> list[tuple[int, int]]:
    newborn = Newborn()
    torch.manual_seed(0)
    model = Net()
    engine, _, _, _ = zeroshard.initialize(
        model=model, optimizer=momentum(model), config=config(3, zero=zero)
    )
    found = []
    for step in range(1, 13):
        engine.backward(engine(features(step, 0, rank)).square().mean())
        engine.step()
        if step in (3, 12):
            found.append(newborn.count())
    engine.close()
    return found
