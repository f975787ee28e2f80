"""The weights of one bucket: a flat buffer that is gathered, used and freed.

Vocabulary: `full` is the whole bucket in the dtype the model computes in; `shard` is this rank's contiguous
1/N of it; `master` is the shard the optimizer updates, which is `shard` itself unless the model computes in
16 bit. Parameters keep their identity: `parameter.data` is a view of `full`.

    resident bucket (stages 0-2, persistent)   full always there; shard is a slice of full
    other bucket (stage 3)                     full has storage only between gather and free; shard is its own

With a secondary group (hpZ), a gathered bucket leaves this rank a second shard: its part of `full` among the few
ranks of that group. Until the weights change, further gathers read those, and nothing crosses groups.

Freeing resizes the storage of `full` to nothing. Views that autograd saved (a Linear's `weight.t()`) share
that storage, so they see the data again after the next gather, and no activation keeps weights alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from zeroshard.comm import Collectives, Work
from zeroshard.errors import ShardedAccessError, StateError
from zeroshard.guard import Alias, Status, fingerprint, sharded_class
from zeroshard.layout import BucketLayout
from zeroshard.streams import Lane

__all__ = ["FlatBuffer", "Watcher"]


TRANSITIONS = frozenset(
    {
        (Status.NOT_AVAILABLE, Status.INFLIGHT),  # gather
        (Status.INFLIGHT, Status.AVAILABLE),  # wait
        (Status.AVAILABLE, Status.NOT_AVAILABLE),  # free
        (Status.AVAILABLE, Status.INFLIGHT),  # refresh of a resident bucket after the step
    }
)


class Watcher(Protocol):
    """Who is asked when a sharded parameter is touched (`passes.Passes`)."""

    def touch(self, bucket: int, parameter: str, operation: str) -> None:
        """Gather the bucket if that is possible here; raise ShardedAccessError otherwise."""

    def touched(self, bucket: int, result: Any) -> None:
        """The operation is done and gave `result`."""


@dataclass
class _Home:
    """A parameter's place; see `guard.Home`."""

    buffer: FlatBuffer
    index: int
    name: str
    shape: torch.Size
    shards: int

    @property
    def access(self) -> Any:
        return self.buffer.access

    @property
    def status(self) -> Status:
        """What is kept for its next use is not for others to read: they gather it like any other."""
        return Status.NOT_AVAILABLE if self.buffer.is_kept else self.buffer.status

    @property
    def number(self) -> int:
        return (self.buffer.layout.index << 24) + self.index

    @property
    def piece(self) -> Tensor:
        part = self.buffer.layout.piece(self.index, self.buffer.group.rank)
        return self.buffer.shard[part.in_shard]

    def need(self, operation: str) -> None:
        self.buffer.need(self.name, operation)

    def alias(self, parameter: Tensor) -> Tensor | None:
        if not self.buffer.gives_aliases:
            return None
        return Alias.of(parameter, self._refuse_entry)

    def _refuse_entry(self, operation: str) -> ShardedAccessError:
        return ShardedAccessError(
            f"{self.name!r} (shape {tuple(self.shape)}) in the state dict of a part of the model is a name without "
            f"elements, and {operation!r} needs them: one rank alone may ask for names, so nothing is gathered. "
            f"Cure, on every rank: engine.full_state_dict(), or take the state dict of the part inside of "
            f"`with GatheredParameters(part.parameters()): ...`"
        )

    def address(self, parameter: Tensor) -> None:
        return None

    @contextmanager
    def copying(self, parameter: Tensor) -> Iterator[None]:
        self.need("deepcopy")
        yield

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled parameter has left its engine

    def used(self, result: Any) -> None:
        if self.buffer.watcher is not None and not self.buffer.layout.resident:
            self.buffer.watcher.touched(self.buffer.layout.index, result)

    def convert(self, to: Tensor) -> bool:
        """Another device leaves it where the engine works, which has no elements to move; a dtype is refused."""
        return not to.is_meta and to.dtype is self.buffer.shard.dtype


class _SecondShard:
    """This rank's part of a bucket's weights among the ranks of the secondary group.

    Filled by what a gather over all shards brought, which is untouched then; out of date with the next change.
    """

    def __init__(self, group: Collectives, full: Tensor) -> None:
        numel = full.numel() // group.size
        self.group = group
        self.shard = group.empty(numel, dtype=full.dtype, device=full.device)
        self.is_current = False
        self._own = full[group.rank * numel : (group.rank + 1) * numel]

    def fill(self) -> None:
        if not self.is_current:
            self.shard.copy_(self._own)
            self.is_current = True


