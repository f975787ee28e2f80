"""Files that are whole or are not there: written once, checksummed by block, verified as they are read."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType

from zeroshard.errors import CheckpointError

__all__ = ["BLOCK", "CheckedReader", "CheckedWriter", "sync_directory", "write_small"]

BLOCK = 2**20
"""Bytes per checksum: what a read must take in at least, to know that it is right."""

AHEAD = 8
"""Parts that are written and wait for their checksum: so long they are kept in memory."""


class CheckedWriter:
    """Writes a new file from start to end. Each block's CRC-32 is taken on another thread, beside the write."""

    def __init__(self, path: Path, block: int = BLOCK) -> None:
        self.path, self.nbytes = path, 0
        self._block = block
        self._sums: list[int] = []
        self._rest = 0
        """CRC of the bytes since the last whole block."""
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed in __exit__
        self._parts: Queue[memoryview | None] = Queue(AHEAD)
        # No executor: those take nothing more once the interpreter ends, and a save may still be going on then.
        self._summer = Thread(target=self._sum, daemon=True)
        self._summer.start()

    def __enter__(self) -> CheckedWriter:
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change until the file is closed."""
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: self._block - self.nbytes % self._block]
            self.nbytes += len(part)
            self._parts.put(part)
            at = 0
            while at < len(part):
                at += self._file.write(part[at:])
            view = view[len(part) :]

    def _sum(self) -> None:
        nbytes = 0
        while (part := self._parts.get()) is not None:
            self._rest = zlib.crc32(part, self._rest)
            nbytes += len(part)
            if nbytes % self._block == 0:
                self._sums.append(self._rest)
                self._rest = 0

    def _end_sums(self) -> None:
        if self._summer.is_alive():
            self._parts.put(None)
            self._summer.join()

    def checksums(self) -> list[int]:
        """CRC-32 of each block, the last of which may be short. Nothing is written after this."""
        self._end_sums()
        return [*self._sums, *([self._rest] if self.nbytes % self._block else [])]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_sums()
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


class CheckedReader:
    """Reads parts of such a file. What it gives was compared with the checksums; CheckpointError if it differs."""

    def __init__(self, path: Path, nbytes: int, checksums: list[int], block: int) -> None:
        self.path = path
        self._nbytes, self._checksums, self._block = nbytes, checksums, block
        self._kept: tuple[int, bytes] = -1, b""
        """The last block of which only a part was asked for, and its index: neighbours want the rest."""
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed in __exit__
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: it should have {nbytes} bytes. Restore it from a copy, or load another "
                f"checkpoint."
            ) from None
        found = os.fstat(self._file.fileno()).st_size
        if found != nbytes:
            self._file.close()
            raise CheckpointError(
                f"{path} has {found} bytes, and was written with {nbytes}: it was cut off or replaced. Restore it "
                f"from a copy, or load another checkpoint."
            )

    def __enter__(self) -> CheckedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `begin` on. Whole blocks go straight into it."""
        end = begin + len(target)
        at = begin
        while at < end:
            index = at // self._block
            low, high = index * self._block, min((index + 1) * self._block, self._nbytes)
            stop = min(high, end)
            part = target[at - begin : stop - begin]
            if at == low and stop == high:
                self._fill(low, part)
                self._check(index, part)
            else:
                part[:] = memoryview(self._block_with(index, low, high))[at - low : stop - low]
            at = stop

    def _block_with(self, index: int, low: int, high: int) -> bytes:
        if self._kept[0] != index:
            data = bytearray(high - low)
            self._fill(low, memoryview(data))
            self._check(index, memoryview(data))
            self._kept = index, bytes(data)
        return self._kept[1]

    def _fill(self, offset: int, target: memoryview) -> None:
        self._file.seek(offset)
        at = 0
        while at < len(target):
            count = self._file.readinto(target[at:])
            if not count:
                raise CheckpointError(f"{self.path} ends at byte {offset + at} of {self._nbytes}")
            at += count

    def _check(self, index: int, data: memoryview) -> None:
        if zlib.crc32(data) != self._checksums[index]:
            low = index * self._block
            raise CheckpointError(
                f"{self.path} is damaged: bytes {low} to {low + len(data)} are not those that were written (their "
                f"checksum differs). Restore the file from a copy, or load another checkpoint."
            )

    def verify(self) -> None:
        """Read everything."""
        for index in range(len(self._checksums)):
            low = index * self._block
            self._block_with(index, low, min(low + self._block, self._nbytes))


def write_small(path: Path, data: bytes) -> None:
    """Replace a small file in one step: it has the old content or the new one, whenever the power goes."""
    fresh = path.with_name(path.name + ".new")
    with open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make what was created and renamed in it last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
