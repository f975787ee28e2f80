"""Lightning's Trainer with `DeepSpeedStrategy`, unchanged: what it computes equals what its own DDP does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.testing.ranks import RankPool

if find_spec("lightning") is None:  # not imported here: only workers have the stand-in
    pytest.skip("lightning is not installed", allow_module_level=True)

import lightning_runs as runs
from lightning_runs import client

STAGES = [1, 2, 3]


def assert_same(found: dict[str, Any], expected: dict[str, Any], *names: str) -> None:
    for name in names or ("losses", "rates", "weights", "metrics"):
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates and clips": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "accumulates, SGD": {"model": {"sgd": True, "lr": 0.1}, "accumulate_grad_batches": 3},
    "no schedule, a short last window": {
        "model": {"schedule": None},
        "accumulate_grad_batches": 4,
        "gradient_clip_val": 0.1,
    },
    "epochs cut short": {
        "model": {"schedule": None, "sgd": True},
        "limit_train_batches": 5,
        "accumulate_grad_batches": 2,
        "max_epochs": 3,
        "val_check_interval": 3,
    },
    "by hand": {"manual": True, "model": {"schedule": None, "sgd": True}},
    "a plateau": {"model": {"schedule": "plateau"}, "max_epochs": 4},
    "a schedule by epoch": {"model": {"schedule": "epoch"}, "max_epochs": 3},
}


@pytest.fixture(scope="module")
def ddp(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Lightning's own run of every loop."""
    return {
        name: ranks2.run(client, runs.fit, None, str(tmp_path_factory.mktemp("ddp")), **loop)[0]
        for name, loop in LOOPS.items()
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_equals_ddp(
    ranks2: RankPool, tmp_path: Path, ddp: dict[str, Any], loop: str, stage: int
) -> None:
    ours = ranks2.run(client, runs.fit, stage, str(tmp_path), **LOOPS[loop])[0]
    assert_same(ours, ddp[loop])


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_is_moved_off_the_device_at_the_end(
    ranks2: RankPool, tmp_path: Path, stage: int
) -> None:
    """As Lightning does after each fit: to the host, which gives whole weights other memory."""
    found = ranks2.run(client, runs.moved_away, stage, str(tmp_path))[0]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("stage", STAGES)
def test_one_model_is_validated_trained_tested_and_trained_again(
    ranks2: RankPool, tmp_path: Path, stage: int
) -> None:
    expected = ranks2.run(client, runs.all_of_it, None, str(tmp_path))[0]
    found = ranks2.run(client, runs.all_of_it, stage, str(tmp_path))[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_saved_goes_on_evaluates_and_is_exported(
    ranks2: RankPool, tmp_path: Path, stage: int
) -> None:
    """Saved within an epoch and at its end; two ranks each, next to what DDP does with its own files."""
    theirs, ours = str(tmp_path / "ddp"), str(tmp_path / "ours")
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "saves": {"every_n_train_steps": 1}}
    expected = ranks2.run(client, runs.fit, None, theirs, **settings)[0]
    whole = ranks2.run(client, runs.fit, stage, ours, model=runs.odd_settings(), **settings)[0]
    assert_same(whole, expected)
    for place in ("step=2.ckpt", "step=3.ckpt"):
        expected = ranks2.run(client, runs.fit, None, theirs, resume=f"{theirs}/{place}", **settings)[0]
        resumed = ranks2.run(client, runs.fit, stage, ours, resume=f"{ours}/{place}", **settings)[0]
        assert_same(resumed, expected)
    assert_same(resumed, whole, "weights")

    last = f"{ours}/step=6.ckpt"
    expected = ranks2.run(client, runs.evaluate, None, theirs, f"{theirs}/step=6.ckpt")[0]
    found = ranks2.run(client, runs.evaluate, stage, ours, last)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    saved, weights, hparams = ranks2.run(client, runs.fp32_file, last, str(tmp_path / "out.pt"))[0]
    assert (saved["epoch"], saved["global_step"]) == (1, 6)
    torch.testing.assert_close(weights, whole["weights"], rtol=0, atol=0)
    given = runs.odd_settings()
    assert given.pop("activation") is torch.tanh  # left out, with a warning: a function
    assert given["nested"].pop("act") is torch.nn.ReLU
    assert {name: hparams[name] for name in given} == given
    assert "activation" not in hparams


@pytest.mark.parametrize("stage", STAGES)
def test_callbacks(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    """An average of whole weights, a summary with the sizes of parts, and the rates of Lightning's own monitor."""
    settings: dict[str, Any] = {"callbacks": ("summary", "average", "rates"), "logs": True}
    expected = ranks2.run(client, runs.fit, None, str(tmp_path / "ddp"), **settings)[0]["callbacks"]
    found = ranks2.run(client, runs.fit, stage, str(tmp_path / "ours"), **settings)[0]["callbacks"]
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-6, atol=1e-6)
    assert len(found[2]["lr-AdamW"]) > 2
    assert "'889  '" in found[0]
    assert ("('Params per Device', ['445  ', '132  '" in found[0]) == (stage == 3)


def test_layers_made_in_configure_model_are_born_sharded(ranks2: RankPool, tmp_path: Path, ddp: Any) -> None:
    saves: dict[str, Any] = {"saves": {"every_n_train_steps": 5}}
    ours = ranks2.run(client, runs.fit, 3, str(tmp_path), sharded=True, **saves)
    assert ours[0]["born"] == ours[1]["born"] == "ShardedParameter"
    assert_same(ours[0], ddp["plain"])
    resumed = ranks2.run(
        client, runs.fit, 3, str(tmp_path), sharded=True, resume=str(tmp_path / "step=10.ckpt")
    )
    assert resumed[0]["steps"] == 12


@pytest.mark.parametrize("stage", [1, 2])
def test_weight_averaging_of_lightning(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    """Its callback swaps averages in for each validation: below stage 3, where it finds whole weights."""
    expected = ranks2.run(client, runs.fit, None, str(tmp_path / "ddp"), callbacks=("swapped average",))[0]
    found = ranks2.run(client, runs.fit, stage, str(tmp_path / "ours"), callbacks=("swapped average",))[0]
    assert_same(found, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_precision(ranks2: RankPool, tmp_path: Path, ddp: dict[str, Any], stage: int) -> None:
    plain = ranks2.run(client, runs.precise, None, str(tmp_path), "32-true")[0]
    for precision, dtype in (("16-mixed", "float16"), ("bf16-mixed", "bfloat16"), ("bf16-true", "bfloat16")):
        found = ranks2.run(client, runs.precise, stage, str(tmp_path), precision)[0]
        assert found["dtype"] == f"torch.{dtype}"
        assert found["losses"] == pytest.approx(plain["losses"], rel=3e-2, abs=3e-3), precision


def test_stage_3_goes_on_from_a_single_file(ranks2: RankPool, tmp_path: Path) -> None:
    saved = ranks2.run(client, runs.fit, None, str(tmp_path), saves={"every_n_train_steps": 12})[0]
    began, steps = ranks2.run(client, runs.from_one_file, str(tmp_path), str(tmp_path / "step=12.ckpt"))[0]
    torch.testing.assert_close(began, saved["weights"], rtol=0, atol=0)
    assert steps == 18


def test_a_run_goes_on_at_another_stage(ranks2: RankPool, tmp_path: Path) -> None:
    """An epoch each at stages 1, 3 and 2: together what DDP computes in three."""
    expected = ranks2.run(client, runs.fit, None, str(tmp_path / "ddp"), max_epochs=3)[0]
    losses: list[float] = []
    for epoch, stage in enumerate([1, 3, 2]):
        found = ranks2.run(
            client,
            runs.fit,
            stage,
            str(tmp_path),
            saves={"every_n_epochs": 1, "save_on_train_epoch_end": True},
            resume=str(tmp_path / f"step={6 * epoch}.ckpt") if epoch else None,
            max_epochs=epoch + 1,
        )[0]
        losses += found["losses"]
    assert losses == pytest.approx(expected["losses"], rel=1e-6)
    assert_same(found, expected, "weights", "metrics")
