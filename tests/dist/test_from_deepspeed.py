"""Checkpoints that DeepSpeed wrote, opened by our engine at other stages and numbers of ranks."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zeroshard
from zeroshard.launch.cli import main
from zeroshard.testing.ranks import RankPool

HERE = Path(__file__).parent.parent / "checkpoint"
DATA = HERE / "data" / "deepspeed"


def tiny() -> nn.Module:
    """The model of the fixtures, with other values."""
    spec = importlib.util.spec_from_file_location("fixtures", HERE / "make_deepspeed_fixtures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(99)
    model: nn.Module = module.Tiny()
    return model


def load(rank: int, world: int, case: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = tiny()
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.5}, {"params": others}], lr=1.0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": "bf16" in case},
        "fp16": {"enabled": "fp16" in case},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 6},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    }
    engine = zeroshard.initialize(model=model, optimizer=optimizer, config=config)[0]
    path, client_state = engine.load_checkpoint(DATA / case)
    assert path is not None
    found = {f"model/{name}": buffer.clone() for name, buffer in model.named_buffers() if name != "scratch"}
    for name, parameter in model.named_parameters():
        found[f"model/{name}"] = engine.full_fp32(parameter)
        if parameter.requires_grad:
            for key in ("exp_avg", "exp_avg_sq", "step"):
                found[f"optimizer/{key}/{name}"] = zeroshard.safe_get_full_optimizer_state(parameter, key)
    told = {
        "client_state": client_state,
        "steps": engine.global_steps,
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
        "lr": engine.get_lr(),
        "scale": engine.loss_scale(),
    }
    for _ in range(2):
        engine.backward(engine(torch.arange(8).view(2, 4)))
        engine.step()
    assert engine.was_step_applied()
    engine.close()
    return found, told


@pytest.mark.parametrize(
    ("case", "stage"), [("stage2_fp16", 3), ("stage3_bf16", 1), ("stage1_bf16", 3), ("universal3", 2)]
)
def test_our_engine_goes_on_where_deepspeed_stopped(case: str, stage: int, ranks2: RankPool) -> None:
    truth_case = {"universal3": "stage3_bf16"}.get(case, case)
    truth = load_file(DATA / truth_case / "truth.safetensors")
    for found, told in ranks2.run(load, case, stage):
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            assert torch.equal(found[name].float(), value.float()), name
        assert told["client_state"] == {"epoch": 2, "note": {"seed": 0}}
        assert told["steps"] == 3
        assert told["decay"] == [0.1, 0.0]
        assert told["lr"] == pytest.approx([0.01 * math.log(3) / math.log(10)] * 2)


def test_export_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = load_file(DATA / "stage3_bf16" / "truth.safetensors")
    assert main(["export", str(DATA / "stage3_bf16"), str(tmp_path)]) == 0
    found = load_file(tmp_path / "model.safetensors")
    for name, value in truth.items():
        if name.startswith("model/"):
            assert torch.equal(found[name.removeprefix("model/")].float(), value.float()), name
    capsys.readouterr()
    assert main(["inspect", str(DATA / "stage3_bf16"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["zero_stage"], told["world_size"]) == ("DeepSpeed", 3, 3)
    assert told["tied"] == {"head.weight": "embedding.weight"}
    assert main(["verify", str(DATA / "stage3_bf16")]) == 1
    assert "takes no checksums" in capsys.readouterr().err
