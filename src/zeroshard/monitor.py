"""Training metrics for TensorBoard, CSV files and Weights & Biases, written by rank 0.

A backend is asked for three things, `write`, `flush` and `close`; the rest is in `Monitor`. What goes wrong while
a run is set up (a package that is missing, a directory that cannot be made) is an error. What goes wrong later
(the disk is full, the directory is gone) costs the metrics and never the training: one warning, and that backend
is off.
"""

from __future__ import annotations

import atexit
import csv
import importlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroshard.config import Config
from zeroshard.errors import ConfigError
from zeroshard.wording import in_one_line

__all__ = ["Backend", "CsvFiles", "Monitor", "TensorBoard", "WeightsAndBiases"]

log = logging.getLogger("zeroshard")

FLUSH_SECONDS = 10
"""What a killed process can lose of what it wrote to TensorBoard; the package's default is 120."""


class Backend:
    """Where events go. A method that raises is not called again, nor is any other one of that backend."""

    target: str
    """What is written to, as a message names it."""

    def write(self, name: str, value: float, step: int) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """What was written can be read by others."""

    def close(self) -> None:
        """Nothing is written afterwards."""


class TensorBoard(Backend):
    """Scalars in an event file below `directory`, by `torch.utils.tensorboard`."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as reason:
            raise ConfigError(
                f"tensorboard.enabled = true needs the package tensorboard ({reason}): "
                f"pip install 'zeroshard[monitor]', or set it to false"
            ) from reason
        self.target = str(directory)
        self._writer: Any = SummaryWriter(str(directory), flush_secs=FLUSH_SECONDS)

    def write(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class CsvFiles(Backend):
    """`Train/Samples/lr` is appended to `directory/Train_Samples_lr.csv`, below the header `step,lr`.

    A file is opened for each row and closed again: a row that was written can be read, and a directory that is
    gone is noticed.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.target = str(directory)
        self._directory = directory

    def write(self, name: str, value: float, step: int) -> None:
        path = self._directory / (name.replace("/", "_").replace(" ", "_") + ".csv")
        with path.open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([step, value])


class WeightsAndBiases(Backend):
    """A run of the package wandb, which knows by itself whether a script that ended has failed."""

    def __init__(self, group: str | None, team: str | None, project: str) -> None:
        try:
            # A run leaves a folder ./wandb, which Python imports, empty, where the package is missing.
            start = importlib.import_module("wandb").init
        except (ImportError, AttributeError) as reason:
            raise ConfigError(
                f"wandb.enabled = true needs the package wandb ({reason}): pip install wandb, or set it to false"
            ) from reason
        self.target = f"wandb project {project!r}"
        self._run = start(group=group, entity=team, project=project)

    def write(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


class Monitor:
    """Writes events, each `(name, value, step)`, to all backends that are on."""

    def __init__(self, backends: Iterable[Backend] = ()) -> None:
        self._backends = list(backends)
        if self._backends:
            # A script that ends by an error does not get to close(); its last events are the ones to see.
            atexit.register(self.flush)

    @classmethod
    def of(cls, config: Config, rank: int) -> Monitor:
        """What the sections `tensorboard`, `csv_monitor` and `wandb` ask for; on other ranks than 0 nothing.

        Files are in `output_path/job_name`. An `output_path` that is empty means the current directory, as in
        DeepSpeed: `./DeepSpeedJobName` if nothing is set. Raises ConfigError if a package is missing or a
        directory cannot be made.
        """
        if rank != 0:
            return cls()
        backends: list[Backend] = []
        if config.tensorboard.enabled:
            backends.append(_in_directory(TensorBoard, "tensorboard", config))
        if config.csv_monitor.enabled:
            backends.append(_in_directory(CsvFiles, "csv_monitor", config))
        if config.wandb.enabled:
            backends.append(WeightsAndBiases(config.wandb.group, config.wandb.team, config.wandb.project))
        return cls(backends)

    @property
    def enabled(self) -> bool:
        """Whether an event would be written: on rank 0, with a backend that is on and has not failed."""
        return bool(self._backends)

    def write_events(self, events: Iterable[tuple[str, float | Tensor, int]]) -> None:
        """Write `(name, value, step)` events. A value is a number or a tensor of one element.

        A tensor on a device is waited for, if a backend is on.
        """
        if not self._backends:
            return
        numbers = [(name, float(value), int(step)) for name, value, step in events]

        def write(backend: Backend) -> None:
            for event in numbers:
                backend.write(*event)

        self._each(write)

    def flush(self) -> None:
        """All events so far can be read by others when this returns."""
        self._each(lambda backend: backend.flush())

    def close(self) -> None:
        """Flush and end all backends. Nothing is written afterwards; a second call does nothing."""
        self._each(lambda backend: backend.close())
        self._backends.clear()
        atexit.unregister(self.flush)

    def _each(self, do: Callable[[Backend], None]) -> None:
        for backend in list(self._backends):
            try:
                do(backend)
            except Exception as reason:
                # Whatever it is: other packages have errors of their own, and none is worth a run.
                self._backends.remove(backend)
                log.warning(
                    "no more events are written to %s: %s. The training goes on without them.",
                    backend.target,
                    in_one_line(reason),
                )


def _in_directory(backend: Callable[[Path], Backend], section: str, config: Config) -> Backend:
    chosen = getattr(config, section)
    directory = Path(chosen.output_path, chosen.job_name)
    try:
        return backend(directory)
    except OSError as reason:
        raise ConfigError(
            f"{config.source}: {section}.output_path and job_name: cannot write in {str(directory)!r} ({reason}). "
            f"Name a directory that can be made, or set {section}.enabled to false"
        ) from reason
