"""PEFT's adapters under Trainer: they train as under DDP, and are saved whole at every stage."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeroshard.testing.ranks import RankPool

if not all(map(find_spec, ("transformers", "peft"))):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or peft", allow_module_level=True)

import peft_runs as peft
from trainer_runs import client, saved_weights

CASES = [
    (1, "whole head", False),
    (2, "whole head", False),
    (3, "lora", True),
    (3, "whole head", True),
    (3, "whole embedding", False),
    (3, "dora", True),
    pytest.param(3, "whole embedding", True, marks=pytest.mark.slow),
    pytest.param(3, "pissa", True, marks=pytest.mark.slow),
    pytest.param(3, "all linear", True, marks=pytest.mark.slow),
    pytest.param(3, "embedding too", True, marks=pytest.mark.slow),
    pytest.param(2, "dora", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("stage", "adapter", "loaded"), CASES)
def test_adapters(ranks2: RankPool, tmp_path: Path, stage: int, adapter: str, loaded: bool) -> None:
    """Also on a base that was loaded in parts. What was saved opens in plain PEFT, and says the same."""
    found: dict[str, Any] = ranks2.run(client, peft.tuned, str(tmp_path / "ours"), stage, adapter, loaded)[0]
    expected: dict[str, Any] = ranks2.run(client, peft.tuned, str(tmp_path / "ddp"), None, adapter, False)[0]
    for ours, theirs in zip(found.pop("history"), expected.pop("history"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found.pop("reloaded") < 1e-6
    assert expected.pop("reloaded") < 1e-6
    # At stage 3 Trainer asks for what is trained alone: the base of an embedding is not among it.
    assert found["names"] == [n for n in expected["names"] if stage < 3 or "base_layer" not in n]
    assert not found["empty"]
    weights, wanted = saved_weights(tmp_path / "ours/final"), saved_weights(tmp_path / "ddp/final")
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in weights) < 1e-5
