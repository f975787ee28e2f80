"""What is told about an engine's collectives: which bucket one serves, what is frozen, how long they take."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import nn

from zeroshard.comm import Collectives, CommsLog, TimedCollectives, labelled
from zeroshard.layout import BucketLayout, Layout
from zeroshard.materialize import Groups
from zeroshard.wording import first_few

__all__ = ["groups_for", "tell_about", "timed"]


def groups_for(bucket: BucketLayout, groups: Groups) -> Groups:
    """`groups`, whose collectives are recorded as those of `bucket`."""
    label = f"{bucket.name!r} ({first_few([slot.name for slot in bucket.slots], 3)})"
    return _wrapped(groups, lambda name, group: labelled(group, label))


def timed(groups: Groups, log: CommsLog) -> Groups:
    """`groups`, whose collectives are written into `log`; a group of one rank has none."""
    return _wrapped(
        groups, lambda name, group: TimedCollectives(group, log, name) if group.size > 1 else group
    )


def _wrapped(groups: Groups, wrap: Callable[[str, Collectives], Collectives]) -> Groups:
    made = {
        field.name: wrap(field.name, group)
        for field in fields(groups)
        if isinstance(group := getattr(groups, field.name), Collectives)
    }
    return replace(groups, **made)  # type: ignore[arg-type]


def tell_about(model: nn.Module, layout: Layout, groups: Groups) -> None:
    """Let the records of `groups` look up what `model` trains, when they are asked."""
    model_ref = weakref.ref(model)
    trained = [slot.name for bucket in layout.buckets if bucket.trainable for slot in bucket.slots]

    def facts() -> tuple[tuple[str, ...], bool]:
        module = model_ref()
        if module is None:
            return (), True
        with torch._C.DisableTorchFunctionSubclass():
            train = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        return tuple(name for name in trained if name not in train), module.training

    for field in fields(groups):
        record = getattr(
            getattr(groups, field.name), "record", None
        )  # of RecordingCollectives, wrapped or not
        if record is not None:
            record.facts = facts
