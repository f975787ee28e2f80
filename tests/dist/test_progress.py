"""What a run tells: lines that were asked for, on rank 0 and nowhere else, and events for the monitors."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block
from torch import Tensor, nn

import zeroshard
from zeroshard.clock import PHASES, Clock
from zeroshard.monitor import CsvFiles
from zeroshard.testing import RankPool


class Tokens(nn.Module):
    """Token ids in, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def told(rank: int, world: int, config: dict[str, Any], steps: int, plain: bool = False) -> str:
    """Everything that is printed while `steps` steps run."""
    torch.manual_seed(0)
    model = Tokens()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        engine, optimizer, _, _ = zeroshard.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config
        )
        for _ in range(steps):
            loss = engine(torch.randint(0, 11, (2, 5)))
            if plain:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
        engine.close()
    return out.getvalue()


@pytest.mark.parametrize("plain", [False, True])
def test_progress_lines(ranks2: RankPool, plain: bool) -> None:
    config = {"steps_per_print": 2, "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True}}
    first, second = ranks2.run(told, config, 5, plain)
    assert second == ""
    lines = first.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2", "step 4"]
    for line in lines:
        for part in (r"lr 0\.1", r"gradient norm [\d.e-]+", r"loss scale \d+", r"[\d.]+ samples/s"):
            assert re.search(part, line), line
        samples = float(re.search(r"([\d.]+) samples/s", line)[1])
        tokens = float(re.search(r"([\d.]+) tokens/s", line)[1])
        assert tokens == pytest.approx(5 * samples, rel=0.1)  # five tokens a sample
        assert "TFLOP/s" in line


def test_nothing_is_told_unasked(ranks2: RankPool) -> None:
    assert ranks2.run(told, {}, 3) == ["", ""]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_where_the_time_goes(ranks2: RankPool, stage: int) -> None:
    config = {"wall_clock_breakdown": True, "zero_optimization": {"stage": stage}}
    first, second = ranks2.run(told, config, 3)
    assert second == ""
    lines = first.splitlines()
    assert len(lines) == 3
    for line in lines:
        total = float(re.match(r"time ([\d.]+) ms", line)[1])
        parts = {name: float(ms) for name, ms in re.findall(r"([a-z ]+?) ([\d.]+) ms \(", line)}
        parts = {name.strip(" ,:"): ms for name, ms in parts.items()}
        assert set(parts) == {*PHASES, "idle"}
        assert sum(parts.values()) == pytest.approx(total, abs=0.1 * len(parts))
        assert parts["forward"] > 0
        assert parts["backward"] > 0
        assert parts["optimizer"] > 0
        shares = [int(share) for share in re.findall(r"\((\d+)%\)", line)]
        assert abs(sum(shares) - 100) <= len(shares)


def test_the_bill_is_shown_before_and_after_the_first_step(ranks2: RankPool) -> None:
    config = {"memory_breakdown": True, "zero_optimization": {"stage": 2}}
    first, second = ranks2.run(told, config, 3)
    assert second == ""
    assert first.count("memory of a rank (MB)") == 2
    before, after = first.split("memory of a rank (MB)")[1:]
    assert re.search(r"gradients +[\d.]+ +0\.000", before)
    predicted, measured = re.search(r"gradients +([\d.]+) +([\d.]+)", after).groups()
    assert float(predicted) == float(measured) > 0
    assert float(re.search(r"process: ([\d.]+) MB resident", after)[1]) > 50


def test_the_summary_says_what_is_by_default(ranks2: RankPool) -> None:
    first, second = ranks2.run(told, {"dump_state": True, "bf16": {"enabled": True}}, 0)
    assert second == ""
    assert "clipping    global norm 1 (the default, as in DeepSpeed; 0 turns it off)" in first
    assert "bf16, masters fp32; floating-point inputs are cast" in first
    assert "ZeRO stage  0 on 2 rank(s)" in first


def events(rank: int, world: int, directory: str, breakdown: bool) -> None:
    told(
        rank,
        world,
        {
            "csv_monitor": {"enabled": True, "output_path": directory, "job_name": "job"},
            "train_micro_batch_size_per_gpu": 2,
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "wall_clock_breakdown": breakdown,
        },
        2,
    )


@pytest.mark.parametrize("breakdown", [False, True])
def test_events(ranks2: RankPool, tmp_path: Path, breakdown: bool) -> None:
    ranks2.run(events, str(tmp_path), breakdown)
    found = {file.name: file.read_text().split() for file in (tmp_path / "job").iterdir()}
    times = {"forward", "backward", "backward_inner", "backward_allreduce", "step"}
    names = {"lr", "train_loss", "loss_scale", "grad_norm"}
    if breakdown:
        names |= {f"elapsed_time_ms_{name}" for name in times}
    assert set(found) == {f"Train_Samples_{name}.csv" for name in names}
    # x is the samples so far: 2 per forward on each of 2 ranks.
    assert found["Train_Samples_lr.csv"] == ["step,lr", "4,0.1", "8,0.1"]
    assert found["Train_Samples_loss_scale.csv"] == ["step,loss_scale", "4,16.0", "8,16.0"]


def accumulated_loss(rank: int, world: int, directory: str) -> float:
    """The mean of two losses that a step is made of, as the script sees them."""
    torch.manual_seed(0)
    model = Tokens()
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "csv_monitor": {"enabled": True, "output_path": directory, "job_name": "job"},
            "gradient_accumulation_steps": 2,
        },
    )
    losses = []
    for micro in range(2):
        loss = engine(torch.arange(micro, micro + 10).view(2, 5))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.close()
    return sum(losses) / 2


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches(ranks2: RankPool, tmp_path: Path) -> None:
    expected, _ = ranks2.run(accumulated_loss, str(tmp_path))
    lines = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text().split()
    assert float(lines[1].split(",")[1]) == pytest.approx(expected, rel=1e-6)


def broken_monitor(rank: int, world: int, directory: str) -> str:
    try:
        events(rank, world, directory, False)
    except zeroshard.errors.ConfigError as error:
        return str(error)
    return ""


def test_a_monitor_that_cannot_start_is_an_error_on_all_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "job").write_text("in the way")
    first, second = ranks2.run(broken_monitor, str(tmp_path))
    assert "job" in first
    assert "rank 0 could not start the monitors" in second


def monitor_with_a_broken_package(rank: int, world: int, directory: str) -> str:
    """Only rank 0 uses the package; whatever that raises, the others must not wait for it."""

    def broken(self: Any, directory: Path) -> None:
        raise RuntimeError("descriptors cannot be created directly")

    original = CsvFiles.__init__
    CsvFiles.__init__ = broken  # type: ignore[method-assign]
    try:
        events(rank, world, directory, False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        CsvFiles.__init__ = original  # type: ignore[method-assign]
    return ""


def test_a_monitor_whose_package_is_broken_is_an_error_on_all_ranks(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = ranks2.run(monitor_with_a_broken_package, str(tmp_path))
    assert first == "RuntimeError: descriptors cannot be created directly"
    assert "ConfigError: rank 0 could not start the monitors" in second


def test_a_moment_is_counted_once() -> None:
    clock = Clock(torch.device("cpu"))
    with clock.phase("backward"):
        clock.start("gather wait")
        clock.start("reduce wait")  # an exception leaves it open
        clock.stop("gather wait")
    spent = clock.read()
    assert sum(spent[phase] for phase in (*PHASES, "idle")) == pytest.approx(spent["total"])
    clock.stop("forward")  # was never started
    assert clock.read()["forward"] == 0.0
