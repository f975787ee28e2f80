"""The memory bill: what a rank will hold, by category, from the layout alone; and its shape when measured.

    stage   parameters        gradients     master + optimizer state (Adam, 16-bit parameters)
    0       2P                2P            12P
    1       2P                2P            12P/N
    2       2P                2P/N          12P/N
    3       2P/N + gathered   2P/N          12P/N

P parameters on N ranks (of a shard group, with MiCS), bytes; plus the padding the layout states, and with hpZ
2P/S for second shards in groups of S ranks. Gradients are those of one backward
(accumulation over micro-batches keeps fp32 instead); activations are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.layout import BucketLayout, Layout
from zeroshard.policy import BYTES_OF, Policy

__all__ = ["CATEGORIES", "MemoryBill", "predict_memory"]

CATEGORIES = ("parameters", "gradients", "master", "optimizer state", "gathered peak", "update peak")


@dataclass(frozen=True, kw_only=True)
class MemoryBill:
    """Bytes on one rank. `None` where a category cannot be known (an optimizer of unknown state)."""

    parameters: int
    gradients: int
    master: int
    optimizer_state: int | None
    gathered_peak: int | None
    update_peak: int | None = None
    """fp32 gradients that are made from 16-bit ones for the optimizer's step."""
    padding: int = 0
    """Bytes of `parameters` that are padding."""

    def rows(self) -> tuple[tuple[str, int | None], ...]:
        """(category, bytes), in the order of `CATEGORIES`."""
        states = (self.parameters, self.gradients, self.master, self.optimizer_state)
        return tuple(zip(CATEGORIES, (*states, self.gathered_peak, self.update_peak), strict=True))

    def __str__(self) -> str:
        known = [f"{name} {value / 1e9:.3f} GB" for name, value in self.rows() if value is not None]
        return ", ".join(known)

    @property
    def total(self) -> int:
        """All categories that are known; of the two peaks, which are not at the same time, the larger one."""
        peaks = (self.gathered_peak or 0, self.update_peak or 0)
        return sum(value for _, value in self.rows() if value is not None) - min(peaks)


def predict_memory(
    layout: Layout,
    policy: Policy,
    *,
    rank: int,
    state_elements: float | None,
    accumulates: bool,
    gathered_peak: int | None = None,
    tile: int | None = None,
) -> MemoryBill:
    """The bill of the rank that holds shard `rank` (ranks differ only in how much of a shard is padding).

    `state_elements`: optimizer state per master element (Adam 2, SGD with momentum 1), None if unknown.
    `accumulates`: several backwards before a step. `gathered_peak`: bytes, from the schedules. `tile`: elements
    that the optimizer works on at once, None is all.
    """
    trainable = [bucket for bucket in layout.buckets if bucket.trainable]
    owned = sum(
        piece.numel * _master_bytes(bucket, policy) for bucket in trainable for piece in bucket.pieces(rank)
    )
    separate = [bucket for bucket in trainable if BYTES_OF[bucket.dtype] < 4 and policy.wide_masters]
    return MemoryBill(
        parameters=sum(_parameter_bytes(bucket, policy) for bucket in layout.buckets),
        gradients=sum(_gradient_bytes(bucket, policy, accumulates) for bucket in trainable),
        master=sum(bucket.shard_numel * 4 for bucket in separate),
        optimizer_state=None if state_elements is None else int(owned * state_elements),
        gathered_peak=gathered_peak,
        update_peak=_update_peak(separate, policy, rank, accumulates, tile),
        padding=sum(
            held - held * bucket.numel // max(bucket.padded, 1)
            for bucket, held in ((bucket, _parameter_bytes(bucket, policy)) for bucket in layout.buckets)
        ),
    )


def _update_peak(
    separate: Sequence[BucketLayout], policy: Policy, rank: int, accumulates: bool, tile: int | None
) -> int:
    """Bytes. What was summed after its reduction, or reduced in fp32, is fp32 when the optimizer takes it."""
    narrow = [bucket for bucket in separate if BYTES_OF[policy.reduce_dtype or bucket.dtype] < 4]
    if (accumulates and policy.reduce_every_backward) or not narrow:
        return 0
    total = sum(bucket.shard_numel for bucket in narrow)
    owned = [piece.numel for bucket in narrow for piece in bucket.pieces(rank)]
    if tile is not None and sum(owned) > tile:
        total = min(tile + max(owned), total)
    return 4 * total


def _parameter_bytes(bucket: BucketLayout, policy: Policy) -> int:
    elements = bucket.padded if bucket.resident else bucket.shard_numel
    if policy.secondary_size > 1 and not bucket.resident:
        elements += bucket.padded // policy.secondary_size
    return elements * BYTES_OF[bucket.dtype]


def _master_bytes(bucket: BucketLayout, policy: Policy) -> int:
    return max(BYTES_OF[bucket.dtype], 4) if policy.wide_masters else BYTES_OF[bucket.dtype]


def _gradient_bytes(bucket: BucketLayout, policy: Policy, accumulates: bool) -> int:
    kept = _master_bytes(bucket, policy) if accumulates else BYTES_OF[bucket.dtype]
    wire = BYTES_OF[policy.reduce_dtype or bucket.dtype]
    if policy.reduce_every_backward:
        return bucket.shard_numel * (kept if accumulates else wire)
    # The full gradient stays; what was reduced is a part of it unless it travelled in another dtype.
    return bucket.padded * kept + (bucket.shard_numel * wire if wire != kept else 0)
