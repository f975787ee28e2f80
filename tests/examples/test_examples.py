"""The examples, run as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)", output, flags=re.MULTILINE)]


def test_the_readme_shows_the_script_that_is_run() -> None:
    shown = re.search(
        r"## Your own model\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert shown is not None
    script = (ROOT / "examples/plain_loop.py").read_text()
    assert script.partition('"""\n\n')[2] == shown[1]


@pytest.mark.parametrize(
    "launcher", [[], ["-m", "zeroshard", "run", "--nproc", "2"]], ids=["alone", "2-ranks"]
)
def test_plain_loop_learns(launcher: list[str], tmp_path: Path) -> None:
    result = run(tmp_path, *launcher, str(ROOT / "examples/plain_loop.py"))
    assert result.returncode == 0, result.stderr
    seen = losses(result.stdout)
    assert len(seen) == 6  # of rank 0 only
    assert seen[-1] < 0.7 * seen[0]


def test_demo_trains_saves_and_reopens_the_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--model", "tiny", "--steps", "8", "--batch", "2", "--seq", "64", "--out", "made"]
    command = ["-m", "zeroshard", "run", "--nproc", "2", str(ROOT / "examples/finetune.py"), *words]
    result = run(tmp_path, *command)
    assert result.returncode == 0, result.stderr
    seen = losses(result.stdout)
    assert seen[-1] < seen[0]
    for shown in ("before: ", "after: ", "memory bill", "predicted", "the model is in made"):
        assert shown in result.stdout
    assert {path.name for path in (tmp_path / "made").iterdir()} >= {"config.json", "model.safetensors"}

    alone = [str(ROOT / "examples/finetune.py"), *words, "--steps", "1"]
    again = run(tmp_path, *alone)  # without a launcher, which is also a way to run it
    assert again.returncode == 0, again.stderr
    assert "replacing the model of an earlier run in made" in again.stdout


def test_demo_does_not_touch_a_directory_it_did_not_write(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter1.tex").touch()
    result = run(tmp_path, str(ROOT / "examples/finetune.py"), "--model", "tiny", "--out", "thesis")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("finetune.py: --out thesis holds files")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]
