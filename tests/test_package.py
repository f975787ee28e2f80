"""House rules that can be checked."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard
from zeroshard.config import iter_keys

SOURCE = Path(zeroshard.__file__).parent
ROOT = Path(__file__).parents[1]


def test_public_names_resolve() -> None:
    for name in zeroshard.__all__:
        assert getattr(zeroshard, name) is not None
    assert set(zeroshard.__all__) <= set(dir(zeroshard))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = zeroshard.nothing


def test_every_config_key_that_is_used_names_what_uses_it() -> None:
    prefix = "used by "
    texts = [key.status.removeprefix(prefix) for key in iter_keys() if key.status.startswith(prefix)]
    consumers = {consumer for text in texts for consumer in text.split(", ")}
    assert "layout.plan_layout" in consumers
    for consumer in consumers:
        module, _, path = consumer.partition(".")
        found = importlib.import_module(f"zeroshard.{module}")
        for part in path.split("."):
            found = getattr(found, part)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )


def test_import_is_quiet_and_starts_nothing() -> None:
    code = """
import os, subprocess, sys, threading
import torch  # which starts one itself, from 2.14 on, when it looks for the libraries of CUDA
def refuse(*a, **k): raise AssertionError("a process was started")
subprocess.Popen = os.system = os.fork = refuse
torch.accelerator.current_accelerator = torch.accelerator.is_available = torch.cuda.is_available = refuse
before = threading.active_count()
import zeroshard, zeroshard.initialization, zeroshard.testing
assert threading.active_count() == before
zeroshard.initialize
"""
    done = run(code)
    assert (done.stdout, done.stderr) == ("", "")


def test_import_alone_brings_no_torch() -> None:
    assert run("import sys, zeroshard; print('torch' in sys.modules)").stdout.strip() == "False"


def test_what_importing_adds_to_torch_is_small() -> None:
    """Counted in CPU time of the process, so that a busy machine does not decide it."""
    code = """
import time, torch
start = time.process_time()
import zeroshard
print(time.process_time() - start)
"""
    assert any(float(run(code).stdout) <= 0.2 for _ in range(3))


def test_the_accelerator_is_one_that_is_there() -> None:
    """A torch built for CUDA names cuda on a host that has none, unless told to look."""
    for folder in (SOURCE, ROOT / "benchmarks", ROOT / "examples"):
        for file in folder.rglob("*.py"):
            assert "current_accelerator()" not in file.read_text(), file


def test_every_module_is_in_the_tables() -> None:
    """Where it belongs is in the layers, and what it is for in the tables of CONTRIBUTING and the design."""
    layers, contributing = (ROOT / "pyproject.toml").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    design = (ROOT / "docs" / "design.md").read_text()
    missing = []
    for path in (*SOURCE.iterdir(), *(SOURCE / "launch").glob("*.py")):
        if path.name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
            continue
        name = path.name if path.suffix else f"{path.name}/"
        missing += [(name, "design.md")] * (f"`{name}`" not in design)
        if path.parent == SOURCE:
            known = f"`{name.removesuffix('.py')}`" in contributing
            missing += [(name, "CONTRIBUTING.md")] * (not known)
            missing += [(name, "layers")] * (not re.search(rf'zeroshard\.{path.stem}[" ]', layers))
    assert not missing


def test_files_and_functions_stay_small() -> None:
    import ast

    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        assert text.count("\n") <= 520, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno <= 75, f"{file.name}: {node.name}"
