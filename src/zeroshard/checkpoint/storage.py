"""How a checkpoint lies on disk: safetensors files, one per rank, and one JSON index of them.

    <tag>/index.json              every tensor: dtype, shape, and which box of it is where; checksums of all files
    <tag>/rank_00000.safetensors  what rank 0 wrote
    ...

`Writer` and `Reader` are the storage half of `torch.distributed.checkpoint` (DCP), whose planner decides which rank
writes what and which bytes a load needs. DCP's own storage keeps its index as a pickle; here nothing is one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from zeroshard.checkpoint.directory import INDEX, Saves
from zeroshard.checkpoint.files import BLOCK, CheckedReader, CheckedWriter, write_small
from zeroshard.checkpoint.plain import unpack
from zeroshard.checkpoint.reading import CheckpointReader
from zeroshard.errors import CheckpointError
from zeroshard.precision import dtype_name, dtype_of
from zeroshard.weights import DTYPES

__all__ = ["INDEX", "Index", "Reader", "Writer", "read_index"]

FORMAT = "zeroshard checkpoint"
VERSION = 1

PIECE = 32 * 2**20
"""Bytes that are brought to the host, or read, at a time."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """Bytes `[begin, end)` of a file of the checkpoint."""

    file: str
    begin: int
    end: int


@dataclass(frozen=True)
class FileFacts:
    """A file, and the CRC-32 of each of its blocks."""

    nbytes: int
    block: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """What `index.json` says."""

    facts: Mapping[str, Any]
    """About the run that wrote it: step, world size, versions."""
    files: Mapping[str, FileFacts]
    tensors: Mapping[str, TensorStorageMetadata]
    places: Mapping[MetadataIndex, Stored]
    blobs: Mapping[str, Stored]


class Writer(StorageWriter):
    """Writes one checkpoint, which appears under its tag once everything of it is on disk."""

    def __init__(self, saves: Saves, tag: str, facts: Mapping[str, Any], *, latest: bool) -> None:
        """`latest`: it becomes the one that is opened when no tag is named."""
        self._saves, self._tag, self._facts, self._latest = saves, tag, facts, latest
        self._directory = saves.fresh(tag)
        self.nbytes = 0
        """Written by this rank so far."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Everything is known already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._saves.begin(self._tag)  # one rank does this, before any other writes
        return [
            dataclasses.replace(plan, storage_data=f"rank_{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: Future[list[WriteResult]] = Future()
        name = plan.storage_data
        if not plan.items:
            results.set_result([])
            return results
        # Not getbuffer(): when a write fails the error holds that view, and Python 3.12 may free what it is of.
        blobs = {
            item.index.fqn: planner.resolve_data(item).getvalue()  # type: ignore[union-attr]
            for item in plan.items
            if item.type is WriteItemType.BYTE_IO
        }
        # Wide elements first, so that each begins at a multiple of its size.
        items = sorted(plan.items, key=lambda item: -_itemsize(item))
        sizes = [_nbytes(item, blobs) for item in items]
        header = _header(items, sizes)
        written, at = [], len(header)
        with CheckedWriter(self._directory / name) as file:
            file.write(header)
            for item, size in zip(items, sizes, strict=True):
                if item.type is WriteItemType.BYTE_IO:
                    file.write(blobs[item.index.fqn])
                else:
                    data = planner.resolve_data(item)
                    assert isinstance(data, Tensor)
                    for part in _host_bytes(data):
                        file.write(part)
                written.append(WriteResult(item.index, size, Stored(name, at, at + size)))
                at += size
            facts = FileFacts(file.nbytes, BLOCK, tuple(file.checksums()))
        self.nbytes += facts.nbytes
        results.set_result([*written, WriteResult(MetadataIndex(f"file:{name}"), 0, facts)])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        flat = [result for rank in results for result in rank]
        files = {
            result.index.fqn.removeprefix("file:"): result.storage_data
            for result in flat
            if isinstance(result.storage_data, FileFacts)
        }
        places = {
            result.index: result.storage_data for result in flat if isinstance(result.storage_data, Stored)
        }
        kinds = metadata.state_dict_metadata
        index = Index(
            facts=self._facts,
            files=files,
            tensors={name: kind for name, kind in kinds.items() if isinstance(kind, TensorStorageMetadata)},
            places=places,
            blobs={
                name: places[MetadataIndex(name)]
                for name, kind in kinds.items()
                if isinstance(kind, BytesStorageMetadata)
            },
        )
        write_small(self._directory / INDEX, _render(index))
        self._saves.commit(self._tag, latest=self._latest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def _itemsize(item: WriteItem) -> int:
    return 1 if item.tensor_data is None else item.tensor_data.properties.dtype.itemsize


def _nbytes(item: WriteItem, blobs: Mapping[str, bytes]) -> int:
    if item.tensor_data is None:
        return len(blobs[item.index.fqn])
    return math.prod(item.tensor_data.chunk.sizes) * _itemsize(item)


def _header(items: Sequence[WriteItem], sizes: Sequence[int]) -> bytes:
    """The safetensors header: any reader of that format opens the file. A box is named `name@offsets`."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item, size in zip(items, sizes, strict=True):
        if item.tensor_data is None:
            entry = {"dtype": "U8", "shape": [size]}
        else:
            dtype = item.tensor_data.properties.dtype
            if dtype not in _NAMES:
                raise CheckpointError(
                    f"{item.index.fqn!r} is {dtype_name(dtype)}, which safetensors files do not have: convert it, "
                    f"or register it with persistent=False"
                )
            entry = {"dtype": _NAMES[dtype], "shape": list(item.tensor_data.chunk.sizes)}
        offset = ",".join(map(str, item.index.offset or ()))
        entries[f"{item.index.fqn}@{offset}"] = {**entry, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _host_bytes(tensor: Tensor) -> list[memoryview]:
    """The elements as bytes in host memory: a view where they are there already, else brought piece by piece."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    step = max(PIECE // flat.element_size(), 1) if flat.device.type != "cpu" else max(flat.numel(), 1)
    return [_memory(flat[at : at + step].cpu().contiguous()) for at in range(0, flat.numel(), step)]


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, shared; they live as long as the view. (numpy, which could
    give it, is no dependency of torch.)"""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _render(index: Index) -> bytes:
    chunks = {
        name: [
            [list(chunk.offsets), list(chunk.sizes), place.file, place.begin, place.end]
            for chunk in tensor.chunks
            for place in [index.places[MetadataIndex(name, chunk.offsets)]]
        ]
        for name, tensor in index.tensors.items()
    }
    body = {
        "format": FORMAT,
        "version": VERSION,
        "run": dict(index.facts),
        "files": {
            name: {"bytes": file.nbytes, "block": file.block, "crc32": list(file.checksums)}
            for name, file in index.files.items()
        },
        "tensors": {
            name: {
                "dtype": dtype_name(tensor.properties.dtype),
                "shape": list(tensor.size),
                "chunks": chunks[name],
            }
            for name, tensor in index.tensors.items()
        },
        "blobs": {name: [place.file, place.begin, place.end] for name, place in index.blobs.items()},
    }
    text = json.dumps(body, separators=(",", ":"))
    return json.dumps(
        {"crc32": zlib.crc32(text.encode()), "checkpoint": body}, separators=(",", ":")
    ).encode()


def read_index(directory: Path) -> Index:
    """Parse `index.json`. Raises CheckpointError when it is missing, damaged or of another format."""
    path = directory / INDEX
    try:
        document = json.loads(path.read_bytes())
        body = document["checkpoint"]
        damaged = zlib.crc32(json.dumps(body, separators=(",", ":")).encode()) != document["crc32"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is no checkpoint: it has no {INDEX}. Pass the directory that save_checkpoint was given, "
            f"or one of the tags in it."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Load another checkpoint.") from error
    if damaged:
        raise CheckpointError(f"{path} is damaged: its checksum differs. Load another checkpoint.")
    if body["format"] != FORMAT or body["version"] > VERSION:
        raise CheckpointError(
            f"{path} is of format {body['format']!r} {body['version']}, and this release reads {FORMAT!r} up to "
            f"{VERSION}: install a newer zeroshard."
        )
    places: dict[MetadataIndex, Stored] = {}
    tensors: dict[str, TensorStorageMetadata] = {}
    for name, entry in body["tensors"].items():
        chunks = [ChunkStorageMetadata(torch.Size(c[0]), torch.Size(c[1])) for c in entry["chunks"]]
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype=dtype_of(entry["dtype"])), torch.Size(entry["shape"]), chunks
        )
        for chunk, stored in zip(chunks, entry["chunks"], strict=True):
            places[MetadataIndex(name, chunk.offsets)] = Stored(*stored[2:])
    return Index(
        facts=body["run"],
        files={
            name: FileFacts(file["bytes"], file["block"], tuple(file["crc32"]))
            for name, file in body["files"].items()
        },
        tensors=tensors,
        places=places,
        blobs={name: Stored(*place) for name, place in body["blobs"].items()},
    )


class Reader(CheckpointReader):
    """Reads the boxes a load plan asks for, and verifies each block of bytes that it takes in."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """`directory`: that of one checkpoint; `opening.open_checkpoint` also takes the one that `latest` is in."""
        self._directory = Path(directory)
        self.index = read_index(self._directory)

    @property
    def directory(self) -> Path:
        return self._directory

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(dict(self.index.tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[int, ReadItem]]] = {}
        for item in plan.items:
            place = self.index.places[item.storage_index]
            by_file.setdefault(place.file, []).append((place.begin, item))
        for name, items in by_file.items():
            with self._open(name) as file:
                # In the order of the file; tensors of one size and place are told apart by their offsets.
                for begin, item in sorted(items, key=lambda pair: (pair[0], tuple(pair[1].storage_offsets))):
                    self._read(file, begin, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _open(self, name: str) -> CheckedReader:
        facts = self.index.files[name]
        return CheckedReader(self.directory / name, facts.nbytes, list(facts.checksums), facts.block)

    def _read(self, file: CheckedReader, begin: int, item: ReadItem, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        tensor = self.index.tensors[name]
        chunk = next(c for c in tensor.chunks if c.offsets == item.storage_index.offset)
        target = planner.resolve_tensor(item).detach()
        try:
            _fill(file, begin, chunk.sizes, item.storage_offsets, target, tensor.properties.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name!r} cannot be read: {error}") from None
        planner.commit_tensor(item, target)

    def blob(self, name: str) -> bytes:
        """What is no tensor, as bytes."""
        place = self.index.blobs[name]
        data = bytearray(place.end - place.begin)
        with self._open(place.file) as file:
            file.read_into(place.begin, memoryview(data))
        return bytes(data)

    def extras(self) -> dict[str, Any]:
        """Everything that is no tensor: plain values, read without running code."""
        loaded: dict[str, Any] = unpack(self.blob("extras"))
        return loaded

    def random_state(self, rank: int) -> dict[str, Any] | None:
        """That of a rank's generators; None when the run had no such rank."""
        name = f"rng/{rank}"
        if name not in self.index.blobs:
            return None
        loaded: dict[str, Any] = unpack(self.blob(name))
        return loaded

    def verify(self) -> int:
        """Read every file and compare the checksums; the bytes read. CheckpointError at the first difference."""
        for name in self.index.files:
            with self._open(name) as file:
                file.verify()
        return sum(file.nbytes for file in self.index.files.values())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / INDEX).is_file()


def _fill(
    file: CheckedReader,
    begin: int,
    sizes: Sequence[int],
    offsets: Sequence[int],
    target: Tensor,
    dtype: torch.dtype,
) -> None:
    """Copy the box at `offsets` of a stored box of `sizes` into `target`, which has the shape of what is wanted.

    `begin` is where the stored box begins in the file. Of its bytes those between the first and the last wanted
    element are read, at most about `PIECE` at a time where that can be cut along the first dim.
    """
    if not target.numel():
        return
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    first = sum(o * s for o, s in zip(offsets, strides, strict=True))
    span = 1 + sum((length - 1) * s for length, s in zip(target.shape, strides, strict=True))
    is_run = span == target.numel() and not target.is_conj() and not target.is_neg()
    if is_run and target.is_contiguous() and target.device.type == "cpu" and target.dtype is dtype:
        file.read_into(begin + first * dtype.itemsize, _memory(target))
        return
    rows = target.shape[0] if target.dim() else 1
    if rows > 1 and span * dtype.itemsize > PIECE:
        half = rows // 2
        below = [offsets[0] + half, *offsets[1:]]
        _fill(file, begin, sizes, offsets, target[:half], dtype)
        _fill(file, begin, sizes, below, target[half:], dtype)
        return
    data = torch.empty(span, dtype=dtype)
    file.read_into(begin + first * dtype.itemsize, _memory(data))
    with torch.no_grad():
        target.copy_(data.as_strided(target.shape, strides))
