"""Values beside the tensors of a checkpoint: what comes back as it was, and what is refused."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import io
import os
import pathlib
import pickle
import sys
import types
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from zeroshard.checkpoint.deepspeed.pickles import open_states
from zeroshard.checkpoint.plain import check_known, harmless, pack, unpack
from zeroshard.errors import CheckpointError


class Mode(enum.Enum):
    FAST = 1


class Text(str, enum.Enum):
    LONG = "long"


class Bits(enum.Flag):
    A = 1
    B = 2


VALUES: dict[str, Any] = {
    "path": pathlib.Path("/a/b"),
    "pure path": pathlib.PurePosixPath("a"),
    "namespace": argparse.Namespace(seed=1, root=pathlib.Path("x")),
    "simple namespace": types.SimpleNamespace(a=[1]),
    "enumeration": [Mode.FAST, Text.LONG, Bits.A | Bits.B],
    "time": [datetime.timedelta(1), datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3)],
    "time zone": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
    "numbers": [decimal.Decimal("1.5"), 1j, np.float64(1.5), np.int32(3), np.bool_(True)],
    "text": np.array(["a", "bc"]).tolist(),
    "sets": [{1}, frozenset({"a"}), range(3), slice(1, 2)],
    "identifier": uuid.UUID(int=5),
    "torch": [torch.float16, torch.Size([1]), torch.device("cpu")],
}


@pytest.mark.parametrize("what", VALUES)
def test_comes_back(what: str) -> None:
    found = unpack(pack({"nested": [VALUES[what]]}))["nested"][0]
    assert found == VALUES[what]
    assert type(found) is type(VALUES[what])


def test_arrays_come_back_as_tensors_and_numbers_as_numbers() -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.array([1, 2], dtype=np.int16)):
        found = unpack(pack({"a": [array]}))["a"][0]
        assert torch.equal(found, torch.from_numpy(array))
    assert type(unpack(pack(np.float32(0.5)))) is float


@pytest.mark.parametrize(
    "value", [np.arange(3), np.array([object()]), np.zeros(1, "f8,i4")[0], np.dtype([("a", object)])]
)
def test_files_with_arrays_of_numpy_are_refused(value: Any) -> None:
    """Such a file may describe elements that are addresses: what reads them reads any memory, or dies."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with pytest.raises((pickle.UnpicklingError, KeyError)):
        unpack(buffer.getvalue())


def test_numbers_of_numpy_in_the_files_of_others() -> None:
    for number in (np.float64(2.5), np.int8(-3), np.bool_(True), np.uint64(2**63), np.float16(0.5)):
        buffer = io.BytesIO()
        torch.save([number], buffer)
        assert unpack(buffer.getvalue()) == [number.item()]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


class Plain:
    """Harmless, but who knows."""


@pytest.mark.parametrize("value", [Runs(), Plain(), torch.nn.ReLU, torch.tanh])
def test_is_refused(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        unpack(pack([value]))


def test_the_user_may_allow_a_class() -> None:
    with torch.serialization.safe_globals([Plain]):
        assert isinstance(unpack(pack(Plain())), Plain)


def test_files_of_deepspeed_may_hold_them(tmp_path: pathlib.Path) -> None:
    state = {"hyper_parameters": {"data": pathlib.Path("/a"), "mode": Mode.FAST, "best": np.float64(2.0)}}
    torch.save(state, tmp_path / "states.pt")
    assert open_states(tmp_path / "states.pt") == state
    torch.save({"model": Plain()}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"holds .*Plain, which was not read"):
        open_states(tmp_path / "other.pt")


def test_an_enumeration_that_is_not_imported_is_told_when_it_is_asked_for() -> None:
    module = types.ModuleType("of_the_user")
    module.Mode = enum.Enum("Mode", "ON OFF", module="of_the_user")  # type: ignore[attr-defined]
    sys.modules["of_the_user"] = module
    data = pack({"epoch": 3, "settings": {"mode": module.Mode.ON}})
    assert unpack(data)["settings"]["mode"] is module.Mode.ON
    del sys.modules["of_the_user"]
    found = unpack(data)
    assert found["epoch"] == 3
    with pytest.raises(CheckpointError, match=r"entry 'settings' .* of_the_user.Mode, .* Import the module"):
        check_known(found, "saves/a")
    check_known({"epoch": 3}, "saves/a")


class _Calls:
    """Pickled as `reduce`, with `state` written into what that makes."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any) -> None:
        self.reduce = function, args, state

    def __reduce__(self) -> Any:
        return self.reduce


@pytest.mark.parametrize("state", [{"_value_": 7}, (None, {"_name_": "SLOW"})])
def test_members_of_enumerations_cannot_be_changed(state: Any, tmp_path: pathlib.Path) -> None:
    attack = _Calls(Mode, (1,), state)
    with pytest.raises(pickle.UnpicklingError, match=r"it changes Mode\.FAST"):
        unpack(pack({"mode": attack}))
    torch.save({"mode": attack}, tmp_path / "states.pt")
    with pytest.raises(CheckpointError, match=r"it changes Mode\.FAST"):
        open_states(tmp_path / "states.pt")
    assert (Mode.FAST.value, Mode.FAST.name, Mode(1)) == (1, "FAST", Mode.FAST)


def test_no_classes_are_made() -> None:
    with pytest.raises(pickle.UnpicklingError):
        unpack(pack(_Calls(enum.Enum, ("Made", ["A"]), None)))


def test_what_is_built_for_a_name_wins_over_an_imported_enumeration() -> None:
    """As for DeepSpeed's stage where the stand-in, which has a class of that name, is imported."""
    name = f"{__name__}.Mode"
    for more in ([], [(int, name)]):
        with harmless([name], more):
            known = torch.serialization.get_safe_globals()
        built = [entry[0] for entry in known if isinstance(entry, tuple) and entry[1] == name]
        assert built == ([int] if more else [Mode])
