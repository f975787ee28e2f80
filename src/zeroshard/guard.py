"""The guard: what a parameter is while its weights are elsewhere.

While a bucket is sharded, each of its parameters holds a 0-element tensor and its class is
`ShardedParameter`. The class tells the truth about shape, dtype, device and the like. Anything that would
read or write elements goes to the bucket first: inside a forward it gathers (all ranks run the same code, so
all gather); outside it raises an error that names the parameter and the cure. While gathered, the class is
the one the user gave, so the hot path pays nothing.

The 0-element tensor matters: code below Python's dispatch (or that switches it off) sees an empty tensor and
fails, where a view of freed storage would crash the process.
"""

from __future__ import annotations

import copy
import enum
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from zeroshard.errors import ShardedAccessError

__all__ = [
    "INTEGER_OF",
    "LEAF_MARK",
    "Alias",
    "Home",
    "ShardedParameter",
    "Status",
    "fingerprint",
    "has_engine",
    "home_of",
    "refuse_access",
    "sharded_class",
]


LEAF_MARK = "_zeroshard_leaf"
"""Of a module: whether it is one unit with all it contains, when its user has said so."""


class Status(enum.Enum):
    """Of a bucket, and of each of its parameters; public under these names."""

    NOT_AVAILABLE = "sharded"
    INFLIGHT = "gather launched"
    AVAILABLE = "gathered"


class Home(Protocol):
    """Where a parameter lives. Kept as the one private attribute on the parameter."""

    name: str
    shape: torch.Size
    shards: int
    status: Status
    number: int
    """Which one it is, the same on all ranks."""
    piece: Tensor
    """This rank's elements of what the model computes with, 1-D, not a copy."""
    access: Any
    """Who gathers it for a `with` block: `access.gathered(parameters, modifier_rank)`."""

    @property
    def buffer(self) -> Any:
        """The engine's buffer that it is a part of; None while it is cut and no engine has it."""

    def need(self, operation: str) -> None:
        """Make the weights available for `operation`, or raise ShardedAccessError."""

    def convert(self, to: Tensor) -> bool:
        """`module.to(...)` and its like: take on the dtype and device of the 0-element `to`, where that needs no
        elements; else False, and nothing is done."""

    def used(self, result: Any) -> None:
        """`operation` is done; its result may need the weights again in backward."""

    def alias(self, parameter: Any) -> Tensor | None:
        """What `parameter.detach()` is where the elements are not to be had: a tensor that tells its shape. None
        where `need` decides."""

    def address(self, parameter: Any) -> int | None:
        """What `parameter.data_ptr()` is where the elements are not to be had: a number of its own, by which code
        counts tied weights once. None where `need` decides."""

    def copying(self, parameter: Any) -> AbstractContextManager[None]:
        """Inside, the elements can be copied."""


def home_of(parameter: Tensor) -> Any:
    """The parameter's home, or None for a tensor zeroshard does not hold."""
    return parameter.__dict__.get("_zeroshard")


def has_engine(parameter: Tensor) -> bool:
    """Some engine holds the parameter. One that is only cut (`zeroshard.Init`) is not held."""
    home = home_of(parameter)
    return home is not None and home.buffer is not None


def refuse_access(name: str, shape: Sequence[int], shards: int, operation: str) -> ShardedAccessError:
    """The error for touching a sharded parameter where ranks cannot be known to gather together."""
    return ShardedAccessError(
        f"parameter {name!r} (shape {tuple(shape)}) is sharded over {shards} ranks and {operation!r} needs its "
        f"elements outside a forward of the engine. Cure: on every rank, `with engine.gathered([param]): ...` "
        f"(its shape, dtype and device can be read at any time)."
    )


class Alias:
    """The home of a tensor that stands for a sharded parameter in a state dict: it tells shape and dtype, and has
    no elements."""

    buffer = None
    status = Status.NOT_AVAILABLE

    def __init__(self, home: Home, refuse: Callable[[str], ShardedAccessError]) -> None:
        self.name, self.shape, self.shards, self.number = home.name, home.shape, home.shards, home.number
        self.access = self
        self.piece = torch.empty(0)
        self._refuse = refuse

    @classmethod
    def of(cls, parameter: Tensor, refuse: Callable[[str], ShardedAccessError]) -> Tensor:
        """The tensor. `refuse(operation)` is what is raised when its elements are wanted."""
        with torch._C.DisableTorchFunctionSubclass():
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        made = Tensor._make_subclass(type(parameter), empty, False)
        made._zeroshard = cls(home_of(parameter), refuse)  # type: ignore[attr-defined]
        return made

    def need(self, operation: str) -> None:
        raise self._refuse(operation)

    def used(self, result: Any) -> None:
        """Never."""

    def convert(self, to: Tensor) -> bool:
        return False

    def alias(self, made: Tensor) -> Tensor:
        return made

    def address(self, made: Tensor) -> None:
        return None

    def copying(self, made: Tensor) -> Any:
        raise self._refuse("deepcopy")

    def gathered(self, params: Sequence[Tensor], modifier_rank: int | None = None) -> Any:
        raise self._refuse("GatheredParameters")


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _size(shape: torch.Size, dim: int | None = None) -> Any:
    return shape if dim is None else shape[dim]


