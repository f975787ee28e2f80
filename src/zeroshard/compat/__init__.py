"""The stand-in for `deepspeed`: where it lies, and whether the real one is there. Imports no torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

__all__ = ["real_deepspeed_installed", "standin_directory"]


def standin_directory() -> Path:
    """The directory that goes first on PYTHONPATH, so that `import deepspeed` finds the stand-in."""
    return Path(__file__).parent / "standin"


def real_deepspeed_installed() -> bool:
    """Whether this environment has DeepSpeed itself."""
    try:
        distribution("deepspeed")
    except PackageNotFoundError:
        return False
    return True
