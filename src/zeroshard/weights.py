"""Tensors in safetensors files, read by ranges of elements: a rank maps the files and touches what it asks for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zeroshard.errors import CheckpointError

__all__ = ["DTYPES", "Weights", "match_names"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""As safetensors files call them."""


class Weights:
    """The tensors of a file, or of a directory in the layout of Hugging Face, single or with an index.

    All files are opened, and their headers read, at once: CheckpointError for one that is missing, cut short, not
    safetensors, or does not have what the index says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.fspath(path))
        files, expected = _files_of(self.path)
        self._file_of: dict[str, Any] = {}
        self._origin: dict[str, Path] = {}
        for file in files:
            handle = _opened(file)
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if name in self._file_of:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {self._origin[name]} and {file}; remove one"
                    )
                self._file_of[name], self._origin[name] = handle, file
        for name, file in expected.items():
            if self._origin.get(name) != file:
                raise CheckpointError(
                    f"{self.path}: the index says that {name!r} is in {file}, and it is not"
                )

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._file_of)

    def file_of(self, name: str) -> Path:
        return self._origin[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        told = self._file_of[name].get_slice(name).get_dtype()
        if told not in DTYPES:
            raise CheckpointError(f"{self._origin[name]}: {name!r} has dtype {told}, which is not supported")
        return DTYPES[told]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of the flattened tensor, 1-D, in the file's dtype; perhaps a view of it."""
        shape = self.shape(name)
        if start >= stop:
            return torch.empty(0, dtype=self.dtype(name))
        if not shape:
            whole: Tensor = self._file_of[name].get_tensor(name)
            return whole.reshape(-1)
        row = math.prod(shape[1:])
        first, last = start // row, -(-stop // row)
        rows: Tensor = self._file_of[name].get_slice(name)[first:last]
        return rows.reshape(-1)[start - first * row : stop - first * row]


def match_names(
    stored: Sequence[str], wanted: Sequence[str], prefix: str
) -> tuple[dict[str, str], list[str]]:
    """(wanted name -> stored name, stored names that nobody wants).

    A name that is not wanted as it is may be with `prefix.` in front, or without: how Hugging Face tells a model
    from the same one with a head.
    """
    known = set(wanted)
    found: dict[str, str] = {}
    unexpected = []
    for name in stored:
        forms = [name]
        if prefix:
            forms += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
        fits = next((form for form in forms if form in known), None)
        if fits is None or fits in found:
            unexpected.append(name)
        else:
            found[fits] = name
    return found, unexpected


def _files_of(path: Path) -> tuple[list[Path], Mapping[str, Path]]:
    """The files to open, and which tensors the index says are where."""
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if path.is_file():
        _refuse_pickle(path, [path])
        return [path], {}
    if not path.is_dir():
        raise CheckpointError(
            f"{path} does not exist; it must be a directory with {SINGLE} or {INDEX}, or the path of a file. Of a "
            f"model on a hub, download it first"
        )
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    if (path / SINGLE).is_file():
        return [path / SINGLE], {}
    files, indices = sorted(path.glob("*.safetensors")), sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1:
        return _indexed(indices[0])
    if len(files) == 1:
        return files, {}
    if not files:
        _refuse_pickle(path, sorted(path.iterdir()))
    found = ", ".join(file.name for file in files) or "no .safetensors file"
    raise CheckpointError(
        f"{path} has neither {SINGLE} nor {INDEX}; it has {found}. Name the one that is meant"
    )


def _indexed(index: Path) -> tuple[list[Path], Mapping[str, Path]]:
    try:
        of = json.loads(index.read_text())["weight_map"]
        expected = {str(name): index.parent / str(file) for name, file in of.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
    return sorted(set(expected.values())), expected


def _refuse_pickle(path: Path, files: Sequence[Path]) -> None:
    pickles = [file for file in files if file.suffix in _PICKLES]
    if pickles:
        raise CheckpointError(
            f"{path}: {pickles[0].name} is a pickle, which can run any code when it is read, and cannot be read in "
            f"parts. Save the model as safetensors once (`model.save_pretrained(directory)`, or "
            f"`safetensors.torch.save_file(state_dict, path)`)"
        )


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing; all files of a checkpoint must be there") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); it is cut short, or no safetensors file. Copy it again"
        ) from error