def _stride(shape: torch.Size, dim: int | None = None) -> Any:
    return _strides(shape) if dim is None else _strides(shape)[dim]


def _length(shape: torch.Size) -> int:
    if not shape:
        raise TypeError("len() of a 0-d tensor")
    return shape[0]


# Answered from the logical shape. Properties arrive as the getter of their descriptor.
_FROM_SHAPE: Mapping[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda shape: shape,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: len,  # type: ignore[attr-defined]
    Tensor.size: _size,
    Tensor.stride: _stride,
    Tensor.numel: lambda shape: shape.numel(),
    Tensor.nelement: lambda shape: shape.numel(),
    torch.numel: lambda shape: shape.numel(),
    Tensor.dim: len,
    Tensor.ndimension: len,
    Tensor.__len__: _length,
    Tensor.is_contiguous: lambda shape, **_: True,
    Tensor.storage_offset: lambda shape: 0,
}

# Made with the shape, dtype and device of their first argument; its elements are not looked at.
_LIKE: frozenset[Any] = frozenset(
    {
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
    }
)

# True of the 0-element stand-in as well: passed through.
_PASSED_THROUGH = frozenset(
    {
        Tensor.__hash__,
        Tensor.is_floating_point,
        torch.is_floating_point,
        Tensor.is_complex,
        torch.is_complex,
        Tensor.is_signed,
        Tensor.element_size,
        Tensor.get_device,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.requires_grad_,
        Tensor.retain_grad,
        Tensor.is_inference,
        Tensor.new_empty,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_tensor,
        torch._has_compatible_shallow_copy_type,
        *(
            accessor
            for name in [
                "dtype",
                "device",
                "layout",
                "requires_grad",
                "grad",
                "is_leaf",
                "grad_fn",
                "is_cuda",
                "is_cpu",
                "is_xpu",
                "is_mps",
                "is_meta",
                "is_sparse",
                "is_sparse_csr",
                "is_quantized",
                "is_nested",
                "is_mkldnn",
                "is_vulkan",
                "is_xla",
                "is_ipu",
                "is_mtia",
                "retains_grad",
                "itemsize",
                "output_nr",
                "_backward_hooks",
                "_post_accumulate_grad_hooks",
                "name",
                "_version",
            ]
            if hasattr(Tensor, name)
            for accessor in (getattr(Tensor, name).__get__, getattr(getattr(Tensor, name), "__set__", None))
            if accessor is not None
        ),
    }
)


# Of a tensor that is what is asked for already they give the tensor itself.
_CONVERSIONS: frozenset[Any] = frozenset(
    {
        Tensor.to,
        Tensor.cpu,
        Tensor.cuda,
        Tensor.xpu,
        Tensor.float,
        Tensor.double,
        Tensor.half,
        Tensor.bfloat16,
    }
)

_MAKES_PARAMETER = nn.Parameter.__new__.__code__
_CONVERTS_MODULE = nn.Module._apply.__code__


