"""What a stage means: a handful of numbers that the planning functions take as arguments.

    stage   states sharded over    parameters freed after use    gradients reduced
    0       1 rank (replicated)    no                            at the boundary, all-reduce
    1       all ranks              no                            at the boundary, reduce-scatter
    2       all ranks              no                            every backward, reduce-scatter
    3       all ranks              yes                           every backward, reduce-scatter

Two axes go with it, each a number of consecutive ranks:

    MiCS, `mics_shard_size`          states are sharded over so many ranks instead of all, and the groups are
                                     replicas of each other: gathers stay inside a group, and between groups only
                                     the gradient of a shard is averaged, at the boundary
    hpZ, `zero_hpz_partition_size`   the first gather after a step goes over all ranks of the shard group and leaves
                                     each one with a second, larger shard; later gathers read those, in groups of
                                     so many ranks

Nothing else in the code base asks for the stage: it asks for the property.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from zeroshard.errors import ConfigError

__all__ = ["BYTES_OF", "Policy"]

BYTES_OF = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by torch's name of the dtype (without the `torch.` prefix)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How states are spread and when they move. Sizes are in elements unless said otherwise."""

    stage: int
    shard_size: int
    """Ranks that share one copy of the states (1 = every rank has its own)."""
    replicate_size: int
    """Copies of that shard group; shard_size * replicate_size = data-parallel world."""
    secondary_size: int = 1
    """Ranks that share a second copy of gathered parameters, a divisor of shard_size (1 = there is none)."""
    reduce_every_backward: bool
    free_after_use: bool
    reduce_dtype: str | None = None
    """The dtype gradients travel in; None is the parameter's."""
    accumulate_dtype: str | None = None
    """The dtype gradients are summed in over micro-batches; None is fp32 from the second one on."""
    before_reduce: float = 1.0
    """Gradients are multiplied by it before they are averaged over ranks (so that fp16 sums do not overflow) ..."""
    after_reduce: float = 1.0
    """... and by this afterwards."""
    wide_masters: bool = True
    """16-bit parameters have fp32 masters; else the optimizer updates the 16-bit values themselves."""
    bucket_size: int = 500_000_000
    """Ceiling of a bucket of resident parameters (`reduce_bucket_size`)."""
    persistence_threshold: int = 100_000
    """Under `free_after_use`, parameters of at most this many elements are never freed."""
    model_persistence_threshold: int = sys.maxsize
    """Cap on the sum of elements that are never freed for being small."""
    max_live: int = 1_000_000_000
    """Gathered elements beyond which nothing is gathered ahead (`stage3_max_live_parameters`)."""
    prefetch: int = 50_000_000
    """Elements gathered ahead of use (`stage3_prefetch_bucket_size`); 0 turns it off."""
    max_reuse_distance: int = 1_000_000_000
    """Keep a bucket that is used again within this many elements (`stage3_max_reuse_distance`)."""

    tile: int = 1_000_000_000
    """Elements of this rank's slices that the optimizer works on at once (`sub_group_size`)."""

    @classmethod
    def of_stage(cls, stage: int, world: int, *, mics: int = 0, hpz: int = 1, **sizes: object) -> Policy:
        """The policy of ZeRO `stage` on `world` data-parallel ranks; `sizes` override the defaults.

        `mics`: ranks of a shard group, all for 0 or less. `hpz`: ranks that share a second copy of the
        parameters; 0 and 1 are none, and so is the whole shard group, whose gathers it would not change.

        Raises ConfigError where the ranks cannot be cut into groups of that size.
        """
        shard = world if stage >= 1 else 1
        if mics > 0 and stage >= 1:
            _check_groups("mics_shard_size", mics, world, f"the {world} ranks of the run")
            shard = mics
        secondary = min(hpz, shard) if stage >= 3 else 1
        if secondary > 1:
            whose = "the run" if shard == world else "a shard group"
            _check_groups("zero_hpz_partition_size", secondary, shard, f"the {shard} ranks of {whose}")
        return cls(
            stage=stage,
            shard_size=shard,
            replicate_size=world // shard,
            secondary_size=secondary if 1 < secondary < shard else 1,
            reduce_every_backward=stage >= 2,
            free_after_use=stage >= 3,
            **sizes,  # type: ignore[arg-type]
        )

    @property
    def world(self) -> int:
        return self.shard_size * self.replicate_size

    @property
    def axes(self) -> str:
        """How the ranks are grouped, in words; nothing where they are not."""
        parts = []
        if 1 < self.replicate_size < self.world:
            parts.append(f"{self.replicate_size} replicas of shard groups of {self.shard_size} (MiCS)")
        if self.secondary_size > 1:
            parts.append(f"second shards in groups of {self.secondary_size} (hpZ)")
        return ", ".join(parts)


def _check_groups(key: str, size: int, ranks: int, whole: str) -> None:
    if ranks % size == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
    raise ConfigError(
        f"zero_optimization.{key} = {size}: {whole} cannot be cut into groups of {size}; choose one of {divisors}"
    )
