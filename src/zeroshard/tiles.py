"""What an optimizer works on at once: its groups, cut into tiles while it steps.

An optimizer of torch goes from group to group, collects a group's gradients and runs its kernels over them; what
these need besides (fp32 gradients of a 16-bit model, the foreach kernels' intermediate results) is as large as the
group. With `sub_group_size`, the optimizer finds in place of a group several of it, each with the same options
and a run of its parameters, and 16-bit gradients are made fp32 one tile at a time.

Example, limit 10, a group of slices of 4, 8, 3 and 20 elements: tiles of (4, 8) and (3, 20). A tile ends with the
slice that reaches the limit, so it is smaller than the limit and its last slice together.

Only while `step` runs: schedulers, checkpoints and users see the groups that they made. It is for optimizers that
treat groups apart and write nothing into them, as those of torch.optim (listed in `optimizer`) and of
zeroshard.optimizers do. A subclass, anybody else's, and one with step hooks of the user's, which would see the
tiles and could edit gradients that are soon made anew, keep their groups whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard import optimizers
from zeroshard.gradients import GradientBuffer, ShardSlice
from zeroshard.optimizer import ELEMENTWISE, WHOLE

__all__ = ["Tiles", "cut"]

_KNOWN = {
    getattr(module, name, None)
    for module, names in ((torch.optim, ELEMENTWISE | WHOLE), (optimizers, optimizers.__all__))
    for name in names
} - {None}


def cut(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Runs of places, each up to the size with which it reaches `limit`."""
    first = held = 0
    for place, size in enumerate(sizes):
        held += size
        if held >= limit:
            yield range(first, place + 1)
            first, held = place + 1, 0
    if first < len(sizes):
        yield range(first, len(sizes))


def _tiles(groups: Sequence[dict[str, Any]], limit: int) -> Iterator[dict[str, Any]]:
    for group in groups:
        params: list[ShardSlice] = group["params"]
        for run in cut([part.numel() for part in params], limit):
            yield {**group, "params": params[run.start : run.stop]}


class Tiles:
    """The tiles of one engine's optimizer."""

    def __init__(self, limit: int) -> None:
        """`limit`: elements of this rank's slices."""
        self.limit = limit
        self.peak = 0
        """Bytes of fp32 gradients made from 16-bit ones and there at once, the most so far."""
        self._cut: tuple[Optimizer, list[dict[str, Any]]] | None = None
        """The optimizer at work, and its groups."""
        self._tile_of: dict[tuple[GradientBuffer, int], int] = {}
        self._current = -1
        self._made: dict[tuple[GradientBuffer, int], Tensor] = {}

    @staticmethod
    def suit(optimizer: Optimizer) -> bool:
        """Its groups can be cut. The engine's own hooks are one before and one after."""
        own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
        module = sys.modules[Optimizer.__module__]
        everybodys = [getattr(module, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
        alone = all(hooks is not None and len(hooks) <= 1 for hooks in own) and not any(everybodys)
        return type(optimizer) in _KNOWN and alone

    def open(self, optimizer: Optimizer, gradients: Sequence[GradientBuffer], factor: float) -> None:
        """`step` begins: show `gradients` to it, in the dtype of the masters and times `factor`."""
        self.close()  # a step that raised
        groups = optimizer.param_groups
        owned = sum(part.numel() for group in groups for part in group["params"])
        cuts = owned > self.limit and self.suit(optimizer)
        if cuts:
            self._cut = optimizer, groups
            optimizer.param_groups = tiles = list(_tiles(groups, self.limit))
            self._tile_of = {
                (part._gradients, part._index): number
                for number, tile in enumerate(tiles)
                for part in tile["params"]
                if part._gradients is not None
            }
        widened = 0
        for gradient in gradients:
            gradient.updating = True
            if cuts and gradient.is_narrow:
                gradient.lens = self._lens(gradient, factor)
            else:
                is_narrow = gradient.is_narrow
                total = gradient.promote(factor)
                widened += total.nbytes if is_narrow and total is not None else 0
        self.peak = max(self.peak, widened)

    def close(self) -> None:
        """`step` is over: the groups are whole again."""
        if self._cut is not None:
            optimizer, groups = self._cut
            optimizer.param_groups = groups
            self._cut = None
        self._tile_of, self._made, self._current = {}, {}, -1

    def _lens(self, gradient: GradientBuffer, factor: float) -> Callable[[int], Tensor]:
        """Of the tile at work what was made is kept, since optimizers read a `grad` several times."""

        def look(index: int) -> Tensor:
            key = gradient, index
            tile = self._tile_of.get(key, -1)
            if tile != self._current:
                self._made, self._current = {}, tile
            if key not in self._made:
                self._made[key] = gradient.widened(index, factor)
                self.peak = max(self.peak, sum(made.nbytes for made in self._made.values()))
            return self._made[key]

        return look
