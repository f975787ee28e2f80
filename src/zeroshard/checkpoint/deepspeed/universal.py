"""DeepSpeed's universal checkpoints: a directory per parameter, with one file for the master and each state.

From stages 1 and 2 a file holds {"param": tensor} in the parameter's shape, from stage 3 a flat tensor. Files are
opened when they are read, and not kept open: there are a few of them for every parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.deepspeed.files import missing
from zeroshard.checkpoint.deepspeed.pickles import open_value
from zeroshard.checkpoint.deepspeed.values import SAMPLE, Part, Value, numel, scalar, scalars
from zeroshard.errors import CheckpointError

__all__ = ["check_order", "missing_steps", "universal_values"]


def universal_values(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], *, skip: Collection[str], with_optimizer: bool
) -> dict[str, Value]:
    """Every parameter under `directory`, which is the `zero` of a tag, but `skip`.

    `shapes`: as the model's states have them.
    """
    for name in shapes:
        if not (directory / name / "fp32.pt").is_file():
            raise missing(directory / name / "fp32.pt", "the conversion or a copy of it did not finish")
    values: dict[str, Value] = {}
    for folder in sorted(path for path in directory.iterdir() if path.is_dir() and path.name not in skip):
        name = folder.name
        for file in sorted(folder.glob("*.pt")):
            if file.stem == "fp32":
                values[f"model/{name}"] = _value(file, shapes.get(name))
            elif with_optimizer:
                values[f"optimizer/{file.stem}/{name}"] = _value(file, shapes.get(name))
    return values


def _value(file: Path, shape: tuple[int, ...] | None) -> Value:
    stored = _stored(file)
    if not isinstance(stored, Tensor) or not stored.dim():
        return scalar(stored)
    if shape is None or (stored.dim() > 1 and stored.numel() != numel(shape)):
        # The parts of tensor parallelism together, or a vocabulary without its padding.
        shape = tuple(stored.shape)
    if stored.numel() != numel(shape):
        raise CheckpointError(
            f"{file} has {stored.numel()} elements, and the parameter has shape {shape} in the model's states. The "
            f"files are of different runs: convert the checkpoint again."
        )
    return Value(shape, stored.dtype, (Part(0, stored.numel(), lambda: _stored(file).reshape(-1)),))


def _stored(file: Path) -> Any:
    loaded = open_value(file)
    return loaded["param"] if isinstance(loaded, dict) else loaded


def missing_steps(
    values: dict[str, Value], state: Mapping[str, Any], shapes: list[Mapping[str, Any]]
) -> dict[str, Value]:
    """Numbers such as `step`, which a conversion from stage 3 leaves in the state of rank 0's groups."""
    groups = (state.get("optimizer_state_dict") or {}).get("state", {})
    return {
        f"optimizer/{key}/{name}": value
        for index, members in enumerate(shapes)
        for key, value in scalars(groups.get(index, {})).items()
        for name in members
        if f"optimizer/{key}/{name}" not in values
    }


def check_order(directory: Path, values: Mapping[str, Value], weights: Mapping[str, Value]) -> None:
    """Compare masters with the weights of the model's states. Raises CheckpointError when they are not the same.

    The conversion (0.19.8) takes the parameters of a run with round_robin_gradients in another order than theirs.
    """
    for key, master in values.items():
        weight = weights.get(key)
        if weight is None or weight.shape != master.shape:
            continue
        some = weight.parts[0].read()[:SAMPLE]
        if not torch.equal(master.parts[0].read()[:SAMPLE].to(some.dtype), some):
            raise CheckpointError(
                f"{directory / key.removeprefix('model/') / 'fp32.pt'} is not the weight that is in the model's "
                f"states: DeepSpeed's conversion to a universal checkpoint mixes up the parameters of a run with "
                f"round_robin_gradients. Read the checkpoint that was converted instead."
            )
