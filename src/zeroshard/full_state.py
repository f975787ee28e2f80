"""`state_dict` and `load_state_dict` of a sharded model: full tensors out and in, one bucket at a time.

torch calls hooks around each module's own part of both, and nothing else is needed. Before a module is saved its
bucket is gathered, so that whatever saves it (also a module's own `_save_to_state_dict`) finds true values; after
it, what was saved as a view of the bucket becomes a copy, and the bucket is freed. A block that is one bucket is
gathered once for all modules inside.

Loading writes into the gathered bucket, which is all that torch knows of; after a module, rank 0's values go from
there to all ranks, into shards and masters. A master takes the value that was given, not what 16 bits leave of it.

At stage 3 both are collectives: every rank calls them. But for code written for DeepSpeed, where nothing is
gathered and one rank may ask a part of the model for its names, `parts_are_gathered` can be turned off. Should code
in between raise, nothing has to be undone: a bucket that stayed gathered is freed by the next forward or step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.buffers import FlatBuffer
from zeroshard.errors import StateError
from zeroshard.guard import Alias, has_engine, home_of
from zeroshard.states import States
from zeroshard.trace import Action, Kind

__all__ = ["FullState", "StateDicts", "drop_frozen"]


@dataclass(frozen=True)
class _Copies:
    """What becomes of a saved weight: a copy on `device` (None: where it is), or nothing at all."""

    device: torch.device | None = None
    dropped: bool = False


@dataclass(frozen=True)
class _Given:
    """A parameter that is about to be loaded, and what the state dict has for it."""

    buffer: FlatBuffer
    index: int
    parameter: nn.Parameter
    version: int
    value: Tensor | None


class FullState:
    """The hooks of one engine's modules."""

    def __init__(self, states: States) -> None:
        self._states, self._executor = states, states.executor
        self._copies = _Copies()
        self.parts_are_gathered = True
        """A state dict that is asked of a part of the model, and not of the whole, has elements too."""
        self._of_whole = False
        """The one that is being made is that of the whole model."""
        self._root: weakref.ref[nn.Module] | None = None
        self._opened: Any = WeakIdKeyDictionary()
        """By module: the buckets that were gathered for it."""
        self._given: Any = WeakIdKeyDictionary()
        """By module: what is being loaded into it."""
        self._made: dict[tuple[Any, ...], tuple[str, weakref.ref[Tensor]]] = {}
        """By place in a bucket: the copy that was made of it latest, and its key, for tied names."""

    def install(self, model: nn.Module) -> list[RemovableHandle]:
        """Hook every module that has parameters; the handles remove the hooks."""
        handles: list[RemovableHandle] = []
        self._root = weakref.ref(model)
        for module in model.modules():
            if next(module.parameters(), None) is not None:
                handles += self._hook(module)
        return handles

    def _hook(self, module: nn.Module) -> list[RemovableHandle]:
        def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            # Without a prefix it is the outermost call; with one it is below that, or below what wraps the model.
            assert self._root is not None
            if not prefix or module is self._root():
                self._of_whole = module is self._root()
            if self._gathers:
                self._open(module)
            else:
                self._give_aliases(module, True)

        def after_save(module: nn.Module, saved: Any, prefix: str, _: Any) -> None:
            self._copy_out(module, saved, prefix)
            if not self._gathers:
                self._give_aliases(module, False)
            self._shut(module)
            assert self._root is not None
            if module is self._root():
                self._of_whole = False

        def before_load(module: nn.Module, given: Any, prefix: str, metadata: Any, *more: Any) -> None:
            self._refuse_exchange(module, metadata)
            self._open(module)
            *_, errors = more
            self._given[module] = self._find_given(module, given, prefix), errors

        def after_load(module: nn.Module, _: Any) -> None:
            self._take_in(*self._given.pop(module))
            self._shut(module)

        return [
            module.register_state_dict_pre_hook(before_save),  # type: ignore[no-untyped-call]
            module.register_state_dict_post_hook(after_save),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(before_load),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(after_load),  # type: ignore[no-untyped-call]
        ]

    # ---- buckets ------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        """The state dict that is being made has elements."""
        return self.parts_are_gathered or self._of_whole

    def _holds(self, parameter: nn.Parameter) -> bool:
        """It is this engine's. A copy of a module keeps these hooks, and may be plain, or another engine's."""
        if not has_engine(parameter):
            return False
        buffer, buffers = home_of(parameter).buffer, self._states.buffers
        index = buffer.layout.index
        return index < len(buffers) and buffers[index] is buffer

    def _buffers_of(self, parameters: Iterator[nn.Parameter]) -> list[FlatBuffer]:
        """The buckets that hold `parameters`, in an order that all ranks share."""
        homes = [home_of(parameter) for parameter in parameters if self._holds(parameter)]
        found = {home.buffer.layout.index: home.buffer for home in homes}
        return [found[index] for index in sorted(found)]

    def _open(self, module: nn.Module) -> None:
        """Gather what `module` itself holds; all below it when that is one bucket, so that it comes once."""
        buffers = self._buffers_of(module.parameters())
        if len(buffers) > 1:
            buffers = self._buffers_of(module.parameters(recurse=False))
        opened = [buffer.layout.index for buffer in buffers if not buffer.is_live]
        for bucket in opened:
            self._executor.perform(Action(Kind.GATHER, bucket))
        for buffer in buffers:
            self._executor.perform(Action(Kind.WAIT, buffer.layout.index))
        self._opened[module] = opened

    def _shut(self, module: nn.Module) -> None:
        for bucket in self._opened.pop(module, ()):
            self._executor.perform(Action(Kind.FREE, bucket))

    def _give_aliases(self, module: nn.Module, given: bool) -> None:
        for buffer in self._buffers_of(module.parameters()):
            buffer.gives_aliases = given

    # ---- saving -------------------------------------------------------------------------------------

    @contextmanager
    def copying(self, *, device: torch.device | None = None, dropped: bool = False) -> Iterator[None]:
        """Inside, weights are saved as copies on `device`, or `dropped`."""
        before, self._copies = self._copies, _Copies(device, dropped)
        try:
            yield
        finally:
            self._copies = before

    def _copy_out(self, module: nn.Module, saved: MutableMapping[str, Any], prefix: str) -> None:
        """Put copies in the place of what shares memory with a bucket, whoever saved it under whatever name."""
        buffers = self._buffers_of(module.parameters())
        for key in [key for key in saved if key.startswith(prefix)]:
            value = saved[key]
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            if isinstance(home_of(value), Alias):
                continue
            source = next((buffer for buffer in buffers if buffer.shares_memory(value)), None)
            if source is None:
                continue
            if self._copies.dropped:
                del saved[key]
                continue
            place = (source.layout.index, value.storage_offset(), value.shape, value.stride(), type(value))
            first, copy = self._made.get(place, ("", None))
            tied = None if copy is None else copy()
            if tied is None or saved.get(first) is not tied:
                tied = _copy_of(value, self._copies.device)
                self._made[place] = key, weakref.ref(tied)
            saved[key] = tied

    # ---- loading ------------------------------------------------------------------------------------

    def _refuse_exchange(self, module: nn.Module, metadata: Any) -> None:
        """StateError for ways of loading that would give the module other parameters than the engine trains."""
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        # Taken out: torch writes it into the state dict, where the next load would find it.
        assigns = metadata.pop("assign_to_params_buffers", False)
        if not self._buffers_of(module.parameters()):
            metadata["assign_to_params_buffers"] = assigns
            return
        if not (assigns or swaps):
            return
        how = "assign=True" if assigns else "torch.__future__.set_swap_module_params_on_conversion(True)"
        raise StateError(
            f"load_state_dict with {how} would put other parameters into {type(module).__name__} than those that "
            f"the engine shards and trains. Cure: leave it out (values are copied, and fp32 ones reach the masters "
            f"as they are), or load before `initialize`."
        )

    def _find_given(self, module: nn.Module, state: Any, prefix: str) -> list[_Given]:
        """What `state` has for the parameters of `module` itself."""
        found = []
        for name, parameter in module._parameters.items():
            if parameter is None or not self._holds(parameter):
                continue
            home = home_of(parameter)
            value = state.get(prefix + name)
            fits = isinstance(value, Tensor) and value.shape == parameter.shape
            found.append(
                _Given(home.buffer, home.index, parameter, parameter._version, value if fits else None)
            )
        return found

    def _take_in(self, given: Sequence[_Given], errors: list[str]) -> None:
        """What was loaded, as rank 0 has it, becomes everybody's weights and masters. torch raises all `errors` at
        the end, so that ranks stay together until then."""
        if not given:
            return
        loaded = [float(one.value is not None or one.parameter._version != one.version) for one in given]
        # All ranks have come here with the gathers behind them, so shards may change.
        for one, ranks in zip(given, self._states.sum(loaded), strict=True):
            if ranks:
                one.buffer.put(one.index, self._of_rank_0(one))
            if 0 < ranks < self._states.world:
                errors.append(
                    f"{one.buffer.layout.slots[one.index].name!r} was loaded on {ranks:g} of {self._states.world} "
                    f"ranks. Give every rank the same state dict; the values of rank 0 are the ones that count."
                )

    def _of_rank_0(self, one: _Given) -> Tensor:
        master = one.buffer.owned
        value = one.parameter.detach()
        # A module may load something else than it was given: then that is what counts.
        if one.value is not None and torch.equal(_bits(one.value.to(value)), _bits(value)):
            value = one.value
        wide = value.to(device=master.device, dtype=master.dtype).reshape(-1).clone()
        if wide.numel():
            self._states.groups.replicate.broadcast(wide, 0)
            self._states.groups.gather.broadcast(wide, 0)
        return wide


