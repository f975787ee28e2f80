"""The gradients of one bucket: collected flat, reduced, accumulated, and shown to the optimizer.

    collect     a parameter's gradient arrives in backward and is copied once into `local` (the full bucket)
    reduce      `local` is reduce-scattered (all-reduced among replicas) into this rank's part
    accumulate  the reduced part is kept, or added to what earlier backwards of the window left
    show        the optimizer's slices read it through their `.grad`, without the loss scale

The first gradient of a window is kept in the dtype it came in; a second one promotes the sum to fp32 (or
`accumulate_dtype`), so small 16-bit terms are not lost and a run without accumulation pays nothing.
A parameter without a gradient in the window has none here either: no stale values, no update, no decay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.clock import Clock
from zeroshard.comm import Collectives, Work
from zeroshard.layout import BucketLayout, Piece
from zeroshard.precision import squared_norm

__all__ = ["GradientBuffer", "ReduceQueue", "ShardSlice", "slices_of"]

MAX_REDUCES = 2
"""Reductions in flight; the oldest is waited for before a third is launched, which bounds their memory."""


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
        self.arrived: set[int] = set()
        """Slots whose gradient came in the running backward."""
        self.had: set[int] = set()
        """Slots that got a gradient on this rank since the last step."""
        self.updating = False
        """The optimizer is at work: it sees only gradients it has elements of."""
        self.scale = 1.0
        """What the gradients of this window are multiplied by: the loss scale they were made with."""
        self.shard: Tensor | None = None
        """The reduced and accumulated gradient of this rank's part; None when there is none."""
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
        low = shard_group.rank * layout.shard_numel
        self._own = slice(low, low + layout.shard_numel)
        self._pieces = layout.pieces(shard_group.rank)
        self._local: Tensor | None = None
        self._written: set[int] = set()
        self._work: tuple[Work, Tensor, Tensor] | None = None
        self._stand_ins: dict[int, Tensor] = {}
        """What was shown for gradients that are not reduced yet, to see whether they were zeroed."""
        if keep_local:
            self._local = self._allocate(accumulate_dtype or dtype)

    @property
    def has_local(self) -> bool:
        """Gradients are waiting to be reduced."""
        return bool(self._written)

    def collect(self, index: int, gradient: Tensor) -> None:
        """Take slot `index`'s gradient: copied when it is the first since the last reduction, else added."""
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
        self.arrived.add(index)
        self.had.add(index)

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
            if self.layout.shards > 1 and self._replicate_group.size > 1:
                self._replicate_group.all_reduce(part, average=True).wait()
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

    def piece(self, index: int) -> Tensor | None:
        """Slot `index`'s gradient as far as this rank owns it, 1-D; None when the slot got none.

        One that is not reduced yet has no value to show. NaN stands in for it, so that `zero_grad` finds
        something to drop and nobody takes it for a gradient.
        """
        piece = self._pieces[index]
        if index not in self.had or (self.updating and not piece.numel):
            return None
        total = self.promote()
        if total is not None:
            return total[piece.at : piece.at + piece.numel]
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
        total[piece.at : piece.at + piece.numel].copy_(part)

    def discard(self, index: int) -> None:
        """Slot `index`'s gradient is dropped (`zero_grad`)."""
        self.had.discard(index)
        self._written.discard(index)
        self._stand_ins.pop(index, None)
        piece = self._pieces[index]
        if self.shard is not None and piece.numel:
            self.shard[piece.at : piece.at + piece.numel].zero_()
        if not self.had:
            self.shard = None

    def clear(self) -> None:
        """Drop everything: the window is over."""
        self.finish_reduce()
        self.shard = None
        self.had = set()
        self.arrived = set()
        self._written = set()
        self._stand_ins = {}
        if not self._keep_local:
            self._local = None

    def nbytes(self) -> int:
        """Bytes held now; `shard` counts unless it is a part of the full gradient."""
        held = [tensor for tensor in (self._local, self.shard) if tensor is not None]
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
        if self._local is None:
            self._local = self._allocate(self._accumulate_dtype or self._dtype)
        elif self.shard is not None and not self._written and self._aliases_local(self.shard):
            # Reduced in place by an earlier backward of this window, and about to be overwritten.
            self.shard = self.shard.clone()
        return self._local

    def _drop_zeroed(self) -> None:
        """`zero_grad(set_to_none=False)` writes zeros into what it was shown."""
        for index, shown in list(self._stand_ins.items()):
            if shown._version and not shown.isnan().any():
                self.discard(index)

    def _aliases_local(self, tensor: Tensor) -> bool:
        assert self._local is not None
        return bool(tensor.untyped_storage()._cdata == self._local.untyped_storage()._cdata)

    def _promoted(self, local: Tensor) -> Tensor:
        """`local` in the dtype sums are made in; it keeps that dtype for the steps to come."""
        if local.dtype is not self._sum_dtype:
            self._accumulate_dtype = self._sum_dtype
            wide = self._allocate(self._sum_dtype)
            wide.copy_(local)
            self._local = local = wide
        return local


