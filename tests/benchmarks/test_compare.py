"""The benchmark runs, counts what theory says, and refuses to compare what trains differently."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import compare` as if run from the benchmarks folder."""
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.usefixtures("modules")
def test_a_different_loss_is_an_error() -> None:
    import compare

    same = compare.Results(1, {}, {"ddp": [2.0, 1.0], "plain": [9.0, 9.0], "fsdp2": [2.0, 1.00005]})
    assert compare.check_losses(same) == pytest.approx(5e-5, rel=1e-3)
    same.losses["fsdp2"][1] = 1.001
    with pytest.raises(SystemExit, match="fsdp2 trains differently"):
        compare.check_losses(same)


@pytest.mark.usefixtures("modules")
def test_rounds_are_compared_in_pairs() -> None:
    import compare

    base = [1.0, 1.1, 3.0, 1.2, 0.9, 2.0]  # a noisy machine
    low, high = compare.ratio_interval([2 * seconds for seconds in base], base)
    assert low == pytest.approx(2.0)
    assert high == pytest.approx(2.0)


@pytest.mark.slow
def test_a_small_run_counts_the_traffic_of_theory(tmp_path: Path) -> None:
    words = "--contestants ddp,fsdp2 --layers 2 --width 64 --seq 16 --rounds 2 --steps 1 --overhead-rounds 0"
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, str(FOLDER / "compare.py"), *words.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    traffic = result.stdout.partition("## Traffic")[2]
    assert re.search(r"\| ddp \|.* 2\.0000 \| 2 \|", traffic)
    assert re.search(r"\| fsdp2 \|.* 1\.0000 \|", traffic)