class StateDicts:
    """A base of `Engine`."""

    module: Any
    _states: States
    _full_state: FullState

    def full_state_dict(self, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, Any]:
        """The module's whole state dict, on the CPU, on rank 0; `{}` on the others. All ranks call it.

        Takes one bucket of memory besides the result. Names of tied weights share one tensor. Without `rank0_only`
        every rank gets it; without `cpu` tensors stay on the device. `module.state_dict()` is that of all ranks, on
        the device.
        """
        device = torch.device("cpu") if cpu else None
        absent = rank0_only and self._states.rank != 0
        with self._full_state.copying(device=device, dropped=absent):
            state: dict[str, Any] = self.module.state_dict()
        if absent:
            return {}
        for key, value in state.items():
            if cpu and isinstance(value, Tensor):
                state[key] = value.to(device)  # buffers; weights are there
        return state

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """`module.state_dict()`, if wanted without parameters that do not require grad. All ranks call it."""
        state: dict[str, Any] = self.module.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            drop_frozen(state, self.module, prefix)
        return state


def drop_frozen(state: dict[str, Any], module: nn.Module, prefix: str = "") -> None:
    """Take what does not require grad out of the state dict of `module`."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


def _copy_of(value: Tensor, device: torch.device | None) -> Tensor:
    """Memory of its own, with what hangs on a parameter (`keep_vars`), but not its place in a bucket."""
    copy = value.detach().to(device or value.device, copy=True, memory_format=torch.contiguous_format)
    if not isinstance(value, nn.Parameter):
        return copy
    kept = nn.Parameter(copy, requires_grad=value.requires_grad)
    kept.__class__ = type(value)
    kept.__dict__.update({name: held for name, held in value.__dict__.items() if name != "_zeroshard"})
    return kept


def _bits(value: Tensor) -> Tensor:
    """For a comparison that all dtypes have, and in which NaN is NaN."""
    return value.reshape(-1).view(torch.uint8)
