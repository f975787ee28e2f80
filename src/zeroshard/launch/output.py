"""What ranks print: passed on at once, the last of it kept; or written to one file per rank."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

from zeroshard.errors import LaunchError

__all__ = ["RankOutput"]

_KEPT_BYTES = 8192
_SECONDS_TO_DRAIN = 2.0  # what a rank started and left behind may hold its stderr open


class _Relay:
    """A pipe that ranks open under `path`, and a thread that passes on what they write."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._kept = b""
        self._read_end, self._write_end = os.pipe()
        self.path = f"/dev/fd/{self._write_end}"
        self._thread = threading.Thread(target=self._pass_on, name="rank output", daemon=True)
        self._thread.start()

    def _pass_on(self) -> None:
        while data := os.read(self._read_end, 65536):
            self._kept = (self._kept + data)[-_KEPT_BYTES:]
            try:
                self._sink.write(data)
                self._sink.flush()
            except (OSError, ValueError):  # whoever read us has gone, the ranks go on
                continue
        os.close(self._read_end)

    def finish(self) -> None:
        """Until all is passed on; the ranks have ended."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
            self._thread.join(_SECONDS_TO_DRAIN)

    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._kept.decode(errors="replace").rstrip().splitlines())


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
        self._relays: dict[int, _Relay] = {}
        self._files: list[BinaryIO] = []

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Files for these ranks, by local rank."""
        destination = super().reify(envs)
        for tailed in (destination.tee_stdouts, destination.tee_stderrs):  # by threads that no Ctrl-C ends
            tailed.clear()
        self.finish()
        self._relays, self._files = {}, []
        for local_rank, variables in envs.items():
            variables["LOCAL_SIZE"] = variables["LOCAL_WORLD_SIZE"]
            variables["CROSS_RANK"] = variables["GROUP_RANK"]
            variables["CROSS_SIZE"] = variables["GROUP_WORLD_SIZE"]
            relay = self._relays[local_rank] = _Relay(self._sink(variables["RANK"]))
            destination.stderrs[local_rank] = relay.path
            if self._folder is not None:
                destination.stdouts[local_rank] = relay.path
        return destination

    def _sink(self, rank: str) -> BinaryIO:
        if self._folder is None:
            return open(2, "wb", closefd=False)
        file = (self._folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log").open("ab")
        self._files.append(file)
        return file

    def finish(self) -> None:
        """Pass on what ranks have printed; they have ended."""
        for relay in self._relays.values():
            relay.finish()
        for file in self._files:
            file.close()

    def last_lines(self, local_rank: int) -> tuple[str, ...]:
        """The last that a rank wrote (its stderr; with a folder, all)."""
        relay = self._relays.get(local_rank)
        return relay.last_lines() if relay is not None else ()
