"""`DeepSpeedReader`: a DeepSpeed checkpoint under the names of ours, for `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from zeroshard.checkpoint.deepspeed.contents import Contents, read_contents
from zeroshard.checkpoint.deepspeed.files import tag_directory
from zeroshard.checkpoint.deepspeed.values import Part, Value
from zeroshard.checkpoint.deepspeed.whole import Order
from zeroshard.checkpoint.reading import CheckpointReader
from zeroshard.checkpoint.views import boxes
from zeroshard.errors import CheckpointError

__all__ = ["DeepSpeedReader", "is_deepspeed"]


def is_deepspeed(directory: str | os.PathLike[str], tag: str | None = None) -> bool:
    """Whether DeepSpeed wrote the checkpoint in `directory`, which has tags or is one of them."""
    try:
        return any(tag_directory(Path(directory), tag).glob("*_model_states.pt"))
    except CheckpointError:
        return False


@dataclass
class _Box:
    """A box of a tensor, which is a run of elements in one part."""

    part: Part
    begin: int
    sizes: torch.Size

    def read(self) -> Tensor:
        return self.part.read()[self.begin : self.begin + self.sizes.numel()].view(self.sizes)


class DeepSpeedReader(CheckpointReader):
    """Reads checkpoints of ZeRO stages 0 to 3, of BF16_Optimizer, and universal ones.

    model/<name>            parameters, of trained ones the fp32 masters; buffers
    optimizer/<key>/<name>  each state of a trained parameter, in its shape; `step` is 0-d

    Tied parameters are there under each of their names. Nothing is copied but what a load asks for, from mapped
    files straight into its place; a pickle can bring tensors, plain values and DeepSpeed's own records, and nothing
    else. Any number of ranks can read, each on its own.

    Where the optimizer's files are not there at all, the weights are those of the model's states, often 16-bit.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        with_optimizer: bool = True,
        optimizer_order: Order | None = None,
    ) -> None:
        """`directory`: what DeepSpeed's save_checkpoint was given (its `latest` is opened), or that of one tag.

        `with_optimizer`: False gives the model only. `optimizer_order`: for stage 0, which saves the optimizer
        without names, those of each group's parameters, where they cannot be told.
        """
        self._arguments = Path(directory), tag
        self._with_optimizer, self._order = with_optimizer, optimizer_order
        self._opened: Contents | None = None
        self._boxes: dict[MetadataIndex, _Box] = {}

    @property
    def directory(self) -> Path:
        """That of the tag. Raises CheckpointError when there is none."""
        return tag_directory(*self._arguments)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint, if one is named."""
        if checkpoint_id is not None:
            self._arguments = Path(checkpoint_id), None
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens all files and compares them with each other. Raises CheckpointError before anything is copied."""
        described: dict[str, Any] = {}
        self._boxes = {}
        for key, value in self._contents().values.items():
            chunks = []
            for box, chunk in _cut(value):
                self._boxes[MetadataIndex(key, chunk.offsets)] = box
                chunks.append(chunk)
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), torch.Size(value.shape), chunks
            )
        return Metadata(described)

    def extras(self) -> dict[str, Any]:
        """What is no tensor of a parameter.

        global_steps, skipped_steps, global_samples, world_size, zero_stage; config, version: those of DeepSpeed;
        loss_scale: {scale, hysteresis, step, last_overflow}, or {} where the run was not fp16;
        lr_scheduler: its state dict, or None; client_state: the user's keys;
        param_groups: the options of each group, `params` its names; [] without optimizer;
        aliases: other names of tied parameters, and those under which they are stored; buffers: names.
        """
        return dict(self._contents().extras)

    def _contents(self) -> Contents:
        if self._opened is None:
            self._opened = read_contents(
                self.directory, with_optimizer=self._with_optimizer, order=self._order
            )
        return self._opened

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with torch.no_grad():
            for item in plan.items:
                stored = self._boxes[item.storage_index].read()
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    stored = stored.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_deepspeed(checkpoint_id)


def _cut(value: Value) -> list[tuple[_Box, ChunkStorageMetadata]]:
    """The boxes of a tensor. One without elements has one box, so that it is known."""
    found = []
    for part in value.parts:
        begin = 0
        for offsets, sizes in boxes(value.shape, part.start, part.start + part.count):
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            found.append((_Box(part, begin, chunk.sizes), chunk))
            begin += chunk.sizes.numel()
    if not found:
        shape = torch.Size(value.shape)
        empty = Part(0, 0, lambda: torch.empty(0, dtype=value.dtype))
        found.append((_Box(empty, 0, shape), ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)))
    return found