class ReduceQueue:
    """Launches reductions in one order that all ranks keep, whatever order gradients come in.

    Whatever makes buckets ready at different moments on different ranks cannot reorder collectives into a hang: at
    the end of the round every bucket is reduced, with zeros where nothing came.
    """

    def __init__(
        self,
        gradients: Sequence[GradientBuffer | None],
        order: Sequence[int],
        groups: Sequence[Collectives],
    ) -> None:
        """`groups` together hold all ranks; `order` names every trainable bucket."""
        self.order = list(order)
        self.nested = False
        """The running backward has others inside (reentrant checkpointing): a parameter's gradient may come in
        several parts, the later ones after its bucket was reduced."""
        self.enabled = True
        """False while gradients only accumulate locally (`no_sync`; stages 0 and 1 before the boundary)."""
        self.pending = False
        """A round ended without reduction since the last one that reduced."""
        self.early = False
        """Buckets were reduced before the end of their backward since the last `flush`: gradients may have come
        to them later, of weights that were used where nothing saw it."""
        self.observed: list[int] = []
        """Buckets in the order they became ready in the latest round."""
        self.clock: Clock | None = None
        self._gradients, self._groups = gradients, groups
        self._ready: set[int] = set()
        self._next = 0
        self._flying: list[GradientBuffer] = []
        self._last: set[int] = set()
        """Buckets to which gradients once came after their reduction: reduced at the end of the round."""

    def begin(self) -> None:
        """A backward starts."""
        self.observed = []
        self.nested = False
        self._ready = set()
        self._next = 0

    def ready(self, bucket: int) -> None:
        """No more gradients come to a bucket: launch it, and what waited for it."""
        if bucket in self._last:
            return
        if bucket not in self._ready:
            self._ready.add(bucket)
            self.observed.append(bucket)
        while self.enabled and self._next < len(self.order) and self.order[self._next] in self._ready:
            self._launch(self.order[self._next])
            self._next += 1

    def end(self) -> None:
        """The backward ended: reduce what is left and wait for everything, or remember that it is due."""
        for gradient in self._gradients:
            if gradient is not None:
                gradient.arrived = set()
        if not self.enabled:
            self.pending = True
            return
        for bucket in self.order[self._next :]:
            self._launch(bucket)
        self._next = len(self.order)
        if self.nested and self.order:
            for bucket in self._late():
                self._launch(bucket)
        while self._flying:
            self._finish_oldest()
        self.pending = False

    def _finish_oldest(self) -> None:
        gradient = self._flying.pop(0)
        if self.clock is None:
            gradient.finish_reduce()
        else:
            with self.clock.phase("reduce wait"):
                gradient.finish_reduce()

    def _late(self) -> list[int]:
        """Buckets for which gradients came after their reduction, on any rank."""
        device = self._gradient(self.order[0]).device
        flags = [float(self._gradient(bucket).has_local) for bucket in self.order]
        for group in self._groups:
            if group.size > 1:
                flags = group.sum_to_host(torch.tensor(flags, dtype=torch.float64, device=device))
        return [bucket for bucket, flag in zip(self.order, flags, strict=True) if flag]

    def flush(self) -> None:
        """Reduce all that is not reduced yet."""
        self.flush_pending()
        if self.early:
            self.flush_late()

    def flush_pending(self) -> None:
        """Reduce what only accumulated locally, all buckets at once."""
        if self.pending:
            enabled, self.enabled = self.enabled, True
            self.begin()
            self.end()
            self.enabled = enabled

    @property
    def has_late(self) -> bool:
        """Gradients came on this rank after their bucket was reduced."""
        return self.early and any(gradient is not None and gradient.has_local for gradient in self._gradients)

    def flush_late(self) -> None:
        """Reduce what came after its bucket was reduced, on any rank."""
        self.early = False
        late = self._late()
        self._last.update(late)
        for bucket in late:
            self._launch(bucket)
        while self._flying:
            self._finish_oldest()

    def clear(self) -> None:
        """Drop all gradients."""
        while self._flying:
            self._finish_oldest()
        for gradient in self._gradients:
            if gradient is not None:
                gradient.clear()
        self.pending = self.early = False

    def agreed_order(self) -> list[int]:
        """The observed order, completed by the buckets that never became ready."""
        return self.observed + [bucket for bucket in self.order if bucket not in set(self.observed)]

    def _launch(self, bucket: int) -> None:
        if len(self._flying) >= MAX_REDUCES:
            self._finish_oldest()
        gradient = self._gradient(bucket)
        gradient.launch_reduce()
        self._flying.append(gradient)

    def _gradient(self, bucket: int) -> GradientBuffer:
        gradient = self._gradients[bucket]
        assert gradient is not None, f"bucket {bucket} is frozen"
        return gradient


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
        part = data.detach()[piece.at : piece.at + piece.numel]
        if piece.is_whole:
            part = part.view(piece.slot.spec.shape)
        part.requires_grad_(gradients is not None)
        part.__class__ = _slice_class(type(part))
        assert isinstance(part, ShardSlice)
        part._gradients, part._index, part.start = gradients, index, piece.start
        return part

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
