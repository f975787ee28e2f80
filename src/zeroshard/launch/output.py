"""What ranks print: passed on at once, the last of it kept; or written to one file per rank."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from zeroshard.errors import LaunchError

__all__ = ["RankOutput", "python_of_ranks"]

_KEPT_BYTES = 8192
_SECONDS_TO_DRAIN = 2.0  # what a rank started and left behind may hold its output open
_MS_FOR_A_LINE = 100
_LONGEST_LINE = 1 << 20  # bytes; what is longer is cut


class _Sink:
    """Where several ranks' lines go, one whole line after the other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._turn = threading.Lock()

    def write(self, data: bytes) -> None:
        # Whoever reads us may have gone; the ranks go on.
        with self._turn, contextlib.suppress(OSError, ValueError):
            self._file.write(data)
            self._file.flush()


class _Relay:
    """A pipe that one rank opens under `path`, and a thread that passes on what it writes, in whole lines.

    Python that does not buffer writes a line in pieces, and pieces of several ranks would mix. What has no end of
    line (a question, a row of dots) is passed on when nothing has followed it for a moment.
    """

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._kept = b""
        self._read_end, self._write_end = os.pipe()
        self.path = f"/dev/fd/{self._write_end}"
        self._thread = threading.Thread(target=self._pass_on, name="rank output", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        waiting = select.poll()
        waiting.register(self._read_end, select.POLLIN)
        begun = b""  # a line without its end
        while True:
            if begun and not waiting.poll(_MS_FOR_A_LINE):
                self._sink.write(begun)
                begun = b""
            if not (data := os.read(self._read_end, 65536)):
                break
            self._kept = (self._kept + data)[-_KEPT_BYTES:]
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end or len(begun) > _LONGEST_LINE:
                self._sink.write(begun + data[:end])
                begun, data = b"", data[end:]
            begun += data
        self._sink.write(begun)
        os.close(self._read_end)

    def close(self) -> None:
        """Nobody opens `path` any more: the thread ends with the last who has."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def drain(self, until: float) -> None:
        """Wait until all is passed on, but not beyond `until` of the monotonic clock."""
        self._thread.join(max(until - time.monotonic(), 0.0))

    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._kept.decode(errors="replace").rstrip().splitlines())


def python_of_ranks(log_folder: str | None = None) -> tuple[str, ...]:
    """The interpreter, with what makes it print at once."""
    return (sys.executable,) if log_folder is None and _lines_are_whole() else (sys.executable, "-u")


def _lines_are_whole() -> bool:
    """Whether ranks have our stdout itself: at a terminal Python prints line by line."""
    return os.isatty(1)


def _standard(number: int) -> BinaryIO:
    return open(number, "wb", closefd=False)


def _writable_folder(name: str) -> Path:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise LaunchError(f"--enable_each_rank_log {name!r} is a file; give a directory") from None
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {name!r} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"--enable_each_rank_log {name!r} cannot be written to")
    return folder


class RankOutput(DefaultLogsSpecs):
    """torchrun's choice of files for stdout and stderr, asked before each start of the ranks.

    Also the place where each rank's environment is complete: names that DeepSpeed's launcher sets are added.
    """

    def __init__(self, folder: str | None) -> None:
        super().__init__(log_dir=os.devnull)  # no files of torchrun's own
        self._folder = None if folder is None else _writable_folder(folder)
        self._relays: dict[int, tuple[_Relay, ...]] = {}
        self._files: list[BinaryIO] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for these ranks, by local rank."""
        destination = super().reify(envs)
        for tailed in (destination.tee_stdouts, destination.tee_stderrs):  # by threads that no Ctrl-C ends
            tailed.clear()
        self.finish()
        self._relays, self._files = {}, []
        out, error = _Sink(_standard(1)), _Sink(_standard(2))
        for local_rank, variables in envs.items():
            variables["LOCAL_SIZE"] = variables["LOCAL_WORLD_SIZE"]
            variables["CROSS_RANK"] = variables["GROUP_RANK"]
            variables["CROSS_SIZE"] = variables["GROUP_WORLD_SIZE"]
            if self._folder is not None:
                both = _Relay(self._log(self._folder, variables["RANK"]))
                self._relays[local_rank] = (both,)
                destination.stdouts[local_rank] = destination.stderrs[local_rank] = both.path
                continue
            errors = _Relay(error)
            self._relays[local_rank] = (errors,)
            destination.stderrs[local_rank] = errors.path
            if not _lines_are_whole():
                printed = _Relay(out)
                self._relays[local_rank] = (errors, printed)
                destination.stdouts[local_rank] = printed.path
        return destination

    def _log(self, folder: Path, rank: str) -> _Sink:
        file = (folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log").open("ab")
        self._files.append(file)
        return _Sink(file)

    def finish(self) -> None:
        """Pass on what ranks have printed; they have ended."""
        relays = [relay for of_rank in self._relays.values() for relay in of_rank]
        for relay in relays:
            relay.close()
        until = time.monotonic() + _SECONDS_TO_DRAIN
        for relay in relays:
            relay.drain(until)
        for file in self._files:
            file.close()

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """The last that a rank wrote (its stderr; with a folder, all)."""
        relays = self._relays.get(local_rank)
        return relays[0].last_lines() if relays else ()
