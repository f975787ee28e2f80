"""From a built model to buffers: describe it for the layout, then move its weights bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.buffers import FlatBuffer
from zeroshard.comm import Collectives
from zeroshard.errors import ModelError
from zeroshard.gradients import GradientBuffer
from zeroshard.guard import home_of
from zeroshard.layout import BucketLayout, ModuleSpec, ParameterSpec, Slot
from zeroshard.policy import BYTES_OF, Policy
from zeroshard.precision import dtype_name, dtype_of
from zeroshard.streams import Lane

__all__ = ["Description", "Groups", "Ownership", "build_buffer", "describe", "make_trainable", "move_buffers"]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model as the layout sees it, and the way back to its objects."""

    root: ModuleSpec
    specs: tuple[ParameterSpec, ...]
    parameters: Mapping[str, nn.Parameter]
    modules: Mapping[str, nn.Module]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ownership:
    """Process groups that were made for an engine; gone when the engine is."""

    process_groups: list[dist.ProcessGroup] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The collectives a model is sharded over. Gathers and reduces each have an order of their own."""

    gather: Collectives
    reduce: Collectives
    replicate: Collectives
    secondary: Collectives | None = None
    """The neighbours that share a second copy of gathered parameters (hpZ)."""
    ownership: Ownership = field(default_factory=Ownership)
    """Of the process groups made for these collectives, which end with them. Copies of a `Groups` share it."""

    def close(self) -> None:
        for group in (self.gather, self.reduce, self.replicate, self.secondary):
            if group is not None:
                group.close()
        while self.ownership.process_groups:
            dist.destroy_process_group(self.ownership.process_groups.pop())


def describe(
    model: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    is_leaf: Callable[[str, nn.Module], bool],
    uncut: Collection[int] = (),
) -> Description:
    """Walk the module tree once. Shared modules and tied parameters appear by their first name.

    `dtypes`: what each parameter is to be held in. `uncut`: ids of parameters that one rank must own whole.
    """
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(
            f"{type(model).__name__} has no parameters, so there is nothing to train or shard. If they are "
            f"created lazily, run one forward before `initialize`."
        )
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    specs = tuple(
        _spec(name, parameter, dtypes[name], id(parameter) in uncut) for name, parameter in parameters.items()
    )
    modules: dict[str, nn.Module] = {}
    root = _visit("", model, modules, set(), name_of, is_leaf)
    return Description(root=root, specs=specs, parameters=parameters, modules=modules)


def _visit(
    path: str,
    module: nn.Module,
    modules: dict[str, nn.Module],
    seen: set[int],
    name_of: Mapping[int, str],
    is_leaf: Callable[[str, nn.Module], bool],
) -> ModuleSpec:
    """`module` and what is below it; `modules` and `seen` are filled on the way."""
    seen.add(id(module))
    modules[path] = module
    children = tuple(
        _visit(f"{path}.{name}" if path else name, child, modules, seen, name_of, is_leaf)
        for name, child in module.named_children()
        if id(child) not in seen
    )
    return ModuleSpec(
        path=path,
        type_name=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=tuple(name_of[id(p)] for p in module.parameters(recurse=False)),
        children=children,
        is_sequence=isinstance(module, (nn.ModuleList, nn.Sequential)),
        is_leaf=bool(path) and is_leaf(path, module),
    )


def _spec(name: str, parameter: nn.Parameter, dtype: torch.dtype, uncut: bool) -> ParameterSpec:
    if parameter.is_meta:
        raise ModelError(
            f"parameter {name!r} is on the meta device and has no values. Build or load the model on a real "
            f"device before `initialize`."
        )
    if parameter.is_sparse or parameter.is_complex():
        raise ModelError(
            f"parameter {name!r} is {'sparse' if parameter.is_sparse else 'complex'}; only dense real "
            f"parameters can be sharded."
        )
    if dtype_name(parameter.dtype) not in BYTES_OF:
        raise ModelError(
            f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}, which cannot be sharded; known are "
            f"{', '.join(BYTES_OF)}. Keep it as a buffer, or view it as uint8."
        )
    if parameter.requires_grad and parameter.dtype.itemsize == 1:
        raise ModelError(
            f"parameter {name!r} holds packed {dtype_name(parameter.dtype)} values, which cannot be trained. Set "
            f"its requires_grad to False."
        )
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=dtype_name(dtype),
        trainable=parameter.requires_grad,
        granularity=max(parameter.numel(), 1) if uncut and parameter.requires_grad else 1,
    )


def build_buffer(
    layout: BucketLayout,
    parameters: Sequence[nn.Parameter],
    groups: Groups,
    policy: Policy,
    lane: Lane,
    device: torch.device,
) -> FlatBuffer:
    """Move one bucket's weights into its buffer. Rank 0's values are everybody's from here on.

    The masters are cut from the values as they were handed over, before any cast to 16 bit. Parameters that are
    cut already (`zeroshard.Init`) are put together here, bucket by bucket, and nowhere else.
    """
    dtype = dtype_of(layout.dtype)
    shard_group = groups.gather
    with torch.no_grad():
        source = torch.zeros(layout.padded, dtype=_common_dtype(parameters), device=device)
        agreed = [
            _hand_over(parameter, slot, source, policy)
            for slot, parameter in zip(layout.slots, parameters, strict=True)
        ]
        if not all(agreed):
            groups.replicate.broadcast(source, 0)
            shard_group.broadcast(source, 0)
        own = layout.shard(shard_group.rank)
        full, shard = _place(source, own, layout, dtype, shard_group)
        master: Tensor | None = None
        if layout.trainable and dtype.itemsize < 4 and policy.wide_masters:
            master = source[own].to(torch.float32, copy=True)
    return FlatBuffer(
        layout,
        parameters,
        full=full,
        shard=shard,
        master=master,
        group=shard_group,
        lane=lane,
        secondary=groups.secondary,
    )


def _hand_over(parameter: nn.Parameter, slot: Slot, source: Tensor, policy: Policy) -> bool:
    """Put a parameter's values into their place of `source`; whether they are the same on all ranks."""
    place = source[slot.offset : slot.end]
    cut = home_of(parameter)
    if cut is None:
        place.view(slot.spec.shape).copy_(parameter.data)
        return False
    cut.hand_over(place)
    return bool(cut.shards == policy.world)


