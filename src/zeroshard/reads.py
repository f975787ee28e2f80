"""Reads of weights that no hook on a module's outputs can announce to backward.

A weight whose use leaves its module another way (an attribute, a forward hook of the user, a `detach`) is read
by a backward that no B point tells of. On a path that is new, a torch function mode sees every operation that
reads a weight, and a hook on what it made reports when backward comes to it. Known paths do not pay for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["UnannouncedReads"]


class UnannouncedReads:
    """Watches the forwards of new paths, one frame per unit's forward."""

    def __init__(self, bucket_at: Mapping[int, int], read: Callable[[int], None]) -> None:
        """`bucket_at`: the bucket whose weights a storage holds, by the storage's address. `read` is called with
        a bucket when backward is about to read it."""
        self._bucket_at, self._read = bucket_at, read
        self._frames: list[WeightReads | None] = []
        self._made = WeakIdKeyDictionary()
        """By tensor: the buckets read to make it, and the hook that tells when backward comes to it."""

    def enter(self, wanted: bool) -> None:
        """A unit's forward starts; it is watched if that is `wanted` and no outer one is."""
        reader = None
        if wanted and self._bucket_at and not any(self._frames):
            reader = WeightReads(self._watch)
            reader.__enter__()  # type: ignore[no-untyped-call]
        self._frames.append(reader)

    def leave(self) -> None:
        """It ended."""
        reader = self._frames.pop() if self._frames else None
        if reader is not None:
            reader.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """Forwards that are still open were left without an end."""
        for reader in filter(None, self._frames):
            reader.stop()
        self._frames = []

    def forget(self, tensors: Sequence[Tensor], buckets: Collection[int]) -> None:
        """Outputs that announce B for `buckets` themselves. The hook that was put on them here came first and
        would run first: every last layer of a unit would seem to be read unannounced."""
        for tensor in tensors:
            if tensor not in self._made:
                continue
            read, handle = self._made[tensor]
            if set(read) <= set(buckets):
                handle.remove()
                del self._made[tensor]

    def _watch(self, storages: set[int], made: Sequence[Tensor]) -> None:
        # In an order that all ranks share: an operation may read several, and storages are addresses.
        buckets = sorted(self._bucket_at[storage] for storage in storages & self._bucket_at.keys())
        if not buckets:
            return

        def before_backward(_: Tensor) -> None:
            for bucket in buckets:
                self._read(bucket)

        for tensor in made:
            handle = tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
            self._made[tensor] = buckets, handle


class WeightReads(TorchFunctionMode):
    """While active: reports the storages that each operation reads, and its result."""

    def __init__(self, report: Callable[[set[int], Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._report: Callable[[set[int], Sequence[Tensor]], None] | None = report

    def stop(self) -> None:
        """Report no more: the forward was left in a way that could not take this off torch's stack."""
        self._report = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._report is None:
            return result
        made = [x for x in tree_leaves(result) if type(x) is Tensor and x.requires_grad and not x.is_leaf]
        if made and not torch.compiler.is_compiling():
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self._report({x.untyped_storage()._cdata for x in read if _has_storage(x)}, made)
        return result


def _has_storage(tensor: Tensor) -> bool:
    """A plain dense tensor, not a wrapper of torch.func or a sharded stand-in."""
    return (
        tensor.layout is torch.strided
        and type(tensor) in (Tensor, nn.Parameter)
        and not (torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    )
