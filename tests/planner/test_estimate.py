"""`zeroshard estimate`: where a model comes from, what is printed, and mistakes. The bill itself: tests/dist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.launch.cli import main
from zeroshard.planner.estimators import estimate_zero2_model_states_mem_needs

TINY = "zeroshard.testing.models:tiny"


def huge() -> nn.Module:
    """128 GB, which are not allocated; and a module buffer of 4 KB."""
    model = nn.Sequential(
        *(nn.Linear(*size, bias=False) for size in ((100_000, 160_000), (160_000, 100_000)))
    )
    model.register_buffer("table", torch.zeros(1024))
    return model


def converted() -> nn.Module:
    """As `from_config(...).to(torch.bfloat16)`."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half()).to(torch.bfloat16)


def as_data(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_ours_and_the_formula_agree_where_they_count_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO-2 in bf16 with Adam, no padding: 2P of weights and 18P/G."""
    found = as_data(capsys, "--params", "8e9", "--largest-layer", "2e8", "-n", "4", "--nodes", "2")
    ours, theirs = (found["stages"][2][name] for name in ("zeroshard", "deepspeed"))
    assert ours["padding"] == 0
    host, device = estimate_zero2_model_states_mem_needs(8_000_000_000, 4, 2, cpu_offload=False)
    assert ours["total"] == theirs["device"] == device
    assert theirs["host"] == host
    assert [row["stage"] for row in found["stages"]] == [0, 1, 2, 3]
    assert [row["deepspeed"] is None for row in found["stages"]] == [True, True, False, False]


def test_offload_is_said_not_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_data(capsys, "--params", "8e9", "--largest-layer", "2e8")
    assert [(row["stage"], row["offloaded"]) for row in found["offload"]] == [
        (2, ["offload_optimizer"]),
        (3, ["offload_optimizer"]),
        (3, ["offload_optimizer", "offload_param"]),
    ]
    assert all(row["zeroshard"] is None and "does not offload yet" in row["why"] for row in found["offload"])
    assert main(["estimate", TINY]) == 0
    assert "zeroshard does not offload yet" in capsys.readouterr().out


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_data(capsys, f"{__name__}:huge", "--stage", "3", "-n", "64")
    assert found["parameters"] == 2 * 100_000 * 160_000
    assert found["stages"][0]["zeroshard"]["module buffers"] == 4096
    assert found["stages"][0]["zeroshard"]["parameters"] == 2 * (found["parameters"] // 64)


def test_a_factory_may_convert_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_data(capsys, f"{__name__}:converted", "--stage", "0", "--dtype", "bf16", "-n", "1")
    ours = found["stages"][0]["zeroshard"]
    assert ours["parameters"] - ours["padding"] == 2 * found["parameters"] == 2 * 144


def test_a_config_gives_stage_dtype_optimizer_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    given = {
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Lion", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    file.write_text(json.dumps(given))
    found = as_data(capsys, TINY, "--config", str(file), "-n", "2")
    assert (found["dtype"], found["optimizer"], found["accumulation_steps"]) == ("bf16", "Lion", 4)
    assert [row["stage"] for row in found["stages"]] == [2]
    assert found["stages"][0]["zeroshard"]["optimizer state"] == found["parameters"] * 4 // 2
    assert found["asked_for"] == ["offload_optimizer=cpu"]
    assert main(["estimate", TINY, "--config", str(file), "--dtype", "fp32", "--stage", "1"]) == 0
    out = capsys.readouterr().out
    assert "fp32, Lion, 4 micro-batch(es)" in out
    assert "asks for offload_optimizer=cpu: zeroshard does not offload yet" in out


def test_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 32}
    named = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps({**named, **shape}))
    block = 12 * 64 * 64 + 13 * 64
    found = as_data(capsys, str(tmp_path), "--stage", "3", "-n", "2")
    assert found["parameters"] == 532 * 64 + 2 * block + 2 * 64  # the head is tied to the embedding
    assert found["largest_layer"] == 500 * 64
    assert (
        as_data(capsys, str(tmp_path / "config.json"), "--stage", "3", "-n", "2")["stages"] == found["stages"]
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give either a model, or --params and --largest-layer"),
        ([TINY, "--params", "5"], "give either a model, or --params and --largest-layer"),
        (["--params", "7e9"], "--params and --largest-layer go together"),
        (["--params", "7e9", "--largest-layer", "8e9"], "at most all of them"),
        (["--params", "7e9", "--largest-layer", "10"], "700000000 layers, and 10000 is the most"),
        (["--params", "7.5", "--largest-layer", "1"], "'7.5' is not a whole number"),
        (["--params", "nan", "--largest-layer", "1"], "'nan' is not a whole number"),
        (["--params", "1e30", "--largest-layer", "1e30"], "--params: '1e30' is not a whole number from 1"),
        (["nowhere"], "'nowhere' is no file or directory, and no factory either"),
        (["nowhere:build"], "importing 'nowhere' raised ModuleNotFoundError"),
        ([f"{TINY}r"], "nothing of that name"),
        (["os:sep"], "a str, which cannot be called"),
        (["os:getcwd"], "it gave str, not a torch.nn.Module"),
        (["os:abort_", "--stage", "4"], "--stage"),
        ([TINY, "--dtype", "int8"], "'int8' is not one of fp32, bf16, fp16"),
        ([TINY, "-n", "0"], "--ranks"),
        ([TINY, "--config", "nowhere.json"], "nowhere.json: no such file"),
        ([str(Path(__file__).parent)], "there is no config.json in it"),
        ([__file__], "the model cannot be built"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *words]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert told in printed.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"zero_optimization": 3}', "zero_optimization = 3: must be an object"),
        ('{"zero_optimization": {"stage": "x"}}', "the ZeRO stage must be 0, 1, 2 or 3"),
    ],
)
def test_a_wrong_config_is_named_with_its_file(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    assert main(["estimate", "--params", "1e6", "--largest-layer", "1e5", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zeroshard: file {file}: ")
    assert told in error


def test_auto_for_the_whole_batch_alone(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": "auto"}')
    assert main(["estimate", "--params", "1e6", "--largest-layer", "1e5", "--config", str(file)]) == 0


@pytest.mark.parametrize("params", ["100", "1e17"])
def test_columns_stay_apart_and_figures_are_not_all_zero(
    params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--params", params, "--largest-layer", params]) == 0
    lines = {line[:30].strip(): line[30:].split() for line in capsys.readouterr().out.splitlines()}
    assert len(lines["parameters"]) == len(lines["DeepSpeed's formula, host/node"]) == 4
    assert float(lines["parameters"][0].replace(",", "")) > 0


def test_a_module_that_exits_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exits_when_imported.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", "exits_when_imported:build"]) == 1
    assert "importing 'exits_when_imported' raised SystemExit" in capsys.readouterr().err
