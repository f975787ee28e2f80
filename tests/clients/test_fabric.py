"""Fabric with `DeepSpeedStrategy`, unchanged: what a loop computes equals what it does under Fabric's own DDP."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.testing.ranks import RankPool

if find_spec("lightning") is None:  # not imported here: only workers have the stand-in
    pytest.skip("lightning is not installed", allow_module_level=True)

import fabric_runs as runs
from lightning_runs import client

STAGES = [1, 2, 3]
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates, clips and schedules": {"window": 3, "clip": 0.05, "scheduled": True},
}
COMPARED = "losses", "evaluated", "weights", "rate"


def assert_same(found: dict[str, Any], expected: dict[str, Any], *names: str) -> None:
    for name in names or COMPARED:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def ddp(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Fabric's own run of every loop."""
    return {
        name: ranks2.run(client, runs.train, None, str(tmp_path_factory.mktemp("ddp")), **loop)[0]
        for name, loop in LOOPS.items()
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_equals_ddp(
    ranks2: RankPool, tmp_path: Path, ddp: dict[str, Any], loop: str, stage: int
) -> None:
    whole = ranks2.run(client, runs.train, stage, str(tmp_path), save=0, **LOOPS[loop])[0]
    assert_same(whole, ddp[loop])
    resumed = ranks2.run(client, runs.train, stage, str(tmp_path), resume=True, **LOOPS[loop])[0]
    assert resumed["epoch"] == 2
    assert "other" in resumed["left"]
    assert_same(resumed, whole, "evaluated", "weights")
    assert resumed["losses"] == pytest.approx(whole["losses"][6:], rel=1e-6)


def test_a_module_that_fabric_made_is_sharded_from_birth(ranks2: RankPool, tmp_path: Path, ddp: Any) -> None:
    found = ranks2.run(client, runs.train, 3, str(tmp_path), inside=True)[0]
    assert found["born"] == "ShardedParameter"
    assert_same(found, ddp["plain"])


@pytest.mark.parametrize("stage", STAGES)
def test_what_fabric_refuses_and_what_it_lets_pass(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    told = ranks2.run(client, runs.refused, stage, str(tmp_path))[0]
    assert "gradient_clipping" in told["clip"]
    assert told["state"] == {"epoch": 4, "never": 1}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_plain_weights_are_loaded(ranks2: RankPool, tmp_path: Path, stage: int, trained: bool) -> None:
    net = runs.Net()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    found = ranks2.run(client, runs.raw, stage, str(tmp_path / "net.pt"), trained)[1]
    torch.testing.assert_close(found["weights"], dict(net.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(found["evaluated"], net(torch.ones(2, 10)).detach())


def test_several_models_with_methods_of_their_own(ranks2: RankPool) -> None:
    expected = ranks2.run(client, runs.several, None)
    for stage in STAGES:
        for ours, theirs in zip(ranks2.run(client, runs.several, stage), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