class ShardedParameter(nn.Parameter):
    """A parameter whose elements are spread over ranks. Never constructed: it is a class parameters take on.

    The names with `ds_` are DeepSpeed's, for code that asks for them.
    """

    @property
    def ds_id(self) -> int:
        """A number of its own, the same on all ranks."""
        return int(home_of(self).number)

    @property
    def ds_shape(self) -> torch.Size:
        shape: torch.Size = home_of(self).shape
        return shape

    @property
    def ds_numel(self) -> int:
        return self.ds_shape.numel()

    @property
    def ds_status(self) -> Status:
        status: Status = home_of(self).status
        return status

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's elements, 1-D, not a copy."""
        piece: Tensor = home_of(self).piece
        return piece

    def partition_numel(self) -> int:
        """Elements of one rank's part, rounded up."""
        return -(-self.ds_numel // int(home_of(self).shards))

    @classmethod
    @_disable_dynamo  # as torch.compiler.disable, but dynamo is not imported before it is called: a second of CPU
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PASSED_THROUGH:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        answer = _FROM_SHAPE.get(func)
        if answer is not None and isinstance(args[0], ShardedParameter):
            return answer(home_of(args[0]).shape, *args[1:], **kwargs)
        if func in _CONVERSIONS and isinstance(args[0], ShardedParameter):
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                converted = func(*args, **kwargs)
            if converted is args[0] or (_converts_module() and home_of(args[0]).convert(converted)):
                return args[0]
        if func == Tensor.data.__set__ and args[1] is args[0]:  # type: ignore[attr-defined]
            return None  # the other half of a module's conversion
        if func is Tensor.__repr__:
            return _describe(args[0])
        if func == Tensor.nbytes.__get__:  # type: ignore[attr-defined]
            return home_of(args[0]).shape.numel() * args[0].element_size()
        if func in _LIKE and args and isinstance(args[0], ShardedParameter):
            return func(_shape_of(args[0]), *args[1:], **kwargs)
        if func is Tensor.detach and not _makes_parameter():
            alias: Tensor | None = home_of(args[0]).alias(args[0])
            if alias is not None:
                return alias
        if func is Tensor.data_ptr:
            address: int | None = home_of(args[0]).address(args[0])
            if address is not None:
                return address
        operation = getattr(func, "__name__", str(func))
        if operation in ("__get__", "__set__"):
            operation = getattr(getattr(func, "__self__", None), "__name__", operation)
        homes = {
            id(home): home
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, ShardedParameter) and (home := home_of(leaf)) is not None
        }.values()
        for home in homes:
            home.need(operation)
        result = func(*args, **kwargs)
        for home in homes:
            home.used(result)
        if func is Tensor.detach and _makes_parameter():
            # `nn.Parameter(parameter)` expects of what it takes for a tensor class to get the same class back.
            result = Tensor._make_subclass(type(args[0]), result)
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        with home_of(self).copying(self):  # inside, the class is the one the user gave
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        home_of(self).need("pickle")
        return self.__reduce_ex__(protocol)


@functools.cache
def sharded_class(kind: type[nn.Parameter]) -> type[ShardedParameter]:
    """`ShardedParameter` for parameters of class `kind` (packed weights have one of their own): what the class says
    and does stays, what reads elements is guarded."""
    if kind is nn.Parameter:
        return ShardedParameter
    return types.new_class(f"Sharded{kind.__name__}", (ShardedParameter, kind))


def _makes_parameter() -> bool:
    """The guard was asked by `nn.Parameter(...)`, through the wrappers that keep it out of compiled code."""
    return _called_by(_MAKES_PARAMETER)


def _converts_module() -> bool:
    """By `module.to(...)` or its like, through that wrapper and what they call for each parameter."""
    return _called_by(_CONVERTS_MODULE)


def _called_by(code: types.CodeType) -> bool:
    frame = sys._getframe(2).f_back
    for _ in range(5):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _shape_of(parameter: Tensor) -> Tensor:
    """A stand-in of the logical shape that takes no memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.new_empty(()).expand(home_of(parameter).shape)


_ROW = 16
INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element: what its bits are looked at as."""


def fingerprint(values: Tensor) -> tuple[int, int]:
    """Two numbers, at least one of which an edit of the 1-D `values` changes: their bits, added up and weighted
    by place in two ways, so that exchanging values shows as well."""
    bits = values.view(INTEGER_OF[values.itemsize])
    whole = bits.numel() // _ROW * _ROW
    rows, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    place = torch.arange(1, len(rows) + 1, device=rows.device)
    columns = torch.arange(1, _ROW + 1, device=rows.device)
    by_row, by_column = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    tail = (rest.to(torch.int64) * columns[: rest.numel()]).sum()
    return int((by_row * place).sum() + tail), int((by_column * columns).sum() - tail)


def _describe(parameter: Tensor) -> str:
    home = home_of(parameter)
    with torch._C.DisableTorchFunctionSubclass():
        dtype, device, trainable = parameter.dtype, parameter.device, parameter.requires_grad
    return (
        f"ShardedParameter({home.name!r}, shape={tuple(home.shape)}, dtype={dtype}, device={str(device)!r}, "
        f"requires_grad={trainable}, sharded over {home.shards} ranks)"
    )
