"""Which parameters train, as `requires_grad` says: at the start, and whenever it changes.

    frozen at the start    no gradient, no master, no optimizer state; in no order of reductions
    unfrozen later         its bucket gets what a bucket has that trains from the start; its optimizer state is new
    frozen later           keeps what it has, gets no gradient, and so is left alone
    unfrozen again         goes on with the state it had

What trains is looked at when a forward begins that records gradients. A bucket that had no gradients until then
takes part in collectives from then on, so all ranks are asked first. Which group of the optimizer a parameter is in
stays the user's: the one that held it at `initialize`, or one that `add_param_group` brings.

The same care goes to parameters that are not the engine's: new ones in a group, or in the module tree (an adapter
around a sharded layer), are an error at the step rather than never trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zeroshard.boundary import Boundary
from zeroshard.errors import CommError, StateError
from zeroshard.gradients import ShardSlice
from zeroshard.guard import has_engine, home_of
from zeroshard.hooks import hook_gradient
from zeroshard.layout import unfrozen
from zeroshard.materialize import make_trainable
from zeroshard.optimizer import needs_whole
from zeroshard.policy import Policy
from zeroshard.states import States
from zeroshard.update import Update
from zeroshard.watching import groups_for

__all__ = ["Trainables"]


class _Entry(NamedTuple):
    """A parameter and its place."""

    name: str
    bucket: int
    slot: int
    parameter: nn.Parameter


class Trainables:
    """The parameters of one engine that train."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        states: States,
        policy: Policy,
        update: Update,
        boundary: Boundary,
    ) -> None:
        """`parameters` by name, in order of definition."""
        self._model, self._states, self._policy = model, states, policy
        self._update, self._boundary = update, boundary
        self._executor = states.executor
        places = self._executor.layout.slot_of
        self._entries = [_Entry(name, *places[name], parameter) for name, parameter in parameters.items()]
        self._hooks: dict[str, RemovableHandle] = {}
        """By parameter: what takes its gradient."""
        self._unplaced: list[_Entry] = []
        """Unfrozen, and not seen in a group of the optimizer yet."""
        self._required: list[bool] = []
        self._tree = _tree_of(model)

    def install(self) -> list[RemovableHandle]:
        """Take the gradients of what trains now, and look at what does from time to time; handles end it."""
        self._hook([entry for entry in self._entries if entry.parameter.requires_grad])
        self._look()
        self._executor.on_path, self._update.on_step = self._before_path, self._before_step
        self._update.who_trains = self._disagreement
        handles: list[Any] = [_Handles(self._hooks)]
        return handles

    def _before_path(self) -> None:
        self._update.conclude()
        if torch.is_grad_enabled():
            self._look()

    # ---- requires_grad ------------------------------------------------------------------------------

    def _look(self) -> None:
        """A forward begins: has `requires_grad` changed?"""
        with torch._C.DisableTorchFunctionSubclass():  # the guard would answer the same, at a price
            required = [entry.parameter.requires_grad for entry in self._entries]
        if required == self._required:
            return
        new = [
            entry
            for entry, trains in zip(self._entries, required, strict=True)
            if trains and entry.name not in self._hooks
        ]
        if new:
            self._unfreeze(new)
        self._required = required
        self._update.trains_digest = zlib.crc32(bytes(required))
        trained = {entry.bucket for entry, trains in zip(self._entries, required, strict=True) if trains}
        self._states.passes.untrained = set(range(len(self._states.buffers))) - trained

    def _unfreeze(self, new: Sequence[_Entry]) -> None:
        """Parameters require grad that had none until now."""
        self._ask_all_ranks(new)
        states = self._states
        fresh = sorted({entry.bucket for entry in new if states.gradients[entry.bucket] is None})
        for entry in new:
            layout = states.buffers[entry.bucket].layout
            if layout.dtype.startswith("float8"):
                raise StateError(
                    f"parameter {entry.name!r} holds packed {layout.dtype} values, which cannot be trained: set "
                    f"requires_grad to False"
                )
        if fresh:
            names = [entry.name for entry in self._entries]
            self._executor.plan_anew(unfrozen(self._executor.layout, fresh, names))
        for bucket in fresh:
            buffer = states.buffers[bucket]
            buffer.layout = self._executor.layout.buckets[bucket]
            states.gradients[bucket] = gradient = make_trainable(
                buffer, groups_for(buffer.layout, states.groups), self._policy
            )
            pieces = buffer.layout.pieces(buffer.group.rank)
            for part, piece in zip(states.slices[bucket], pieces, strict=False):  # none without an optimizer
                part.train(buffer.owned, piece, gradient)
        self._update.take_in()
        self._hook(new)
        self._unplaced += new

    def _disagreement(self) -> str:
        """What ranks that do not train the same are told. All ranks ask."""
        sums = self._states.sum([float(trains) for trains in self._required])
        world, rank = self._states.world, self._states.rank
        entry, ranks, here = next(
            (entry, ranks, trains)
            for entry, ranks, trains in zip(self._entries, sums, self._required, strict=True)
            if 0 < ranks < world
        )
        return (
            f"parameter {entry.name!r} requires grad on {ranks:g} of {world} ranks ({'also' if here else 'not'} on "
            f"rank {rank}): its gradient would be averaged over ranks that have none. Set requires_grad alike on "
            f"all ranks, before the same forward; then zero_grad() and go on."
        )

    def _hook(self, entries: Sequence[_Entry]) -> None:
        for name, bucket, slot, parameter in entries:
            self._hooks[name] = hook_gradient(
                parameter, name, bucket, slot, self._states.passes, self._boundary
            )

    def _ask_all_ranks(self, new: Sequence[_Entry]) -> None:
        """StateError unless all ranks have the same `new`: the others would wait for reductions in vain."""
        names = {entry.name for entry in new}
        waiting = [entry.name for entry in self._entries if entry.name not in self._hooks]
        try:
            sums = self._states.ask([float(name in names) for name in waiting])
        except CommError as error:
            raise StateError(
                f"parameter {new[0].name!r} ({len(new)} in all) requires grad on this rank (rank "
                f"{self._states.rank}) and did not before; another rank went on without it, or is gone. Set "
                f"requires_grad alike on all ranks, before the same forward. What the ranks saw: {error}"
            ) from error
        for name, ranks in zip(waiting, sums, strict=True):
            if 0 < ranks < self._states.world:
                here = "here as well" if name in names else "not here"
                raise StateError(
                    f"parameter {name!r} was unfrozen on {ranks:g} of {self._states.world} ranks ({here}, on rank "
                    f"{self._states.rank}). Set requires_grad alike on all ranks, before the same forward."
                )

    # ---- the optimizer ------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer) -> None:
        self._check_tree()
        for number, group in enumerate(optimizer.param_groups):
            if not all(isinstance(parameter, ShardSlice) for parameter in group["params"]):
                self._adopt(optimizer, number)
        if self._unplaced:
            self._check_placed(optimizer)

    def _adopt(self, optimizer: Optimizer, number: int) -> None:
        """A group has parameters that were added after `initialize`: exchange them for their slices."""
        held = {id(part) for group in optimizer.param_groups for part in group["params"]}
        group = optimizer.param_groups[number]
        adopted: list[ShardSlice] = []
        for parameter in group["params"]:
            if isinstance(parameter, ShardSlice):
                adopted.append(parameter)
                continue
            home = home_of(parameter)
            if home is None or home.buffer not in self._states.buffers:
                raise StateError(
                    f"the optimizer's group {number} got a parameter (shape {tuple(parameter.shape)}) that this "
                    f"engine does not hold, and the step would train it on each rank alone. Groups added after "
                    f"`initialize` take parameters that the model had then; for new ones, close() the engine and "
                    f"initialize again."
                )
            part = self._states.slices[home.buffer.layout.index][home.index]
            if id(part) in held:
                raise StateError(
                    f"the optimizer's group {number} got parameter {home.name!r}, which it holds already, and "
                    f"would update it twice per step. Give each parameter once."
                )
            held.add(id(part))
            adopted.append(part)
        group["params"] = adopted

    def _check_placed(self, optimizer: Optimizer) -> None:
        """Of what was unfrozen: it is in a group, whose maths may have it in pieces."""
        group_of = {id(part): group for group in optimizer.param_groups for part in group["params"]}
        unplaced = [entry for entry in self._unplaced if entry.parameter.requires_grad]
        for entry in unplaced:
            group = group_of.get(id(self._states.slices[entry.bucket][entry.slot]))
            if group is None:
                raise StateError(
                    f"parameter {entry.name!r} was unfrozen after `initialize` and is in no group of the "
                    f"optimizer, so the step would not train it. Cure: "
                    f'optimizer.add_param_group({{"params": [parameter]}}), or a group at `initialize` that holds '
                    f"it while it is frozen."
                )
            self._check_whole(entry, optimizer, group)
        self._unplaced = [entry for entry in self._unplaced if entry not in unplaced]

    def _check_whole(self, entry: _Entry, optimizer: Optimizer, group: Mapping[str, Any]) -> None:
        layout = self._states.buffers[entry.bucket].layout
        slot = layout.slots[entry.slot]
        is_cut = slot.numel and slot.offset // layout.shard_numel != (slot.end - 1) // layout.shard_numel
        if is_cut and needs_whole(optimizer, group) is not False:
            raise StateError(
                f"parameter {entry.name!r} was frozen at `initialize` and cut between ranks, and "
                f"{type(optimizer).__name__} updates whole parameters. Unfreeze it before `initialize`, or give it "
                f"to a group whose update is elementwise."
            )

    # ---- the model ----------------------------------------------------------------------------------

    def _check_tree(self) -> None:
        """StateError for parameters that came into the model after `initialize` and would not be trained."""
        if all([*map(id, held.values())] == known for held, known in self._tree):
            return
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and not has_engine(parameter):
                raise StateError(
                    f"parameter {name!r} (shape {tuple(parameter.shape)}) came into the model after `initialize`, "
                    f"so the engine does not train it, and ranks would not share its gradient. Add adapters and "
                    f"layers before `initialize`; or engine.close(), add them, and initialize again; or set "
                    f"requires_grad to False."
                )
        self._tree = _tree_of(self._model)


class _Handles:
    """The hooks that there are when they are to be removed."""

    def __init__(self, hooks: dict[str, RemovableHandle]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        while self._hooks:
            self._hooks.popitem()[1].remove()


def _tree_of(model: nn.Module) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Of each module: the dicts that hold its children and its parameters, and what they hold."""
    held = (held for module in model.modules() for held in (module._modules, module._parameters))
    return [(entries, [*map(id, entries.values())]) for entries in held if entries]