def _place(
    source: Tensor, own: slice, layout: BucketLayout, dtype: torch.dtype, group: Collectives
) -> tuple[Tensor, Tensor]:
    """`full` and `shard`; what the group sends, gather after gather, lies where it can be sent from."""
    numel = layout.padded if layout.resident else layout.shard_numel
    sent = group.empty(numel, dtype=dtype, device=source.device)
    if layout.resident:
        sent.copy_(source)
        return sent, sent[own]
    sent.copy_(source[own])
    return source.to(dtype), sent


def _common_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """The dtype that holds all values of a bucket exactly."""
    dtype = parameters[0].dtype
    for parameter in parameters[1:]:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return dtype


def make_trainable(buffer: FlatBuffer, groups: Groups, policy: Policy) -> GradientBuffer:
    """What a bucket has when it trains and a frozen one has not, at the start or later: a master, if 16-bit values
    are to have one and it was not cut from finer ones, and the place where gradients are collected."""
    layout, dtype = buffer.layout, dtype_of(buffer.layout.dtype)
    if buffer.master is None:
        narrow = dtype.itemsize < 4 and policy.wide_masters
        buffer.master = buffer.shard.to(torch.float32, copy=True) if narrow else buffer.shard
    return GradientBuffer(
        layout,
        dtype=dtype,
        device=buffer.shard.device,
        shard_group=groups.reduce,
        replicate_group=groups.replicate,
        keep_local=not policy.reduce_every_backward,
        wide_masters=policy.wide_masters,
        reduce_dtype=None if policy.reduce_dtype is None else dtype_of(policy.reduce_dtype),
        accumulate_dtype=None if policy.accumulate_dtype is None else dtype_of(policy.accumulate_dtype),
        before_reduce=policy.before_reduce,
        after_reduce=policy.after_reduce,
    )


def move_buffers(model: nn.Module, groups: Groups, device: torch.device) -> None:
    """Put the model's buffers on `device`, with rank 0's values. Their dtype is never changed."""
    moved: dict[int, Tensor] = {}  # a buffer of several modules stays one
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.is_meta:
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = _shared_buffer(buffer.detach().to(device), groups)
            module._buffers[name] = moved[id(buffer)]


def _shared_buffer(buffer: Tensor, groups: Groups) -> Tensor:
    """`buffer` with rank 0's values: the same tensor unless its elements share memory."""
    if buffer.is_sparse or not buffer.numel():
        return buffer
    flat = buffer.reshape(-1).contiguous()
    as_bytes = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
    groups.replicate.broadcast(as_bytes, 0)
    groups.gather.broadcast(as_bytes, 0)
    if not buffer.is_contiguous():
        return flat.view(buffer.shape)
    return buffer.copy_(flat.view(buffer.shape))
