"""The gradients of one bucket: collected flat, reduced, accumulated, and shown to the optimizer.

    collect     a parameter's gradient arrives in backward and is copied once into `local` (the full bucket)
    reduce      `local` is reduce-scattered (all-reduced where nothing is sharded) into this rank's part
    average     with several shard groups (MiCS): the parts of the window are averaged among the replicas, when a
                step is due, so that nothing else crosses groups
    accumulate  the reduced part is kept, or added to what earlier backwards of the window left
    show        the optimizer's slices read it through their `.grad`, without the loss scale

The first gradient of a window is kept in the dtype it came in; a second one promotes the sum to fp32 (or
`accumulate_dtype`), so small 16-bit terms are not lost and a run without accumulation pays nothing.
A parameter without a gradient in the window has none here either: no stale values, no update, no decay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zeroshard.comm import Collectives, Work
from zeroshard.layout import BucketLayout, Piece
from zeroshard.precision import squared_norm

__all__ = ["GradientBuffer", "ShardSlice", "slices_of"]


class GradientBuffer:
    """Gradients of a trainable bucket."""

    def __init__(
        self,
        layout: BucketLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard_group: Collectives,
        replicate_group: Collectives,
        keep_local: bool,
        reduce_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None,
        wide_masters: bool = True,
        before_reduce: float = 1.0,
        after_reduce: float = 1.0,
    ) -> None:
        """`dtype` is the parameters'. `keep_local`: the full gradient stays allocated (stages 0 and 1).

        `before_reduce` and `after_reduce` are factors around the reduction, which averages.
        """
        self.layout = layout
        self.arrived: dict[int, set[int]] = {}
        """By running backward (autograd graph task): slots whose gradient came in it."""
        self.had: set[int] = set()
        """Slots that got a gradient on this rank since the last step."""
        self.updating = False
        """The optimizer is at work: it sees only gradients it has elements of."""
        self.lens: Callable[[int], Tensor] | None = None
        """Through which the optimizer at work sees this rank's part of a slot, where they are not all promoted."""
        self.scale = 1.0
        """What the gradients of this window are multiplied by: the loss scale they were made with."""
        self.shard: Tensor | None = None
        """The reduced and accumulated gradient of this rank's part; None when there is none."""
        self.has_replicas = layout.shards > 1 and replicate_group.size > 1
        """What is reduced is the shard group's alone until it is averaged."""
        self._is_scaled = True
        """`shard` still has the factor `scale`."""
        self.device = device
        self._before_reduce, self._after_reduce = before_reduce, after_reduce
        self._shard_group, self._replicate_group = shard_group, replicate_group
        self._keep_local = keep_local
        self._reduce_dtype = reduce_dtype or dtype
        self._accumulate_dtype = accumulate_dtype
        self._optimizer_dtype = torch.float32 if dtype.itemsize < 4 and wide_masters else dtype
        self._sum_dtype = accumulate_dtype or self._optimizer_dtype
        self._dtype = dtype
        self._own = layout.shard(shard_group.rank)
        self._pieces = layout.pieces(shard_group.rank)
        self._local: Tensor | None = None
        self._written: set[int] = set()
        self._work: tuple[Work, Tensor, Tensor] | None = None
        self._partial: Tensor | None = None
        """Reduced in the shard group, not yet averaged over replicas."""
        self._average: tuple[Work, Tensor] | None = None
        self._stand_ins: dict[int, Tensor] = {}
        """What was shown for gradients that are not reduced yet, to see whether they were zeroed."""
        if keep_local:
            self._local = self._allocate(accumulate_dtype or dtype)

    @property
    def has_local(self) -> bool:
        """Gradients are waiting to be reduced."""
        return bool(self._written)

    def collect(self, index: int, gradient: Tensor, task: int) -> bool:
        """Take slot `index`'s gradient: copied when it is the first since the last reduction, else added.

        True when it is the last one of the bucket in this backward, the graph task `task`.
        """
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        slot = self.layout.slots[index]
        self._drop_zeroed()
        with torch.no_grad():
            local = self._writable_local()
            if index in self._written:
                local = self._promoted(local)
                local[slot.offset : slot.end].view(slot.spec.shape).add_(gradient)
            else:
                local[slot.offset : slot.end].view(slot.spec.shape).copy_(gradient)
                self._written.add(index)
        self.had.add(index)
        arrived = self.arrived.setdefault(task, set())
        arrived.add(index)
        if len(arrived) < len(self.layout.slots):
            return False
        del self.arrived[task]
        return True

    def launch_reduce(self) -> None:
        """Start the reduction of what was collected, zeros for slots that got nothing.

        Every rank of the group must call it, in the same order of buckets, with or without gradients.
        """
        self.finish_reduce()
        self._drop_zeroed()
        with torch.no_grad():
            local = self._writable_local()
            for index, slot in enumerate(self.layout.slots):
                if index not in self._written:
                    local[slot.offset : slot.end].zero_()
            if local.dtype is not self._reduce_dtype:
                local = local.to(self._reduce_dtype)
            if self._before_reduce != 1.0:
                local.mul_(self._before_reduce)
            keep_in_place = self._keep_local and self.shard is None and local is self._local
            part = local[self._own]
            if self.layout.shards > 1 and not keep_in_place:
                part = torch.empty(self.layout.shard_numel, dtype=local.dtype, device=self.device)
            if self.layout.shards > 1:
                work = self._shard_group.reduce_scatter(part, local, average=True)
            else:
                work = self._replicate_group.all_reduce(part, average=True)
        self._work = (work, part, local)
        self._written = set()
        if not self._keep_local:
            self._local = None

    def finish_reduce(self) -> None:
        """Wait for the running reduction, if any, and accumulate its result."""
        if self._work is None:
            return
        work, part, _ = self._work
        self._work = None
        with torch.no_grad():
            work.wait()
            if not self.has_replicas:
                self._accumulate(part)
            elif self._partial is None:
                self._partial = part
            else:
                self._partial = self._partial.to(self._sum_dtype).add_(part)

    def launch_average(self) -> None:
        """Start averaging over replicas what the shard group has reduced since the last time.

        Every rank calls it, in the same order of buckets. Nothing to do where there are no replicas.
        """
        self.finish_average()
        if self._partial is not None:
            work = self._replicate_group.all_reduce(self._partial, average=True)
            self._average, self._partial = (work, self._partial), None

    def finish_average(self) -> None:
        """Wait for it, if it runs, and accumulate its result."""
        if self._average is None:
            return
        (work, part), self._average = self._average, None
        with torch.no_grad():
            work.wait()
            self._accumulate(part)

    def _accumulate(self, part: Tensor) -> None:
        if self._after_reduce != 1.0:
            part.mul_(self._after_reduce)
        if self.shard is None:
            self.shard, self._is_scaled = part, True
        else:
            unscale = 1.0 if self._is_scaled else 1.0 / self.scale
            self.shard = self.shard.to(self._sum_dtype).add_(part, alpha=unscale)

    def squared_norm(self) -> Tensor:
        """Of this rank's part, without the loss scale: a float64 scalar, not finite when an element is not."""
        if self.shard is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return squared_norm(self.shard) / (self.scale if self._is_scaled else 1.0) ** 2

    def promote(self, factor: float = 1.0) -> Tensor | None:
        """The accumulated gradient in the optimizer's dtype (fp32 for 16-bit parameters), without the loss
        scale, and from here on multiplied by `factor`."""
        if self.shard is None:
            return None
        if self._is_scaled:
            factor, self._is_scaled = factor / self.scale, False
        self.shard = self.shard.to(self._optimizer_dtype)
        if factor != 1.0:
            self.shard.mul_(factor)
        return self.shard

    @property
    def is_narrow(self) -> bool:
        """The accumulated gradient has fewer bits than the optimizer is to see."""
        return self.shard is not None and self.shard.dtype.itemsize < self._optimizer_dtype.itemsize

    def widened(self, index: int, factor: float) -> Tensor:
        """A copy of slot `index`'s gradient as `promote(factor)` would show it."""
        assert self.shard is not None
        piece = self._pieces[index]
        factor = factor / self.scale if self._is_scaled else factor
        return self.shard[piece.in_shard].to(self._optimizer_dtype).mul_(factor)

    def piece(self, index: int) -> Tensor | None:
        """Slot `index`'s gradient as far as this rank owns it, 1-D; None when the slot got none.

        One that is not reduced yet has no value to show. NaN stands in for it, so that `zero_grad` finds
        something to drop and nobody takes it for a gradient.
        """
        piece = self._pieces[index]
        if index not in self.had or (self.updating and not piece.numel):
            return None
        if self.lens is not None:
            return self.lens(index)
        total = self.promote()
        if total is not None:
            return total[piece.in_shard]
        if index not in self._stand_ins:
            self._stand_ins[index] = torch.full(
                (piece.numel,), torch.nan, dtype=self._optimizer_dtype, device=self.device
            )
        return self._stand_ins[index]

    def replace(self, index: int, part: Tensor) -> None:
        """Make `part` slot `index`'s reduced gradient here, also where there was none. All ranks call it."""
        total = self.promote()
        if total is None:
            total = torch.zeros(self.layout.shard_numel, dtype=self._optimizer_dtype, device=self.device)
            self.shard, self._is_scaled = total, False
        self.had.add(index)
        piece = self._pieces[index]
        total[piece.in_shard].copy_(part)

    def discard(self, index: int) -> None:
        """Slot `index`'s gradient is dropped (`zero_grad`)."""
        self.had.discard(index)
        self._written.discard(index)
        self._stand_ins.pop(index, None)
        piece = self._pieces[index]
        for sums in (self.shard, self._partial):
            if sums is not None and piece.numel:
                sums[piece.in_shard].zero_()
        if not self.had:
            self.shard = None

    def clear(self) -> None:
        """Drop everything: the window is over."""
        self.finish_reduce()
        self.finish_average()
        self.shard = self._partial = self.lens = None
        self.had = set()
        self.arrived = {}
        self._written = set()
        self._stand_ins = {}
        if not self._keep_local:
            self._local = None

    def nbytes(self) -> int:
        """Bytes held now; `shard` counts unless it is a part of the full gradient."""
        held = [tensor for tensor in (self._local, self.shard, self._partial) if tensor is not None]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())

    def _allocate(self, dtype: torch.dtype) -> Tensor:
        group = self._shard_group if self.layout.shards > 1 else self._replicate_group
        local = group.empty(self.layout.padded, dtype=dtype, device=self.device)
        for start, stop in self.layout.gaps():
            local[start:stop].zero_()
        return local

    def _writable_local(self) -> Tensor:
        """The full gradient, ready to take the next backward's."""
        self.finish_reduce()
        self.finish_average()
        if self._local is None:
            self._local = self._allocate(self._accumulate_dtype or self._dtype)
        elif not self._written:
            # What was reduced in place by an earlier backward of this window is about to be overwritten.
            self.shard, self._partial = self._kept(self.shard), self._kept(self._partial)
        return self._local

    def _drop_zeroed(self) -> None:
        """`zero_grad(set_to_none=False)` writes zeros into what it was shown."""
        for index, shown in list(self._stand_ins.items()):
            if shown._version and not shown.isnan().any():
                self.discard(index)

    def _kept(self, sums: Tensor | None) -> Tensor | None:
        """`sums`, where it does not lie in `local`."""
        assert self._local is not None
        if sums is None or sums.untyped_storage()._cdata != self._local.untyped_storage()._cdata:
            return sums
        return sums.clone()

    def _promoted(self, local: Tensor) -> Tensor:
        """`local` in the dtype sums are made in; it keeps that dtype for the steps to come."""
        if local.dtype is not self._sum_dtype:
            self._accumulate_dtype = self._sum_dtype
            wide = self._allocate(self._sum_dtype)
            wide.copy_(local)
            self._local = local = wide
        return local


