"""From a path that people type to a reader, whoever wrote what is there."""

from __future__ import annotations

import os
from pathlib import Path

from zeroshard.checkpoint.deepspeed import DeepSpeedReader, is_deepspeed
from zeroshard.checkpoint.directory import Saves
from zeroshard.checkpoint.reading import CheckpointReader
from zeroshard.checkpoint.storage import INDEX, Reader
from zeroshard.errors import CheckpointError

__all__ = ["open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> CheckpointReader:
    """The checkpoint at `path`: that directory itself, or `tag` in it, by default the one that `latest` names.

    DeepSpeed's are opened too. Raises CheckpointError when there is none, with what was looked for.
    """
    directory = Path(path)
    if tag is None and (directory / INDEX).is_file():
        return Reader(directory)
    if is_deepspeed(directory, tag):
        return DeepSpeedReader(directory, tag)
    saves = Saves(directory)
    tag = tag if tag is not None else saves.latest()
    if tag is None:
        there = f"; it has {', '.join(saves.tags())}" if saves.tags() else ""
        raise CheckpointError(
            f"{directory} is no checkpoint (it has no {INDEX}) and no directory of checkpoints (it has no file "
            f"`latest`){there}"
        )
    return Reader(saves.find(tag))
