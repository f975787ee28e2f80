"""Weights for other programs: full tensors under the model's names, a file at a time, without ranks or a GPU."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from zeroshard.checkpoint.files import sync_directory, write_small
from zeroshard.checkpoint.reading import CheckpointReader
from zeroshard.checkpoint.views import PieceLoadPlanner
from zeroshard.errors import CheckpointError

__all__ = ["FORMATS", "Export", "export", "parse_size", "read_weights", "write_weights"]

FORMATS = {"safetensors": ("model", ".safetensors"), "pt": ("pytorch_model", ".bin")}
"""Of each format: what Hugging Face calls its files."""

_SIZES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Export:
    """What was written."""

    files: tuple[Path, ...]
    tensors: int
    nbytes: int


def parse_size(text: str) -> int:
    """`"5GB"` -> 5_000_000_000. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _SIZES or not float(match[1]):
        raise ValueError(f"{text!r} is no size: write a number and KB, MB, GB, KiB, MiB or GiB, such as 5GB")
    return int(float(match[1]) * _SIZES[match[2].upper()])


def export(
    reader: CheckpointReader,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    max_shard_size: int = 5 * 10**9,
    format: str = "safetensors",
    trained_only: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Export:
    """Write the model's weights to the directory `out`.

    Args:
        dtype: of floating-point parameters; None keeps what the checkpoint has. Buffers keep theirs.
        max_shard_size: bytes per file, exceeded only by a tensor that is larger; also about the memory this takes.
        format: "safetensors", or "pt" for files of `torch.save`.
        trained_only: leave out parameters that no optimizer has.
        progress: called with (bytes written, bytes in all) after each file.

    Files have Hugging Face's names, with an index where there are several, and `config.json` when the model has
    one. A tied weight is stored once, under its first name; the other name is in the file's metadata, where
    `safetensors.torch.load_model` looks for it, and "pt" files have both.

    Raises CheckpointError when the checkpoint is damaged. A file that is there already is replaced once the new one
    is whole.
    """
    out = Path(out)
    _make(out)
    extras = reader.extras()
    saved, aliases = _saved(reader, dtype, trained_only)
    sizes = {name: tensor.numel() * tensor.itemsize for name, tensor in saved.items()}
    parts = list(_parts(sizes, max_shard_size))
    names = _file_names(format, len(parts))
    done, total = 0, sum(sizes.values())
    for file, part in zip(names, parts, strict=True):
        whole = {name: torch.empty_like(saved[name], device="cpu") for name in part}
        _fill(reader, whole)
        _write(out / file, whole, {alias: name for alias, name in aliases.items() if name in whole})
        done += sum(sizes[name] for name in part)
        if progress is not None:
            progress(done, total)
    if len(parts) > 1:
        place = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        _write_index(out, format, place, aliases, total)
    _remove_others(out, format, names)
    for file, text in extras.get("hugging_face", {}).items():
        write_small(out / file, text.encode())
    sync_directory(out)
    return Export(tuple(out / file for file in names), len(saved), total)


def read_weights(
    reader: CheckpointReader, *, dtype: torch.dtype | None = torch.float32, trained_only: bool = False
) -> dict[str, Tensor]:
    """All weights and buffers as whole tensors on the CPU, parameters in `dtype`; tied names share one tensor.

    `trained_only` leaves out parameters that no optimizer has. Raises CheckpointError when the checkpoint is
    damaged.
    """
    saved, aliases = _saved(reader, dtype, trained_only)
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in saved.items()}
    _fill(reader, weights)
    return {**weights, **{alias: weights[name] for alias, name in aliases.items() if name in weights}}


def _saved(
    reader: CheckpointReader, dtype: torch.dtype | None, trained_only: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(name: how it is written, on `meta`) and (tied name: name) of the model's tensors."""
    extras = reader.extras()
    aliases: dict[str, str] = extras["aliases"]
    buffers = set(extras["buffers"])
    trained = {name for group in extras["param_groups"] for name in group["params"]}
    saved = {}
    for path, entry in reader.tensors().items():
        name = path.removeprefix("model/")
        wanted = not trained_only or name in buffers or name in trained
        if path.startswith("model/") and name not in aliases and wanted:
            own = entry.properties.dtype
            cast = dtype is not None and name not in buffers and own.is_floating_point
            saved[name] = torch.empty(entry.size, dtype=dtype if cast else own, device="meta")
    return saved, {alias: name for alias, name in aliases.items() if name in saved}


def _parts(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Names in order, cut so that each part has at most `limit` bytes or one tensor. At least one part."""
    part: list[str] = []
    held = 0
    for name, size in sizes.items():
        if part and held + size > limit:
            yield part
            part, held = [], 0
        part.append(name)
        held += size
    yield part


def _file_names(format: str, count: int) -> list[str]:
    stem, ending = FORMATS[format]
    if count == 1:
        return [stem + ending]
    return [f"{stem}-{number:05d}-of-{count:05d}{ending}" for number in range(1, count + 1)]


def _fill(reader: CheckpointReader, tensors: Mapping[str, Tensor]) -> None:
    targets: dict[str, Any] = {f"model/{name}": tensor for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp_load(targets, storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)
        except CheckpointException as failures:
            raise next(iter(failures.failures.values()))[0] from None


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """One file of a state dict in which names of tied weights share one tensor. CheckpointError if that fails."""
    first: dict[Any, str] = {}
    tied = {name: first.setdefault(_place(value), name) for name, value in weights.items()}
    tied = {name: original for name, original in tied.items() if name != original}
    _make(path.parent)
    _write(path, {name: value for name, value in weights.items() if name not in tied}, tied)
    sync_directory(path.parent)


def _place(value: Any) -> Any:
    """Equal for two names of one tensor, of which a state dict makes two objects."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return id(value)
    bits = value.is_conj(), value.is_neg()
    return value.data_ptr(), value.dtype, value.shape, value.stride(), bits


def _write(path: Path, tensors: Mapping[str, Any], tied: Mapping[str, str]) -> None:
    """`tied`: other names, and those under which their tensors are. CheckpointError if it fails."""
    fresh = path.with_name(path.name + ".new")
    try:
        if path.suffix == ".safetensors":
            # The format has neither strides nor views.
            whole = {name: _on_its_own(value) for name, value in tensors.items()}
            save_file(whole, fresh, metadata={"format": "pt", **tied})
        else:
            torch.save({**tensors, **{alias: tensors[name] for alias, name in tied.items()}}, fresh)
        with open(fresh, "rb") as file:
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be made: {error.strerror}; give a directory that can be written"
        ) from error


def _on_its_own(value: Tensor) -> Tensor:
    alone = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    if alone and not value.is_conj() and not value.is_neg():
        return value
    return value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _write_index(
    out: Path, format: str, place: Mapping[str, str], aliases: Mapping[str, str], total: int
) -> None:
    stem, ending = FORMATS[format]
    # In files of torch.save the other names of tied weights are entries like any other.
    more = {alias: place[name] for alias, name in aliases.items()} if format == "pt" else {}
    body = {"metadata": {"total_size": total}, "weight_map": {**place, **more}}
    write_small(out / f"{stem}{ending}.index.json", json.dumps(body, indent=2).encode())


def _remove_others(out: Path, format: str, names: Sequence[str]) -> None:
    """What an earlier export left under other names: a loader would take it for a part of this one."""
    stem, ending = FORMATS[format]
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(ending)}(\.index\.json)?")
    index = {f"{stem}{ending}.index.json"} if len(names) > 1 else set()
    for entry in out.iterdir():
        if ours.fullmatch(entry.name) and entry.name not in {*names, *index}:
            entry.unlink()
