"""Run the command as a user does: a process of its own, with a hard time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LIMIT_SECONDS = 120

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """The environment without what an outer launcher or a developer may have set."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LOGLEVEL")
    return {name: value for name, value in os.environ.items() if name not in ours}


@pytest.fixture
def zeroshard(tmp_path: Path, clean_environment: dict[str, str]) -> Launch:
    """`zeroshard("run", "script.py")` in an empty directory."""

    def launch(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "zeroshard", *words],
            cwd=tmp_path,
            env=clean_environment | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )

    return launch


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    """Whether a process has not ended yet; an orphan that nobody has waited for has."""

    def look(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return look
