"""Tensors in safetensors files: ranges, names, and files that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zeroshard.errors import CheckpointError
from zeroshard.weights import Weights, match_names

TENSORS = {
    "a.matrix": torch.arange(35.0).view(7, 5),
    "a.cube": torch.arange(24).view(2, 3, 4),
    "a.number": torch.tensor(2.5, dtype=torch.bfloat16),
    "b.nothing": torch.zeros(0, 3),
    "b.flags": torch.tensor([True, False, True]),
}


def write(directory: Path) -> None:
    """Two files and their index."""
    parts = {
        "part-1.safetensors": {name: value for name, value in TENSORS.items() if name < "b"},
        "part-2.safetensors": {name: value for name, value in TENSORS.items() if name > "b"},
    }
    for file, tensors in parts.items():
        save_file(tensors, directory / file)
    index = {"weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_every_range_is_that_of_the_flattened_tensor(tmp_path: Path) -> None:
    write(tmp_path)
    weights = Weights(tmp_path)
    assert sorted(weights.names) == sorted(TENSORS)
    for name, value in TENSORS.items():
        assert (weights.shape(name), weights.dtype(name)) == (tuple(value.shape), value.dtype)
        for start in range(value.numel() + 1):
            for stop in range(start, value.numel() + 1):
                part = weights.read(name, start, stop)
                assert part.dtype is value.dtype
                assert torch.equal(part, value.reshape(-1)[start:stop]), (name, start, stop)


def test_one_file_by_any_path(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path / "model.safetensors")):
        assert sorted(Weights(path).names) == sorted(TENSORS)
    assert Weights(tmp_path / "other.safetensors").names == ("other",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nowhere", "nowhere does not exist; it must be a directory with model.safetensors or"),
        ("pickle", "pytorch_model.bin is a pickle, which can run any code"),
        ("pickle file", "Save the model as safetensors once"),
        ("empty", "has neither model.safetensors nor model.safetensors.index.json; it has no .safetensors"),
        ("several", "it has x.safetensors, y.safetensors. Name the one that is meant"),
        ("cut short", "part-2.safetensors cannot be read"),
        ("missing file", "part-2.safetensors is missing; all files of a checkpoint must be there"),
        ("missing tensor", "the index says that 'b.extra' is in"),
        ("index", "is no index of safetensors files"),
        ("twice", "part-2.safetensors; remove one"),
        ("no safetensors", "it is cut short, or no safetensors file"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, damage: str, message: str) -> None:
    path, index = tmp_path, tmp_path / "model.safetensors.index.json"
    if damage == "nowhere":
        path = tmp_path / "nowhere"
    elif damage.startswith("pickle"):
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        path = tmp_path / "pytorch_model.bin" if damage == "pickle file" else tmp_path
    elif damage == "several":
        for name in ("x", "y"):
            save_file(TENSORS, tmp_path / f"{name}.safetensors")
    elif damage != "empty":
        write(tmp_path)
        second = tmp_path / "part-2.safetensors"
        table = json.loads(index.read_text())
        if damage == "cut short":
            second.write_bytes(second.read_bytes()[:-1])
        elif damage == "no safetensors":
            second.write_bytes(b"this is a text and nothing else")
        elif damage == "missing file":
            second.unlink()
        elif damage == "missing tensor":
            table["weight_map"]["b.extra"] = "part-2.safetensors"
            index.write_text(json.dumps(table))
        elif damage == "index":
            index.write_text("{}")
        elif damage == "twice":
            save_file(TENSORS, second)
    with pytest.raises(CheckpointError) as caught:
        Weights(path)
    assert message in str(caught.value)


def test_names_with_and_without_the_prefix() -> None:
    assert match_names(["w", "x"], ["w"], "") == ({"w": "w"}, ["x"])
    assert match_names(["m.w", "head"], ["w"], "m") == ({"w": "m.w"}, ["head"])
    assert match_names(["w", "head"], ["m.w", "head"], "m") == ({"m.w": "w", "head": "head"}, [])
    assert match_names(["m.w", "w"], ["w", "m.w"], "m") == ({"m.w": "m.w", "w": "w"}, [])
    assert match_names(["w", "m.w"], ["w"], "m") == ({"w": "w"}, ["m.w"])  # not twice