class ShardSlice(Tensor):
    """What the optimizer sees of one parameter: this rank's elements of its master, with a live `.grad`.

    It has the parameter's own shape when this rank holds all of it (stage 0, one rank, whole-parameter
    ownership), else it is 1-D, possibly with 0 elements. A leaf that requires grad, like any parameter; a
    class that tensors of any kind (also fake ones) take on.
    """

    start: int
    """Where this rank's elements begin in the flattened parameter."""
    _gradients: GradientBuffer | None
    _index: int

    @staticmethod
    def of(data: Tensor, piece: Piece, gradients: GradientBuffer | None, index: int) -> ShardSlice:
        """A slice over `data` (1-D, the master shard, shared memory). Frozen without `gradients`."""
        part = data.detach()[piece.in_shard]
        if piece.is_whole:
            part = part.view(piece.slot.spec.shape)
        part.requires_grad_(gradients is not None)
        part.__class__ = _slice_class(type(part))
        assert isinstance(part, ShardSlice)
        part._gradients, part._index, part.start = gradients, index, piece.start
        return part

    def train(self, data: Tensor, piece: Piece, gradients: GradientBuffer) -> None:
        """A frozen slice becomes one over `data`, in place: optimizers have it already."""
        part = data.detach()[piece.in_shard]
        self.data = part.view(self.shape)
        self._gradients = gradients
        self.requires_grad_()

    @property
    def grad(self) -> Tensor | None:
        """The gradient as accumulated so far. An optimizer at work sees none for a slice of 0 elements."""
        if self._gradients is None:
            return None
        gradient = self._gradients.piece(self._index)
        return None if gradient is None else gradient.view(self.shape)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._gradients is None:
            return
        if value is None:
            self._gradients.discard(self._index)
            return
        current = self.grad
        if current is None:
            raise ValueError(
                f"a gradient of shape {tuple(value.shape)} was assigned to a parameter that has none in this "
                f"window; assign before backward is not supported on a sharded parameter"
            )
        current.copy_(value)


@functools.cache
def _slice_class(kind: type[Tensor]) -> type[ShardSlice]:
    """`ShardSlice` for plain tensors and for tensor subclasses, with no dispatch of its own in the way."""
    own = {"__torch_function__": torch._C._disabled_torch_function_impl}
    return type("ShardSlice", (ShardSlice,) if kind is Tensor else (ShardSlice, kind), own)


def slices_of(
    gradients: GradientBuffer | None, master: Tensor, pieces: Sequence[Piece]
) -> tuple[ShardSlice, ...]:
    """One slice per slot, over `master`."""
    return tuple(ShardSlice.of(master, piece, gradients, index) for index, piece in enumerate(pieces))
