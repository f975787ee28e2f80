"""Memory that several processes map: blocks, and the pool that reuses them.

A block is a `memfd`: memory with a file descriptor but no name in any file system, so that a crash, even of
all ranks, leaves nothing behind. Its pages are reserved when it is made: a host without room raises
`OSError` there, instead of a SIGBUS in the middle of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Block", "BlockPool", "bytes_of", "elements", "map_block"]

_SMALLEST = 64 << 10  # bytes of the smallest block
_KEPT_FREE = 256 << 20  # bytes of free blocks that are kept although a new size is asked for


def _round_up(nbytes: int) -> int:
    """The block size for `nbytes`: four sizes per power of two, so at most a quarter is unused."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max((nbytes - 1).bit_length() - 3, 12)
    return -(-nbytes // step) * step


def map_block(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a block, its page tables filled at once: the hot path then takes no page faults."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def elements(memory: Tensor, offset: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements from number `start` of what lies at byte `offset` of a block's `memory`."""
    first = offset + start * dtype.itemsize
    return memory[first : first + count * dtype.itemsize].view(dtype)


def bytes_of(tensor: Tensor) -> bytearray:
    """A copy of a contiguous CPU tensor's bytes, whatever its dtype."""
    return bytearray(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.itemsize))


class Block:
    """Reserved shared memory of this process. `memory` is its bytes as a 1-D uint8 tensor.

    The mapping is never closed by hand: it goes with the last tensor that lies in it.
    """

    __slots__ = ("address", "descriptor", "identity", "map", "memory", "nbytes", "published")

    def __init__(self, identity: int, nbytes: int) -> None:
        self.identity = identity
        self.nbytes = nbytes
        self.published = False  # whether the peers were sent the descriptor
        self.descriptor = os.memfd_create(f"zeroshard-{identity}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, nbytes)
            self.map = map_block(self.descriptor, nbytes)
        except BaseException:
            self.close()
            raise
        self.memory = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.memory.data_ptr()

    def close(self) -> None:
        """Close the descriptor. The memory stays while tensors or peers have it mapped."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()


class BlockPool:
    """Blocks by size, reused: a training loop maps new memory in its first steps only.

    When a new block is mapped, free ones beyond 256 MiB (or beyond what is in use, if that is more) are
    dropped, oldest first; `on_drop` hears of each. Not thread-safe; `returned` alone may be appended to by
    any thread, because a tensor can die anywhere.
    """

    def __init__(self, on_drop: Callable[[Block], None]) -> None:
        self._on_drop = on_drop
        self._free: OrderedDict[int, Block] = OrderedDict()  # by identity, oldest first
        self._used: dict[int, Block] = {}  # by address
        self._free_bytes = 0
        self._used_bytes = 0
        self._made = 0
        self._returned: deque[Block] = deque()
        self._closed = False

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, until `give`. Raises `OSError` when the host has no room."""
        while self._returned:
            self.give(self._returned.popleft())
        size = _round_up(nbytes)
        # The youngest first: its lines are the likeliest to be in a cache still.
        block = next((b for b in reversed(self._free.values()) if b.nbytes == size), None)
        if block is None:
            self._drop_free(max(_KEPT_FREE, self._used_bytes))
            self._made += 1
            block = Block(self._made, size)
        else:
            del self._free[block.identity]
            self._free_bytes -= size
        self._used[block.address] = block
        self._used_bytes += size
        return block

    def give(self, block: Block) -> None:
        """Take a block back. Nobody may read or write it any more."""
        del self._used[block.address]
        self._used_bytes -= block.nbytes
        self._free[block.identity] = block
        self._free_bytes += block.nbytes

    def lend(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor at the start of a block, which comes back when the tensor's storage dies."""
        block = self.take(numel * dtype.itemsize)
        # torch keeps the object it was given a buffer of for as long as the storage lives, whatever views
        # and autograd graphs hold it: the end of this memoryview is the end of the storage.
        view = memoryview(block.map)
        weakref.finalize(view, self._came_back, block).atexit = False
        return torch.frombuffer(view, dtype=dtype, count=numel)

    def _came_back(self, block: Block) -> None:
        if not self._closed:
            self._returned.append(block)

    def find(self, tensor: Tensor) -> tuple[Block, int] | None:
        """The block in use that `tensor` lies in and its byte offset there, or None for other memory."""
        base = tensor.untyped_storage().data_ptr()
        block = self._used.get(base)
        return None if block is None else (block, tensor.data_ptr() - base)

    def close(self) -> None:
        for block in (*self._free.values(), *self._used.values()):
            block.close()
        self._closed = True
        self._free.clear()
        self._used.clear()  # a tensor that still lies in one keeps its memory
        self._returned.clear()
        self._free_bytes = self._used_bytes = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all blocks, free and in use."""
        return self._free_bytes + self._used_bytes

    def _drop_free(self, limit: int) -> None:
        while self._free_bytes > limit:
            _, block = self._free.popitem(last=False)
            self._free_bytes -= block.nbytes
            self._on_drop(block)  # its descriptor is closed with its last reference: it may be on its way
