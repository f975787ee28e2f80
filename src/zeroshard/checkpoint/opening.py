"""From a path that people type to a reader, whoever wrote what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import Metadata

from zeroshard.checkpoint.directory import Saves
from zeroshard.checkpoint.storage import INDEX, Reader
from zeroshard.errors import CheckpointError

__all__ = ["CheckpointReader", "open_checkpoint"]


class CheckpointReader(Protocol):
    """A DCP StorageReader of names as in `contents`, with what is no tensor beside them."""

    directory: Path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, shapes, dtypes."""

    def extras(self) -> dict[str, Any]:
        """What is no tensor: counters, options, the user's values."""


def open_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> Reader:
    """The checkpoint at `path`: that directory itself, or `tag` in it, by default the one that `latest` names.

    Raises CheckpointError when there is none, with what was looked for.
    """
    directory = Path(path)
    if tag is None and (directory / INDEX).is_file():
        return Reader(directory)
    saves = Saves(directory)
    tag = tag if tag is not None else saves.latest()
    if tag is None:
        there = f"; it has {', '.join(saves.tags())}" if saves.tags() else ""
        raise CheckpointError(
            f"{directory} is no checkpoint (it has no {INDEX}) and no directory of checkpoints (it has no file "
            f"`latest`){there}"
        )
    return Reader(saves.find(tag))
