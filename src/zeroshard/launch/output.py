"""What ranks print: passed on at once, the last of it kept; or written to one file per rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from zeroshard.errors import LaunchError
from zeroshard.launch.relay import Relay, write_out

__all__ = ["FILES_OF_A_RANK", "RankOutput", "python_of_ranks"]

FILES_OF_A_RANK = 10
"""That its launcher has open: for each of its two streams two pipes, and what torch opens of them."""

_KEPT_BYTES = 8192
_SECONDS_FOR_A_LINE = 0.5  # more than a busy machine keeps a rank from going on with it


class _Sink:
    """Where several ranks' lines go, one whole line after the other."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._turn:
            write_out(self._descriptor, data)


class _Stream:
    """A pipe that one rank opens under `path`; what it writes there goes to a sink, and the last of it is kept.

    Python that does not buffer writes a line in pieces, and pieces of several ranks would mix. What has no end of
    line (a question, a row of dots) is passed on after a moment all the same.
    """

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._kept = b""
        source, self._write_end = os.pipe()
        self.path = f"/dev/fd/{self._write_end}"
        self._relay = Relay(source, self._pass_on, _SECONDS_FOR_A_LINE)

    def _pass_on(self, data: bytes) -> None:
        self._kept = (self._kept + data[-_KEPT_BYTES:])[-_KEPT_BYTES:]
        self._sink.write(data)

    def close(self) -> None:
        """The rank has ended. torch, and what the rank has left behind, may hold the pipe open."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        self._relay.close()

    def wait(self, until: float | None) -> bool:
        return self._relay.wait(until)

    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._kept.decode(errors="replace").rstrip().splitlines())


def python_of_ranks(log_folder: str | None = None) -> tuple[str, ...]:
    """The interpreter, with what makes it print at once."""
    return (sys.executable,) if log_folder is None and _lines_are_whole() else (sys.executable, "-u")


def _lines_are_whole() -> bool:
    """Whether ranks have our stdout itself: at a terminal Python prints line by line."""
    return os.isatty(1)


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
    And it is known here that no rank runs: `before_start` is called.
    """

    def __init__(self, folder: str | None) -> None:
        super().__init__(log_dir=os.devnull)  # no files of torchrun's own
        self._folder = None if folder is None else _writable_folder(folder)
        self._streams: dict[int, tuple[_Stream, ...]] = {}
        self._files: list[int] = []
        self.before_start: Callable[[], None] = lambda: None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for these ranks, by local rank."""
        destination = super().reify(envs)
        for tailed in (destination.tee_stdouts, destination.tee_stderrs):  # by threads that no Ctrl-C ends
            tailed.clear()
        self.before_start()
        self.finish()
        self._streams, self._files = {}, []
        out, error = _Sink(1), _Sink(2)
        for local_rank, variables in envs.items():
            variables["LOCAL_SIZE"] = variables["LOCAL_WORLD_SIZE"]
            variables["CROSS_RANK"] = variables["GROUP_RANK"]
            variables["CROSS_SIZE"] = variables["GROUP_WORLD_SIZE"]
            if self._folder is not None:
                both = _Stream(self._log(self._folder, variables["RANK"]))
                self._streams[local_rank] = (both,)
                destination.stdouts[local_rank] = destination.stderrs[local_rank] = both.path
                continue
            errors = _Stream(error)
            self._streams[local_rank] = (errors,)
            destination.stderrs[local_rank] = errors.path
            if not _lines_are_whole():
                printed = _Stream(out)
                self._streams[local_rank] = (errors, printed)
                destination.stdouts[local_rank] = printed.path
        return destination

    def _log(self, folder: Path, rank: str) -> _Sink:
        name = folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log"
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._files.append(file)
        return _Sink(file)

    def finish(self, until: float | None = None) -> None:
        """Pass on what ranks have printed, which have ended; but not beyond `until` of the monotonic clock.

        Who reads our output may be slow, and has all the time: what a rank said last is what matters.
        """
        streams = [stream for of_rank in self._streams.values() for stream in of_rank]
        for stream in streams:
            stream.close()
        if all(stream.wait(until) for stream in streams):
            for file in self._files:
                os.close(file)
            self._files = []

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """The last that a rank wrote (its stderr; with a folder, all)."""
        streams = self._streams.get(local_rank)
        return streams[0].last_lines() if streams else ()
