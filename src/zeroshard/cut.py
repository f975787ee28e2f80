"""Parameters that are cut before an engine has them: each rank keeps a part, and sees the whole for a while.

A parameter of n elements on N ranks: rank r keeps elements r*k to (r+1)*k, k = ceil(n / N). The parameter
object stays; its data has 0 elements and its class is `ShardedParameter` until it is *opened*, that is, whole
for a while. What is open is bounded: beyond `OPEN_BYTES` the one opened first is put away, unless there are
views of it, which somebody may write to.

Worked example, 2 ranks, a parameter of 3 elements that each rank has drawn itself: rank 0 [1, 2, 3], rank 1
[7, 8, 9]. Put away: rank 0 keeps [1, 2], rank 1 keeps [3]: rank 0's values count. Opened: [1, 2, 3] on both.

Values travel in chunks of `CHUNK_BYTES`, so no second copy of a large parameter is ever made, and nothing is
written into memory that came from outside: it may be a mapped file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zeroshard.comm import ballot, open_collectives, unanimous
from zeroshard.errors import ShardedAccessError, StateError
from zeroshard.guard import Alias, Status, fingerprint, home_of, sharded_class

__all__ = ["Cut", "Cuts", "can_cut", "trim_heap"]

OPEN_BYTES = 64 << 20
"""Whole parameters that may lie open at once, beside the one that is in use. The smaller, the more often a
parameter that is touched again is sent again."""
CHUNK_BYTES = 8 << 20
MAPPED_BYTES = 256 << 10
MAX_VIEWED = 4
"""How many that cannot be put away are asked for at a time."""


def can_cut(parameter: Tensor) -> bool:
    """A dense tensor with values: not on `meta`, uninitialised (lazy modules), sparse, or a wrapper of tensors."""
    return not (
        is_lazy(parameter)
        or parameter.is_meta
        or parameter.layout is not torch.strided
        or is_traceable_wrapper_subclass(parameter)
    )


class Cut:
    """One parameter's elements over the ranks of a group; see `guard.Home`."""

    buffer = None
    status = Status.NOT_AVAILABLE
    """As long as its class says that it is sharded."""
    by = "by zeroshard.Init, has no engine yet"
    """Why, for messages."""

    def __init__(
        self, parameter: nn.Parameter, access: Cuts, name: str, dtype: torch.dtype | None, on_host: bool
    ) -> None:
        """`dtype`: what floating-point values become when they are put away; None leaves them."""
        self.access, self.name = access, name
        self.cls = type(parameter)
        self.shape = parameter.shape
        self.shards = access.size
        self.number = access.number()
        """The order of creation."""
        self.claims = 0
        """Open `gathered` blocks."""
        self.kept = 0
        """Such blocks that kept their edits."""
        self.nbytes = 0
        """What it takes while it is open."""
        self.device = parameter.device
        self.piece = torch.empty(0)
        """This rank's elements, 1-D."""
        self._dtype = dtype if parameter.is_floating_point() else None
        self._at = torch.device("cpu") if on_host else access.device
        self._parameter = weakref.ref(parameter)

    @property
    def parameter(self) -> nn.Parameter:
        found = self._parameter()
        assert found is not None, "whoever asks has it"
        return found

    def need(self, operation: str) -> None:
        self.access.touch(self, operation)

    def convert(self, to: Tensor) -> bool:
        """What is kept becomes of that dtype, and is opened on that device."""
        if to.is_meta:
            return False  # the values would be gone
        self.device, parameter = to.device, self.parameter
        self._dtype = None if self._dtype is None else to.dtype
        self.piece = self.piece.to(to.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = to
        return True

    def used(self, result: Any) -> None:
        self.access.put_away_oldest()

    def alias(self, parameter: nn.Parameter) -> Tensor | None:
        """Outside of `zeroshard.Init`: so `state_dict()` has its names, shapes and dtypes, as loaders want them."""
        if self.access.contexts:
            return None
        return Alias.of(
            parameter, lambda operation: _refuse(self, operation, "an entry of a state dict, for ")
        )

    def address(self, parameter: nn.Parameter) -> int | None:
        return None if self.access.contexts else id(parameter)

    @contextmanager
    def copying(self, parameter: nn.Parameter) -> Iterator[None]:
        """Every rank copies: a block of a model that is being put together, to train the copy."""
        if self.access.contexts:
            self.need("deepcopy")
            yield
            return
        with self.access.gathered([parameter]):
            yield

    def hand_over(self, target: Tensor) -> None:
        """See `Cuts.hand_over`."""
        self.access.hand_over(self, target)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled parameter is whole

    def range_of(self, rank: int) -> tuple[int, int]:
        """The elements that `rank` keeps."""
        numel = self.shape.numel()
        each = -(-numel // self.shards)
        return min(rank * each, numel), min((rank + 1) * each, numel)

    def take_shape_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Before its values are put away: make room for this rank's part of them; the dtype they are kept in."""
        self.shape, self.device = parameter.shape, parameter.device
        dtype = self._dtype or parameter.dtype
        start, stop = self.range_of(self.access.rank)
        if self.piece.numel() != stop - start or self.piece.dtype is not dtype:
            self.piece = _memory(stop - start, dtype, self._at)
        return dtype


def _refuse(cut: Cut, operation: str, what: str = "") -> ShardedAccessError:
    return ShardedAccessError(
        f"{what}parameter {cut.name!r} (shape {tuple(cut.shape)}) is sharded over {cut.shards} ranks {cut.by}, and "
        f"{operation!r} needs its elements. Cure, on every rank: "
        f"`with zeroshard.zero.GatheredParameters(param, modifier_rank=0): ...` to read or edit it, or run "
        f"this under `with zeroshard.Init(): ...` again, or after `zeroshard.initialize` (which also moves "
        f"the model to its device)."
    )


class Cuts:
    """All cut parameters of one process group, and those among them that are open."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """A collective of the group's ranks. `device`: where their collectives take tensors."""
        self.device = device
        self.contexts = 0
        """`zeroshard.Init` blocks that run: while there is one, all ranks run the same code, and a touch opens."""
        with torch.device(device):  # whatever the code around makes its tensors on
            self._collectives = open_collectives(group, device)
        self.size, self.rank = self._collectives.size, self._collectives.rank
        self._made = 0
        self._digest = 0
        self._open: OrderedDict[int, _Held] = OrderedDict()
        """By number, the one opened first in front. It holds what has no other holder any more, so that ranks whose
        garbage collectors run at different times still send the same."""
        self._open_bytes = 0
        self._freed_bytes = 0
        self._chunk: Tensor | None = None
        """Where a chunk arrives. One for all: in the heap, each would leave a hole of its own size."""

    _of: ClassVar[dict[dist.ProcessGroup, Cuts]] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> Cuts:
        """The one of this group; the first call is a collective."""
        if group not in cls._of:
            cls._of[group] = cls(group, device)
        return cls._of[group]

    def number(self) -> int:
        self._made += 1
        return self._made

    # ---- open and put away --------------------------------------------------------------------------

    def add(self, parameter: nn.Parameter, name: str, dtype: torch.dtype | None, on_host: bool) -> None:
        """A whole parameter becomes one of these, open for now. Nothing to do for one that cannot be cut, or is."""
        if home_of(parameter) is not None or not can_cut(parameter):
            return
        cut = Cut(parameter, self, name, dtype, on_host)
        parameter._zeroshard = cut  # type: ignore[attr-defined]
        self._opened(parameter, cut)

    def leave_whole(self, parameter: nn.Parameter) -> None:
        """It is none of these, or no longer."""
        cut = home_of(parameter)
        if isinstance(cut, Cut):
            self._open_one(cut)
            self._forget(parameter, cut)

    def take(self, parameter: nn.Parameter, name: str, values: Tensor) -> None:
        """`parameter`, whose `values` all ranks have, becomes one of these, put away. Nothing is sent."""
        parameter.data = values
        cut = Cut(parameter, self, name, None, on_host=False)
        cut.by = "since its engine was destroyed (engine.close() leaves whole weights)"
        cut.take_shape_of(parameter)
        start, stop = cut.range_of(self.rank)
        cut.piece.copy_(values.reshape(-1)[start:stop])
        parameter._zeroshard = cut  # type: ignore[attr-defined]
        parameter.data = torch.empty(0, dtype=values.dtype, device=values.device)
        parameter.__class__ = sharded_class(cut.cls)

    def add_empty(self, like: nn.Parameter, name: str) -> nn.Parameter:
        """A cut parameter to take the place of `like`, which is on `meta`; its pieces have no values yet."""
        dtype, shape = like.dtype, like.shape
        fresh = nn.Parameter(torch.empty(0, dtype=dtype, device=self.device), like.requires_grad)
        fresh.__dict__.update(like.__dict__)
        cut = Cut(fresh, self, name, None, on_host=False)
        cut.cls, cut.shape = type(like), shape
        start, stop = cut.range_of(self.rank)
        cut.piece = _memory(stop - start, dtype, self.device)
        fresh._zeroshard = cut  # type: ignore[attr-defined]
        fresh.__class__ = sharded_class(cut.cls)
        return fresh

    def is_open(self, cut: Cut) -> bool:
        return cut.number in self._open

    def touch(self, cut: Cut, operation: str) -> None:
        """Open it, inside `zeroshard.Init`; ShardedAccessError elsewhere."""
        if not self.contexts:
            raise _refuse(cut, operation)
        self._open_one(cut)

    def _open_one(self, cut: Cut) -> None:
        if self.is_open(cut):
            return
        self._begin("gathers", cut)
        parameter = cut.parameter
        whole = _memory(cut.shape.numel(), cut.piece.dtype, cut.device)
        self._spread(cut, whole)
        parameter.__class__ = cut.cls
        parameter.data = whole.view(cut.shape)
        self._opened(parameter, cut)

    def _opened(self, parameter: nn.Parameter, cut: Cut) -> None:
        cut.nbytes = parameter.nbytes
        self._open[cut.number] = parameter, cut
        self._open_bytes += cut.nbytes

    def _closed(self, cut: Cut) -> None:
        del self._open[cut.number]
        self._open_bytes -= cut.nbytes
        self._freed_bytes += cut.nbytes
        if self._freed_bytes > OPEN_BYTES:
            self._freed_bytes = 0
            trim_heap()

    def put_away_oldest(self) -> None:
        """Until no more than `OPEN_BYTES` lie open, or one parameter, or what is held: claimed by a `gathered`
        block, or viewed by code that may yet write through the view. Whether it is, ranks say together: their
        garbage collectors need not agree."""
        tries = MAX_VIEWED
        for parameter, cut in list(self._open.values())[:-1] if self._open_bytes > OPEN_BYTES else ():
            if cut.claims:
                continue
            if self._anywhere(_has_views(parameter)):
                self._open.move_to_end(cut.number)
                tries -= 1
            else:
                self._put_away(parameter, cut)
            if self._open_bytes <= OPEN_BYTES or not tries:
                return

    def put_all_away(self) -> None:
        for parameter, cut in list(self._open.values()):
            if not cut.claims:
                self._put_away(parameter, cut)
        self._chunk = None

    def _put_away(self, parameter: nn.Parameter, cut: Cut) -> None:
        if not can_cut(parameter):  # moved to `meta` meanwhile
            self._forget(parameter, cut)
            return
        self._collapse(parameter, cut, 0)
        self._close(parameter, cut)

    def _close(self, parameter: nn.Parameter, cut: Cut) -> None:
        parameter.data = torch.empty(0, dtype=cut.piece.dtype, device=cut.device)
        parameter.__class__ = sharded_class(cut.cls)
        self._closed(cut)

    def _forget(self, parameter: nn.Parameter, cut: Cut) -> None:
        del parameter._zeroshard  # type: ignore[attr-defined]
        self._closed(cut)

    def forget_open(self) -> None:
        """The code that used them was left by an exception, perhaps on this rank alone: nothing is sent, and what
        is open becomes a parameter like any other."""
        for parameter, cut in list(self._open.values()):
            if not cut.claims:
                self._forget(parameter, cut)

    def hand_over(self, cut: Cut, target: Tensor) -> None:
        """Fill the 1-D `target` with all values, and let the parameter go, with 0 elements."""
        parameter = cut.parameter
        if cut.claims:
            raise StateError(
                f"parameter {cut.name!r} is gathered by GatheredParameters; leave that block before `initialize`"
            )
        if self.is_open(cut):
            self._put_away(parameter, cut)
        self._begin("hands over", cut)
        self._spread(cut, target)
        parameter.__class__ = cut.cls
        del parameter._zeroshard  # type: ignore[attr-defined]
        cut.piece = torch.empty(0)

    def finish(self) -> None:
        """The end of the outermost `zeroshard.Init`: all are put away, and all ranks are here."""
        self.put_all_away()
        trim_heap()
        self._begin("leaves the block", None)

    def _room_for(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._chunk is None:
            self._chunk = _memory(CHUNK_BYTES, torch.uint8, self.device)
        return self._chunk[: numel * dtype.itemsize].view(dtype)

    def _begin(self, what: str, cut: Cut | None) -> None:
        """Ranks are about to send: all the same, or ShardedAccessError on all, and not a hang."""
        which = "" if cut is None else f" {cut.name!r}"
        shape = None if cut is None else tuple(cut.shape)
        self._digest = zlib.crc32(f"{what}{which} {shape}".encode(), self._digest)
        if not all(unanimous(self._sum(ballot([self._digest])), self.size)):
            self._digest = 0
            raise ShardedAccessError(
                f"ranks ran different code under zeroshard.Init: rank {self.rank} of {self.size} {what}{which}, "
                f"and another rank does something else. Build the model in the same way on every rank; "
                f"what one rank is to do alone goes into `with zeroshard.zero.GatheredParameters(params, "
                f"modifier_rank=0)`, which all enter."
            )

    # ---- gathered blocks ----------------------------------------------------------------------------

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None = None) -> Iterator[None]:
        """Open inside the block; see `zero.GatheredParameters`. Every rank enters and leaves."""
        if modifier_rank is not None and not 0 <= modifier_rank < self.size:
            raise StateError(f"modifier_rank is {modifier_rank}; the group has ranks 0 to {self.size - 1}")
        held = sorted(((p, home_of(p)) for p in params), key=lambda pair: pair[1].number)
        for parameter, cut in held:
            if self.is_open(cut) and not cut.claims:
                self._keep(parameter, cut, 0)  # under Init: ranks may have drawn different values so far
            self._open_one(cut)
            cut.claims += 1
        before = [_state(parameter, cut) for parameter, cut in held]
        try:
            yield
            if modifier_rank is not None:
                for parameter, cut in held:
                    self._keep(parameter, cut, modifier_rank)
                    cut.kept += 1
            else:
                self._refuse_edits(held, before)
        finally:
            for parameter, cut in held:
                cut.claims -= 1
                if not cut.claims and not self.contexts:
                    self._close(parameter, cut)

    def _refuse_edits(self, held: Sequence[_Held], before: Sequence[tuple[Any, ...]]) -> None:
        edited = [cut.name for (p, cut), was in zip(held, before, strict=True) if _edited(p, cut, was)]
        if not self._anywhere(bool(edited)):
            return
        for parameter, cut in held if self.contexts else ():
            self._refill(parameter, cut)
        where = f"{edited[0]!r} was" if edited else "weights were, on another rank,"
        raise ShardedAccessError(
            f"{where} edited inside GatheredParameters without modifier_rank. Likely: the edit is meant, and "
            f"`GatheredParameters(params, modifier_rank=0)` keeps rank 0's on all ranks; or it is not, and "
            f"some operation in the block writes to a parameter in place."
        )

    def _keep(self, parameter: nn.Parameter, cut: Cut, source: int) -> None:
        """Rank `source`'s values become everybody's; the parameter stays open."""
        if self._anywhere(parameter.shape != cut.shape and not self.contexts):
            raise StateError(
                f"{cut.name!r} was given another shape inside GatheredParameters: {tuple(parameter.shape)} here, "
                f"and it is {tuple(cut.shape)}. Replace the parameter in its module instead."
            )
        self._collapse(parameter, cut, source)
        self._refill(parameter, cut)

    def _refill(self, parameter: nn.Parameter, cut: Cut) -> None:
        whole = _memory(cut.shape.numel(), cut.piece.dtype, cut.device)
        self._spread(cut, whole)
        with torch.no_grad():
            parameter.data.copy_(whole.view(cut.shape))

    # ---- sending ------------------------------------------------------------------------------------

    def _collapse(self, parameter: nn.Parameter, cut: Cut, source: int) -> None:
        """Take every rank's piece from rank `source`'s values."""
        self._begin("puts away", cut)
        dtype = cut.take_shape_of(parameter)
        flat = parameter.data.reshape(-1)
        start, stop = cut.range_of(self.rank)
        with torch.no_grad(), torch.device(self.device):
            for low, high in _chunks(0, flat.numel(), dtype):
                if self.rank == source:
                    chunk = flat[low:high].to(device=self.device, dtype=dtype)
                else:
                    chunk = self._room_for(high - low, dtype)
                self._collectives.broadcast(chunk.view(torch.uint8), source)
                first, last = max(low, start), min(high, stop)
                if first < last:
                    cut.piece[first - start : last - start].copy_(chunk[first - low : last - low])

    def _spread(self, cut: Cut, target: Tensor) -> None:
        """Fill the 1-D `target` with the pieces of all ranks."""
        dtype = cut.piece.dtype
        direct = target.dtype is dtype and target.device == self.device
        with torch.no_grad(), torch.device(self.device):
            for rank in range(self.size):
                start, stop = cut.range_of(rank)
                for low, high in _chunks(start, stop, dtype):
                    if rank == self.rank:
                        chunk = cut.piece[low - start : high - start].to(self.device)
                    elif direct:
                        chunk = target[low:high]
                    else:
                        chunk = self._room_for(high - low, dtype)
                    self._collectives.broadcast(chunk.view(torch.uint8), rank)
                    if rank == self.rank or not direct:
                        target[low:high].copy_(chunk)

    def _anywhere(self, flag: bool) -> bool:
        return self._sum([float(flag)])[0] > 0

    def _sum(self, numbers: Iterable[float]) -> list[float]:
        with torch.device(self.device):
            return self._collectives.sum_to_host(torch.tensor(list(numbers), dtype=torch.float64))


_Held = tuple[nn.Parameter, Cut]


def _memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised. On the host it is mapped for itself, so that the end of the tensor gives it back: in the heap,
    pieces that live long would lie between the whole parameters that come and go, and nothing would be."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < MAPPED_BYTES or sys.platform == "win32":
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


def trim_heap() -> None:
    """Give free pages of the C heap back to the system. Constructors take their tensors from it by an aligned
    allocation, which glibc cannot serve from a hole that such a tensor of the same size has left: without this, the
    heap grows to the size of the whole model."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _has_views(parameter: nn.Parameter) -> bool:
    """Somebody else holds its storage: it counts the parameter, and the handle that is made here to ask."""
    # Kept in a name: torch 2.9 lets go of its count with it, later releases do not.
    handle = parameter.untyped_storage()
    return int(torch._C._storage_Use_Count(handle._cdata)) > 2


def _chunks(start: int, stop: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    step = CHUNK_BYTES // dtype.itemsize
    for low in range(start, stop, step):
        yield low, min(low + step, stop)


def _state(parameter: nn.Parameter, cut: Cut) -> tuple[Any, ...]:
    """Changes with every edit of an open parameter, also through `.data`, which leaves no version behind."""
    return cut.kept, parameter.shape, parameter._version, fingerprint(parameter.data.reshape(-1))


def _edited(parameter: nn.Parameter, cut: Cut, was: tuple[Any, ...]) -> bool:
    """What a block inside this one kept is no edit of this one."""
    return cut.kept == was[0] and _state(parameter, cut) != was
