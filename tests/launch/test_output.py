"""What several ranks print at the same time stays readable."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest

LIMIT_SECONDS = 60

# Each `print` of several words is several writes where Python does not buffer.
LINES = """
import os, pathlib, sys
rank = os.environ["RANK"]
pathlib.Path("up" + rank).touch()
while len(list(pathlib.Path().glob("up*"))) < int(os.environ["WORLD_SIZE"]):
    pass
for number in range(200):
    print(rank, number, *"abcdefgh")
    print(rank, number, *"abcdefgh", file=sys.stderr)
"""

WITHOUT_END = """
import sys
print("a question? ", end="")
while True:
    pass
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """`zeroshard run` of `script.py` in an empty directory on 3 ranks."""
    (tmp_path / "script.py").write_text(LINES)
    return [sys.executable, "-m", "zeroshard", "run", "--quiet", "-n", "3", "script.py"]


EXPECTED = sorted(f"{rank} {number} a b c d e f g h" for rank in range(3) for number in range(200))


def test_lines_of_ranks_stay_whole(
    command: list[str], tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == EXPECTED
    assert sorted(done.stderr.splitlines()) == EXPECTED


def test_ranks_need_more_files_than_a_process_may_open(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    """8 ranks where 64 files may be open: where the limit may be raised it is, else there is one line."""
    run = [sys.executable, "-m", "zeroshard", "run", "--quiet", "-n", "8", "--no_python", "echo", "here"]
    script = f"ulimit -{{}} 64; exec {shlex.join(run)}"
    done = [
        subprocess.run(
            ["bash", "-c", script.format(kind)],
            cwd=tmp_path,
            env=clean_environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )
        for kind in ("Sn", "n")
    ]
    assert [(result.returncode, result.stdout) for result in done] == [(0, "here\n" * 8), (2, "")]
    assert done[0].stderr == ""
    assert done[1].stderr.startswith("zeroshard: 8 ranks need about 144 open files, and 64 are allowed here")
    assert len(done[1].stderr.splitlines()) == 1


def test_lines_of_ranks_stay_whole_at_a_terminal(
    command: list[str], tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    clean_environment.pop("PYTHONUNBUFFERED", None)  # who sets it wants pieces
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment, stdout=terminal, stderr=subprocess.DEVNULL
    ) as launcher:
        os.close(terminal)
        watchdog = threading.Timer(LIMIT_SECONDS, launcher.kill)
        watchdog.start()
        seen = b""
        try:
            while data := os.read(ours, 65536):
                seen += data
        except OSError:  # the last who had the terminal has gone
            pass
        finally:
            watchdog.cancel()
            os.close(ours)
    assert launcher.returncode == 0
    assert sorted(seen.decode().splitlines()) == EXPECTED


def test_a_line_without_an_end_is_shown(
    command: list[str], tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(WITHOUT_END)
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        watchdog = threading.Timer(LIMIT_SECONDS, launcher.kill)
        watchdog.start()
        assert launcher.stdout is not None
        shown = launcher.stdout.read(len("a question? "))
        launcher.terminate()
        watchdog.cancel()
    assert shown == b"a question? "
