"""`zeroshard config`, as another program reads it: lines with tabs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroshard.launch import cli


def rows(output: str) -> dict[str, list[str]]:
    cells = [line.split("\t") for line in output.splitlines()]
    return {first: rest for first, *rest in cells}


def test_keys_lists_every_key_with_what_uses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--keys"]) == 0
    listed = rows(capsys.readouterr().out)
    assert {"train_batch_size", "zero_optimization.stage", "bf16.enabled"} <= listed.keys()
    assert all(len(cells) == 5 for cells in listed.values())


def test_a_file_is_explained_key_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}))
    assert cli.main(["config", str(file)]) == 0
    explained = rows(capsys.readouterr().out)
    assert explained.keys() == {"gradient_clipping", "zero_optimization.stage"}
    assert explained["gradient_clipping"][0] == "0.5"
    assert explained["zero_optimization.stage"][1].startswith("used by")


def test_auto_is_explained_where_nobody_fills_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-7}}
    auto = {"train_batch_size": "auto", "bfloat16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    file.write_text(json.dumps({"optimizer": optimizer, **auto}))
    assert cli.main(["config", str(file)]) == 0
    explained = rows(capsys.readouterr().out)
    assert explained.keys() == {
        "train_batch_size",
        "bf16.enabled",
        "gradient_clipping",
        "optimizer.type",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps")),
    }
    assert {name for name, cells in explained.items() if cells[0] != "auto"} == {
        "optimizer.type",
        "optimizer.params.eps",
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [('{"zero_optimization": {"stagee": 2}}', "zero_optimization.stage"), ("{", "ds.json"), ("", "ds.json")],
)
def test_a_bad_file_is_an_error_that_names_it(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(text)
    assert cli.main(["config", str(tmp_path / "ds.json")]) == 2
    assert told in capsys.readouterr().err


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err
