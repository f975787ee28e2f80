"""The benchmark of loading runs, and what it measures holds the bound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loading.py"


def run(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=580, check=True
    ).stdout


def test_help() -> None:
    assert "--gigabytes" in run("--help")


@pytest.mark.slow
def test_a_file_of_200_megabytes_on_two_ranks() -> None:
    """Each rank takes its part, what may lie open, a block of the model and what sending takes."""
    pytest.importorskip("transformers")
    rows = [line.split("|")[1:-1] for line in run("--gigabytes", "0.2", "--ranks", "2").splitlines()]
    peaks = {row[1].strip(): (float(row[2]), float(row[3])) for row in rows if row and row[0].strip() == "2"}
    assert len(peaks) == 5
    for way, (part, peak) in peaks.items():
        if way.startswith("Init"):
            assert peak <= part + 64 + 2 * 51 + 60, way