class FlatBuffer:
    """The weights of one bucket and the parameters that live in it."""

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        *,
        full: Tensor,
        shard: Tensor,
        master: Tensor | None,
        group: Collectives,
        lane: Lane,
        secondary: Collectives | None = None,
    ) -> None:
        """Take `parameters` over. `full` (padded elements) and `shard` hold their values already."""
        self.layout = layout
        self.parameters = tuple(parameters)
        self.full, self.shard, self.master = full, shard, master
        self.watcher: Watcher | None = None
        self.edits_kept = 0
        """How often edits were kept, by blocks of `gathered` and by `put`."""
        self.access: Any = None
        """Who reads and edits states of these parameters (`access.Access`)."""
        self.gives_aliases = False
        """A state dict is being made that may have names without elements (`full_state.FullState`)."""
        self.group, self._lane = group, lane
        self._second = None if secondary is None or layout.resident else _SecondShard(secondary, full)
        self._own = full[layout.shard(group.rank)]
        self._nbytes = full.untyped_storage().nbytes()
        self._views = [full[slot.offset : slot.end].view(slot.spec.shape) for slot in layout.slots]
        self._empty = torch.empty(0, dtype=full.dtype, device=full.device)
        self._classes = [type(parameter) for parameter in parameters]
        self._status = Status.AVAILABLE
        self._work: Work | None = None
        self._versions: list[int] = []
        self._guarded = False
        for index, (slot, parameter) in enumerate(zip(layout.slots, parameters, strict=True)):
            parameter.data = self._views[index]
            parameter._zeroshard = _Home(  # type: ignore[attr-defined]
                self, index, slot.name, torch.Size(slot.spec.shape), layout.shards
            )
        self.accept_edits()
        if not layout.resident:
            self.free()

    @property
    def status(self) -> Status:
        return self._status

    @property
    def is_live(self) -> bool:
        """`full` has memory: gathered, or on its way."""
        return self._status is not Status.NOT_AVAILABLE

    @property
    def is_kept(self) -> bool:
        """The weights are here, for a use that is to come (`guard`)."""
        return self._guarded

    def gather(self) -> None:
        """Launch the all-gather of `full`; `wait` makes it usable. Nothing to do when it is live already."""
        if self.is_live:
            return
        with self._lane.entered():
            self.full.untyped_storage().resize_(self._nbytes)
            group, shard = self.group, self.shard
            if self._second is not None and self._second.is_current:
                group, shard = self._second.group, self._second.shard
            with torch.no_grad(), _unsafe_preserve_version_counter(self.full):
                # Shards change only in the optimizer, after all ranks have agreed on the step.
                self._work = group.all_gather(self.full, shard, stable=True)
        self._move(Status.INFLIGHT)

    def wait(self) -> None:
        """The gathered weights may be used from here on. Nothing to do unless a gather is in flight."""
        if self._guarded:
            self._guarded = False
            for parameter, cls in zip(self.parameters, self._classes, strict=True):
                parameter.__class__ = cls
        if self._status is not Status.INFLIGHT:
            return
        assert self._work is not None
        with torch.no_grad(), _unsafe_preserve_version_counter(self.full):
            self._work.wait()
            if self._second is not None:
                self._second.fill()
        self._work = None
        self._move(Status.AVAILABLE)
        swap_data = not self.layout.resident
        for parameter, cls, view in zip(self.parameters, self._classes, self._views, strict=True):
            parameter.__class__ = cls
            if swap_data:
                parameter.data = view
        self.accept_edits()

    def guard(self) -> None:
        """The weights stay, but nobody announced a use: `need` is to hear of the next one, until `wait`."""
        self._guarded = True
        for parameter, cls in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = sharded_class(cls)

    def free(self) -> None:
        """Give the memory of `full` back, after the compute queued so far has read it."""
        self.wait()
        if not self.is_live:
            return
        self._move(Status.NOT_AVAILABLE)
        for parameter, cls in zip(self.parameters, self._classes, strict=True):
            parameter.data = self._empty
            parameter.__class__ = sharded_class(cls)
        self._lane.wait_for_compute()
        with self._lane.entered():
            self.full.untyped_storage().resize_(0)

    def edited(self) -> list[str]:
        """Parameters that were edited in place since the weights came, or since `accept_edits`."""
        pairs = zip(self.layout.slots, self.parameters, self._versions, strict=True)
        return [slot.name for slot, parameter, version in pairs if parameter._version != version]

    def fingerprint(self) -> tuple[int, int]:
        """Changes with any edit of the gathered weights."""
        return fingerprint(self.full)

    def accept_edits(self) -> None:
        """What is in `full` now counts as unedited."""
        self._versions = [parameter._version for parameter in self.parameters]

    def take_back(self, *, keep: bool) -> bool:
        """Whether parameters were given other memory (`.data = ...`) while they were gathered: they get their own
        again, filled with the values of the other to `keep` these. StateError for another shape."""
        found, misfits = False, []
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for slot, parameter, view in zip(self.layout.slots, self.parameters, self._views, strict=True):
                if self.shares_memory(parameter):
                    continue
                found, other = True, parameter.data
                parameter.data = view
                if keep and other.shape != view.shape:
                    misfits.append(
                        f"{slot.name!r} was given the shape {tuple(other.shape)} instead of {slot.spec.shape}"
                    )
                elif keep:
                    view.copy_(other)
        if misfits:
            raise StateError(
                f"{misfits[0]} while it was gathered. Exchange parameters of other shapes in their modules, before "
                f"`initialize`."
            )
        return found

    def check_refreshable(self) -> None:
        """StateError where new masters could not reach what is gathered now."""
        if self.is_live and not self.layout.resident:
            raise StateError(
                f"bucket {self.layout.name!r} is gathered, inside `engine.gathered()` or between a forward and its "
                f"backward, and what is gathered would not see the new values. Step, or set values, after that."
            )

    def refresh(self) -> None:
        """The optimizer changed `master`: bring `shard` up to date, and launch the gather of a resident bucket.

        Until the next use waits for it, a resident bucket's parameters are guarded: touching one waits.
        """
        self.check_refreshable()
        self.wait()  # the previous refresh, if the model did not use this bucket since
        if self.layout.resident:
            self._check_attached()
        self._mark_changed()
        self._drop_second()
        with torch.no_grad(), _unsafe_preserve_version_counter(self.full):
            if self.master is not None and self.master is not self.shard:
                self.shard.copy_(self.master)
            self._lane.wait_for_compute()
            if not self.layout.resident or self.layout.shards == 1:
                return
            with self._lane.entered():
                self._work = self.group.all_gather(self.full, self._own)
        self._move(Status.INFLIGHT)
        for parameter, cls in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = sharded_class(cls)

    def _mark_changed(self) -> None:
        """As after any optimizer's step: backward of a graph made with the old weights raises."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = tuple(parameter._version + 1 for parameter in self.parameters)
        torch._C._autograd._unsafe_set_version_counter(self.parameters, versions)
        self.accept_edits()

    def _check_attached(self) -> None:
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            if not self.shares_memory(parameter):
                raise StateError(
                    f"parameter {slot.name!r} was given other memory after `initialize` (`.data = ...`, or "
                    f"`.half()`, `.double()`, `.to()` of the model), so the engine would train weights that "
                    f"the model does not use. Change dtype and device before `initialize`; edit inside "
                    f"`engine.gathered(param, modifier_rank=0)`."
                )

    def write_back(self) -> None:
        """`full` was edited: make this rank's part of it the new shard, and the new master where it differs.

        A master that rounds to what is in `full` was not edited, and keeps the digits that 16 bits have not.
        """
        self._drop_second()
        with torch.no_grad():
            if self.shard.data_ptr() != self._own.data_ptr():
                self.shard.copy_(self._own)
            if self.master is not None and self.master is not self.shard:
                edited = self._own != self.master.to(self._own.dtype)
                self.master.copy_(torch.where(edited, self._own, self.master))
        self._lane.wait_for_compute()

    def put(self, index: int, value: Tensor) -> None:
        """Slot `index` is `value` (1-D, the same on all ranks) from here on: in what is gathered, in the shard, and
        to the last digit in the master. Nobody may be reading the shard."""
        slot, piece = self.layout.slots[index], self.layout.pieces(self.group.rank)[index]
        own, part = piece.in_shard, value[piece.start : piece.stop]
        self._drop_second()
        with torch.no_grad(), _unsafe_preserve_version_counter(self.full):
            if self.is_live:
                self.full[slot.offset : slot.end].copy_(value)
            self.shard[own].copy_(part)
            if self.master is not None and self.master is not self.shard:
                self.master[own].copy_(part)
        self._versions[index] = self.parameters[index]._version
        self.edits_kept += 1
        self._lane.wait_for_compute()

    def _drop_second(self) -> None:
        """The shards change: the next gather is over all of them."""
        if self._second is not None:
            self._second.is_current = False

    @property
    def nbytes(self) -> int:
        """Bytes of weights on this rank while nothing is gathered; masters apart."""
        held = [self.full if self.layout.resident else self.shard]
        if self._second is not None:
            held.append(self._second.shard)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @property
    def owned(self) -> Tensor:
        """This rank's part of what is trained: the master, or the shard where there is none of its own."""
        return self.shard if self.master is None else self.master.detach()

    def need(self, parameter: str, operation: str) -> None:
        """A guarded parameter is touched."""
        if self._status is Status.NOT_AVAILABLE or not self.layout.resident:
            assert self.watcher is not None
            self.watcher.touch(self.layout.index, parameter, operation)
        self.wait()

    def shares_memory(self, tensor: Tensor) -> bool:
        """`tensor` is a view of `full`: it must not be freed under it."""
        return tensor.device == self.full.device and (
            tensor.untyped_storage()._cdata == self.full.untyped_storage()._cdata
        )

    def release(self, keep: Callable[[nn.Parameter, str, Tensor], None] | None = None) -> None:
        """Hand the parameters back with their full weights, as tensors of their own.

        Those of a sharded bucket go to `keep(parameter, name, values)`, if given: `values` are gone after it.
        """
        self.gather()
        self.wait()
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self._views, strict=True):
            del parameter._zeroshard  # type: ignore[attr-defined]
            if keep is None or self.layout.resident:
                parameter.data = view.clone()
            else:
                keep(parameter, slot.name, view)
        self._lane.wait_for_compute()  # `full` is the lane's memory and goes with this object

    def _move(self, to: Status) -> None:
        if (self._status, to) not in TRANSITIONS:
            raise StateError(
                f"bucket {self.layout.index} ({self.layout.name}) cannot go from {self._status.name} to {to.name}"
            )
        self._status = to
