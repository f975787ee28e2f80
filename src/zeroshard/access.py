"""Reading and editing what is spread over ranks: weights, gradients, fp32 masters, optimizer state.

The *full* forms take and give tensors in the parameter's shape and are collectives: every rank calls them. The
*local* forms are this rank's elements, 1-D, without padding, and involve nobody else.

    what             when it can be read and set
    fp32 value       always
    optimizer state  once it exists: after the first step
    gradient         between backward and step; None when no rank has one. Without the loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.buffers import FlatBuffer
from zeroshard.errors import ShardedAccessError, StateError
from zeroshard.gradients import GradientBuffer
from zeroshard.guard import home_of
from zeroshard.layout import Slot
from zeroshard.precision import dtype_of
from zeroshard.states import States

__all__ = ["Access"]

_MADE_BY = "it is made by the first step that has a gradient"


class Access:
    """One engine's states, by parameter."""

    def __init__(self, states: States, optimizer: Optimizer | None) -> None:
        self._states, self._optimizer = states, optimizer
        self._buffers, self._gradients, self._slices = states.buffers, states.gradients, states.slices
        self._executor, self._groups, self._device = states.executor, states.groups, states.device
        for buffer in states.buffers:
            buffer.access = self

    # ---- weights ------------------------------------------------------------------------------------

    @contextmanager
    def gathered(
        self,
        params: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None,
        modifier_rank: int | None = None,
    ) -> Iterator[None]:
        """See `Engine.gathered`."""
        buckets = self.buckets_of(params)
        with self._executor.holding(buckets):
            held = [self._buffers[index] for index in buckets]
            for buffer in held:
                buffer.accept_edits()
            # The fingerprint also sees edits through `.data`, which leave no version behind.
            before = [self._fingerprint(buffer) for buffer in held] if modifier_rank is None else []
            edited = False
            try:
                yield
                exchanged = [buffer.take_back(keep=modifier_rank is not None) for buffer in held]
                edited = modifier_rank is None and (
                    any(exchanged)
                    or any(buffer.edited() for buffer in held)
                    or any(map(self._has_changed, held, before))
                )
            finally:
                for buffer in held:
                    buffer.accept_edits()
            if edited:
                raise ShardedAccessError(
                    "weights were edited inside engine.gathered() without modifier_rank. Cure: "
                    "`engine.gathered(params, modifier_rank=0)` keeps rank 0's edit on all ranks. If you did "
                    "not mean to edit, look for an in-place operation on a parameter."
                )
            if modifier_rank is not None:
                self._keep_edits(buckets, modifier_rank)

    def _fingerprint(self, buffer: FlatBuffer) -> tuple[int, tuple[int, int]]:
        """Also how often edits were kept: what a block inside this one keeps is no edit of this one."""
        return buffer.edits_kept, buffer.fingerprint()

    def _has_changed(self, buffer: FlatBuffer, before: tuple[int, tuple[int, int]]) -> bool:
        return buffer.edits_kept == before[0] and buffer.fingerprint() != before[1]

    def _keep_edits(self, buckets: Sequence[int], source: int) -> None:
        replica, rank = divmod(source, self._groups.gather.size)
        for index in buckets:
            buffer = self._buffers[index]
            self._groups.gather.broadcast(buffer.full, rank)
            self._groups.replicate.broadcast(buffer.full, replica)
        self._meet()  # peers may still be reading this rank's shards for the gather that opened the block
        for index in buckets:
            self._buffers[index].write_back()
            self._buffers[index].edits_kept += 1

    def buckets_of(self, params: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None) -> list[int]:
        """The buckets that hold `params`; all for None. ShardedAccessError for a tensor of somebody else."""
        if params is None:
            return list(range(len(self._buffers)))
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, nn.Parameter):
            params = [params]
        return sorted({self._slot(parameter)[0] for parameter in params})

    # ---- fp32 values --------------------------------------------------------------------------------

    def full_fp32(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the values the optimizer updates; of a frozen parameter, its weights in the dtype they have."""
        bucket, _, slot = self._slot(parameter)
        return self._gather_slot(self._buffers[bucket].owned, slot)

    def set_full_fp32(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace them on all ranks; the model's copy follows at once."""
        bucket, index, slot = self._slot(parameter)
        buffer = self._buffers[bucket]
        part = self._own_part(bucket, index, _packed_alike(_checked(value, slot), slot))
        self._write_master(buffer, index, part)

    def local_fp32(self, parameter: nn.Parameter) -> Tensor:
        """This rank's elements of them, not a copy."""
        bucket, index, _ = self._slot(parameter)
        return self._own_view(bucket, index, self._buffers[bucket].owned)

    def set_local_fp32(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace this rank's elements. Every rank calls it, since the model's copy is gathered anew."""
        bucket, index, slot = self._slot(parameter)
        buffer = self._buffers[bucket]
        view = self._own_view(bucket, index, buffer.owned)
        _packed_alike(value, slot)
        wrong = value.numel() != view.numel()
        if self._anywhere(wrong) and not wrong:
            raise StateError(f"another rank gave a local value of the wrong size for {slot.name!r}")
        self._write_master(buffer, index, _same_numel(value, view.numel(), slot))

    def _write_master(self, buffer: FlatBuffer, index: int, part: Tensor) -> None:
        buffer.check_refreshable()
        self._meet()  # as in the step: nobody may still be reading the shard
        buffer.wait()
        with torch.no_grad():
            self._own_view(buffer.layout.index, index, buffer.owned).copy_(part)
        buffer.refresh()

    # ---- gradients ----------------------------------------------------------------------------------

    def full_grad(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient as the step would use it, averaged over ranks, before clipping."""
        bucket, index, slot = self._slot(parameter)
        gradient = self._reduced(bucket, slot)
        if not self._anywhere(index in gradient.had):
            return None
        total = gradient.promote()
        assert total is not None, "some rank had a gradient, so all reduced"
        return self._gather_slot(total, slot)

    def set_full_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace it on all ranks."""
        bucket, index, slot = self._slot(parameter)
        gradient = self._reduced(bucket, slot)
        part = self._own_part(bucket, index, _checked(value, slot))
        gradient.replace(index, part)

    def local_grad(self, parameter: nn.Parameter) -> Tensor | None:
        """This rank's elements of the reduced gradient, not a copy; None when there is none."""
        bucket, index, slot = self._slot(parameter)
        gradient = self._gradients[bucket]
        if gradient is None:
            raise _frozen(slot)
        if gradient.shard is None and gradient.had:
            raise StateError(
                f"the gradient of {slot.name!r} is not reduced yet (inside no_sync, or before the boundary), so "
                f"it has no local part; read the full one, on every rank"
            )
        return gradient.piece(index)

    def set_local_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace this rank's elements of a gradient that there is."""
        current = self.local_grad(parameter)
        _, _, slot = self._slot(parameter)
        if current is None:
            raise StateError(f"{slot.name!r} has no gradient to replace; call backward first")
        current.copy_(_same_numel(value, current.numel(), slot))

    def _reduced(self, bucket: int, slot: Slot) -> GradientBuffer:
        gradient = self._gradients[bucket]
        if gradient is None:
            raise _frozen(slot)
        self._executor.reduces.flush()
        return gradient

    # ---- optimizer state ----------------------------------------------------------------------------

    def full_state(self, parameter: nn.Parameter, key: str) -> Tensor:
        """A copy of one entry of the optimizer's state, such as `exp_avg`: whole, or a single number (`step`)."""
        bucket, index, slot = self._slot(parameter)
        entry, is_number, number = self._agreed_entry(bucket, index, slot, key)
        if is_number:
            return torch.tensor(number, device=self._device)
        shard = torch.zeros_like(self._buffers[bucket].owned)
        if entry is not None:
            self._own_view(bucket, index, shard).copy_(entry.reshape(-1))
        return self._gather_slot(shard, slot)

    def set_full_state(self, parameter: nn.Parameter, value: Tensor, key: str) -> None:
        """Replace such an entry on all ranks."""
        bucket, index, slot = self._slot(parameter)
        entry, is_number, _ = self._agreed_entry(bucket, index, slot, key)
        if is_number and value.numel() != 1:
            raise StateError(
                f"a value of shape {tuple(value.shape)} for state {key!r} of {slot.name!r}, which is one number"
            )
        part = value if is_number else self._own_part(bucket, index, _checked(value, slot))
        if entry is not None:
            entry.copy_(part.view(entry.shape))

    def _agreed_entry(
        self, bucket: int, index: int, slot: Slot, key: str
    ) -> tuple[Tensor | None, bool, float]:
        """(this rank's part, whether the entry is a single number, that number). A collective: an entry that
        some rank cannot give is an error on all."""
        entry, problem = None, None
        try:
            entry = self._local_entry(bucket, index, slot, key)
        except StateError as error:
            problem = error
        is_number = entry is not None and entry.dim() == 0
        number = float(entry) if entry is not None and is_number else 0.0
        problems, numbers, total = self._states.sum([float(problem is not None), float(is_number), number])
        if problems:
            raise problem or StateError(
                f"another rank cannot give state {key!r} of {slot.name!r}, and this one owns none of its elements: "
                f"the other's message says why; {_MADE_BY}"
            )
        return entry, numbers > 0, total / numbers if numbers else 0.0

    def local_state(self, parameter: nn.Parameter, key: str) -> Tensor:
        """This rank's elements of an entry, not a copy; 0 elements where the rank owns none."""
        bucket, index, slot = self._slot(parameter)
        entry = self._local_entry(bucket, index, slot, key)
        return torch.empty(0, device=self._device) if entry is None else entry

    def set_local_state(self, parameter: nn.Parameter, value: Tensor, key: str) -> None:
        bucket, index, slot = self._slot(parameter)
        entry = self._local_entry(bucket, index, slot, key)
        if entry is not None:
            entry.copy_(_same_numel(value, entry.numel(), slot).view(entry.shape))

    def _local_entry(self, bucket: int, index: int, slot: Slot, key: str) -> Tensor | None:
        """None where this rank owns no element, and so the optimizer made no state."""
        slices = self._slices[bucket]
        if not slices or self._optimizer is None:
            raise _frozen(slot)
        state: dict[str, Any] = self._optimizer.state.get(slices[index], {})
        if key in state and isinstance(state[key], Tensor):
            entry: Tensor = state[key]
            owned = slices[index].numel()
            if entry.dim() and entry.numel() != owned:
                raise StateError(
                    f"state {key!r} of {slot.name!r} has shape {tuple(entry.shape)}, not the parameter's: it "
                    f"lives on one rank, in optimizer.state, and cannot be taken apart by element"
                )
            return entry
        if self._gradients[bucket] is None:
            raise _frozen(slot)
        if not slices[index].numel() and slot.numel:
            return None
        known = ", ".join(map(repr, state)) or f"none yet: {_MADE_BY}"
        raise StateError(f"the optimizer has no state {key!r} for {slot.name!r}; it has {known}")

    # ---- pieces -------------------------------------------------------------------------------------

    def _slot(self, parameter: nn.Parameter) -> tuple[int, int, Slot]:
        home = home_of(parameter)
        if home is None or home.buffer not in self._buffers:
            raise ShardedAccessError(
                f"a tensor of shape {tuple(parameter.shape)} is not one of this engine's parameters"
            )
        return home.buffer.layout.index, home.index, home.buffer.layout.slots[home.index]

    def _own_view(self, bucket: int, index: int, shard: Tensor) -> Tensor:
        piece = self._buffers[bucket].layout.pieces(self._groups.gather.rank)[index]
        return shard.detach()[piece.in_shard]

    def _own_part(self, bucket: int, index: int, value: Tensor) -> Tensor:
        piece = self._buffers[bucket].layout.pieces(self._groups.gather.rank)[index]
        return value.reshape(-1)[piece.start : piece.stop]

    def _gather_slot(self, shard: Tensor, slot: Slot) -> Tensor:
        whole = torch.empty(shard.numel() * self._groups.gather.size, dtype=shard.dtype, device=shard.device)
        self._groups.gather.all_gather(whole, shard.detach()).wait()
        return whole[slot.offset : slot.end].view(slot.spec.shape).clone()

    def _anywhere(self, flag: bool) -> bool:
        return self._states.sum([float(flag)])[0] > 0

    def _meet(self) -> None:
        self._groups.gather.sum_to_host(torch.zeros(1, dtype=torch.float64, device=self._device))


def _checked(value: Tensor, slot: Slot) -> Tensor:
    if tuple(value.shape) != slot.spec.shape:
        raise StateError(
            f"a value of shape {tuple(value.shape)} for {slot.name!r}, whose shape is {slot.spec.shape}"
        )
    return value


def _packed_alike(value: Tensor, slot: Slot) -> Tensor:
    """Packed weights take packed values: a cast would be another number."""
    dtype = dtype_of(slot.spec.dtype)
    if (not dtype.is_floating_point or dtype.itemsize == 1) and value.dtype is not dtype:
        raise StateError(
            f"a value of {value.dtype} for {slot.name!r}, which holds packed {slot.spec.dtype} values: give it in "
            f"{slot.spec.dtype}"
        )
    return value


def _same_numel(value: Tensor, numel: int, slot: Slot) -> Tensor:
    if value.numel() != numel:
        raise StateError(
            f"a local value of {value.numel()} elements for {slot.name!r}, of which this rank owns {numel}"
        )
    return value.reshape(-1)


def _frozen(slot: Slot) -> StateError:
    return StateError(
        f"parameter {slot.name!r} is not trained by this engine's optimizer, so it has no gradient and no state"
    )
