"""One process, no launcher: every stage is plain PyTorch, bit for bit."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import zeroshard

sys.path.insert(0, str(Path(__file__).parent / "dist"))
from models import Odd, tokens, two_groups


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bit_identical(stage: int) -> None:
    torch.manual_seed(0)
    reference = Odd()
    model = copy.deepcopy(reference)
    expected = two_groups(reference)
    engine, _, _, _ = zeroshard.initialize(
        model=model,
        optimizer=two_groups(model),
        config={
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    for step in range(5):
        loss = engine(tokens(step, 0, 0))
        engine.backward(loss)
        engine.step()
        other = reference(tokens(step, 0, 0))
        other.backward()
        expected.step()
        expected.zero_grad()
        assert torch.equal(loss.detach(), other.detach())
    engine.close()
    for parameter, known in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, known)


def test_everything_from_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with comments, its optimizer, its loader; progress lines on standard output."""
    file = tmp_path / "config.json"
    file.write_text("""{
      "train_micro_batch_size_per_gpu": 2, // samples
      "gradient_accumulation_steps": 2,
      "steps_per_print": 1,
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
      "zero_optimization": {"stage": 2,},
    }""")
    data = TensorDataset(torch.randint(0, 11, (8, 6)))
    engine, optimizer, loader, _ = zeroshard.initialize(
        model=Odd(),
        training_data=data,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5),
        config=str(file),
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps(), len(loader)) == (4, 2, 4)
    results = []
    for (ids,) in loader:
        engine.backward(engine(ids))
        results.append(engine.step())
    assert [result is None for result in results] == [True, False, True, False]
    assert engine.global_steps == 2
    assert (loader.state_dict()["epoch"], engine.training_dataloader) == (1, loader)
    assert engine.get_global_grad_norm() > 0
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.25
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "1"], ["step", "2"]]
    assert "samples/s" in lines[1]
    assert str(engine.schedule).count("WAIT") >= 1
    engine.close()


SEEDS: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 3}},
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    {"zero_optimization": True},
]


@pytest.mark.parametrize("config", SEEDS, ids=json.dumps)
def test_short_configs_work_as_they_stand(config: dict[str, Any]) -> None:
    model = Odd()
    engine, _, _, _ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
    )
    before = engine(tokens(0, 0, 0))
    for _ in range(3):
        engine.backward(engine(tokens(0, 0, 0)))
        engine.step()
    assert engine(tokens(0, 0, 0)) < before
    engine.close()


def test_keys_without_effect_are_told_and_the_bill_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "log_level": "info",
        "zero_optimization": {"stage": 1, "contiguous_gradients": False},
    }
    engine, *_ = zeroshard.initialize(model=Odd(), config=config)
    engine.close()
    told = [record.getMessage() for record in caplog.records if record.name == "zeroshard"]
    assert any("zero_optimization.contiguous_gradients" in message for message in told)
    assert any("memory of a rank (MB)" in message for message in told)


def test_the_published_fp16_config_trains() -> None:
    """Made for one rank: 64 samples are 32 forwards of 2."""
    torch.manual_seed(0)
    model = Odd()
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=Path(__file__).parent / "config" / "data" / "configs" / "fp16_skeleton.json",
    )
    losses = []
    for micro in range(5 * 32):
        loss = engine(tokens(0, micro % 32, 0)[:2])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    # 2^16 is beyond fp16, in which this loss is: one overflow is tolerated, each further one halves.
    assert engine.global_steps == 5
    assert 1 <= engine.skipped_steps < 4
    assert engine.loss_scale() == 2.0 ** (17 - engine.skipped_steps)
    assert sum(losses[-32:]) < sum(losses[:32])
    engine.close()


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        (
            {"leaf_module": {"names": ["blocks.0", "blocks.9"]}},
            "no module of the model matches leaf_module.names: 'blocks.9'",
        ),
        (
            {"leaf_module": {"classes": ["Blok"], "name_suffixes": [".7"]}},
            "matches leaf_module.classes: 'Blok', leaf_module.name_suffixes: '.7'",
        ),
        ({"stage3_module_granularity_threshold": 3}, "the finest is 'blocks.0' with 22 elements per module"),
        ({"stage3_module_granularity_threshold": 22}, None),
        ({}, None),  # of the built-in classes most models have none
    ],
)
def test_leaves_that_are_looked_for_in_vain_are_told(
    caplog: pytest.LogCaptureFixture, zero: dict[str, Any], told: str | None
) -> None:
    model = Odd()
    config = {"zero_optimization": {"stage": 3, **zero}}
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters()), config=config
    )
    engine.close()
    warnings = [record.getMessage() for record in caplog.records if "lea" in record.getMessage()]
    assert len(warnings) == (told is not None)
    assert told is None or told in warnings[0]
