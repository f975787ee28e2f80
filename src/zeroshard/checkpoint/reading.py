"""What every reader of a checkpoint is, whoever wrote what it reads."""

from __future__ import annotations

import abc
import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader

__all__ = ["CheckpointReader"]


class CheckpointReader(StorageReader):
    """A StorageReader of names as in `contents`, with what is no tensor beside them.

    Each rank plans and reads its own part: there is nothing for a coordinator to do.
    """

    @property
    @abc.abstractmethod
    def directory(self) -> Path:
        """Where the checkpoint is."""

    @abc.abstractmethod
    def extras(self) -> dict[str, Any]:
        """What is no tensor: counters, options, the user's values."""

    def random_state(self, rank: int) -> dict[str, Any] | None:
        """That of a rank's generators; None when it was not saved, or the run had no such rank."""
        return None

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Everything that is a tensor, by name."""
        entries = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader is of one checkpoint."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Files are opened as they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans
