"""TRL's trainers: supervised, with preferences (two engines), and with text that is generated while training."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeroshard.testing.ranks import RankPool

if not all(map(find_spec, ("transformers", "trl"))):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or trl", allow_module_level=True)

import trl_runs as trl
from trainer_runs import client, saved_weights

SLOW = pytest.mark.slow
CASES = [
    (trl.sft, 1, (False, False)),
    (trl.sft, 2, (True, False)),
    (trl.sft, 3, (False, False)),
    (trl.sft, 3, (True, False)),
    (trl.dpo, 3, (False,)),
    (trl.grpo, 3, ()),
    pytest.param(trl.sft, 2, (False, False), marks=SLOW),
    pytest.param(trl.sft, 1, (True, False), marks=SLOW),
    pytest.param(trl.sft, 3, (False, True), marks=SLOW),
    pytest.param(trl.dpo, 3, (True,), marks=SLOW),
    pytest.param(trl.dpo, 2, (False,), marks=SLOW),
    pytest.param(trl.grpo, 2, (), marks=SLOW),
]


@pytest.mark.parametrize(("case", "stage", "how"), CASES)
def test_equals_ddp(ranks2: RankPool, tmp_path: Path, case: Any, stage: int, how: tuple[bool, ...]) -> None:
    found = ranks2.run(client, case, str(tmp_path / "ours"), stage, *how)[0]
    expected = ranks2.run(client, case, str(tmp_path / "ddp"), None, *how)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    weights, wanted = saved_weights(tmp_path / "ours/final"), saved_weights(tmp_path / "ddp/final")
    assert weights.keys() == wanted.keys()
    assert max(float((weights[name] - wanted[name]).abs().max()) for name in wanted) < 2e-5
