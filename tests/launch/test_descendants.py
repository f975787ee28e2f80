"""What ranks have started ends with a job that fails or is stopped, whatever it does to get away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zeroshard.launch import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="orphans find a new parent on Linux")

LIMIT_SECONDS = 60

# Deaf to everything; one shares the rank's session, one has its own, and one also has a parent that has gone.
STARTS = """
import os, pathlib, signal, subprocess, sys, time
ending, first = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not first:
    left = [path.name for path in pathlib.Path().glob("started*") if os.path.exists("/proc/" + path.read_text())]
    sys.exit(f"left: {left}" if left else 0)
code = (
    "import os, pathlib, signal, sys, time\\n"
    "for number in signal.SIGINT, signal.SIGTERM: signal.signal(number, signal.SIG_IGN)\\n"
    "pathlib.Path('new').write_text(str(os.getpid()))\\n"
    "os.rename('new', sys.argv[1])\\n"
    "time.sleep(600)\\n"
)
words = [sys.executable, "-S", "-c", code]
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
for number, start in enumerate((
    lambda words: subprocess.Popen(words, **quiet),
    lambda words: subprocess.Popen(words, start_new_session=True, **quiet),
    lambda words: subprocess.run(["sh", "-c", 'setsid "$@" &', "-", *words], **quiet),
)):
    name = f"started{number}"
    start([*words, name])
    while not os.path.exists(name):
        time.sleep(0.01)
pathlib.Path("up").touch()
if ending == "fail":
    sys.exit(4)
if ending == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
while ending != "succeed":
    time.sleep(1)
"""


def state(pid: int) -> str:
    """One letter, as in ps; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def launch(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    (tmp_path / "script.py").write_text(STARTS)
    launchers: list[subprocess.Popen[str]] = []

    def start(ending: str, *options: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "zeroshard", "run", "-q", "-n", "1", *options, "script.py", ending]
        launchers.append(
            subprocess.Popen(words, cwd=tmp_path, env=clean_environment, stderr=subprocess.PIPE, text=True)
        )
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()
    for pid in started(tmp_path):
        if state(pid):
            os.kill(pid, signal.SIGKILL)


def started(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("started?"))]


@pytest.fixture
def left(tmp_path: Path, is_running: Callable[[int], bool]) -> Callable[[], int]:
    """How many of them run."""
    return lambda: sum(map(is_running, started(tmp_path)))


@pytest.mark.parametrize(("ending", "status"), [("fail", 4), ("kill", 128 + 9), ("stop", 128 + 2)])
def test_what_a_rank_started_ends_with_a_job_that_does_not_succeed(
    launch: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    left: Callable[[], int],
    ending: str,
    status: int,
) -> None:
    launcher = launch(ending)
    end = time.monotonic() + LIMIT_SECONDS
    while ending == "stop" and not (tmp_path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    if ending == "stop":
        launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_SECONDS) == status
    assert len(started(tmp_path)) == 3
    assert left() == 0


def test_what_outlives_a_job_that_succeeds_is_left_alone(
    launch: Callable[..., subprocess.Popen[str]], left: Callable[[], int]
) -> None:
    assert launch("succeed").wait(LIMIT_SECONDS) == 0
    assert left() == 3


def test_ranks_that_start_again_find_nothing_of_the_last_time(
    launch: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    launcher = launch("fail", "--max_restarts", "1")
    assert launcher.wait(LIMIT_SECONDS) == 0, launcher.stderr and launcher.stderr.read()
    assert len(started(tmp_path)) == 3


def test_orphans_are_buried_and_ranks_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_SECONDS_BETWEEN_BURIALS", 0.05)
    with processes.heir_of_orphans():
        rank = subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True)
        end = time.monotonic() + LIMIT_SECONDS
        while state(rank.pid) != "Z":
            assert time.monotonic() < end
            time.sleep(0.01)
        words = ["sh", "-c", "(sleep 0.1) >&- & echo $!"]
        orphan = int(subprocess.run(words, capture_output=True, start_new_session=True, check=True).stdout)
        while state(orphan):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert state(rank.pid) == "Z"
        assert rank.wait() == 7
