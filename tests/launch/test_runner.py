"""`zeroshard run` with real ranks of tiny scripts that need neither torch nor the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from zeroshard.launch import child, runner
from zeroshard.launch.failures import (
    RECORD_PREFIX,
    Failure,
    describe_failure,
    exit_status,
    read_record,
    write_record,
)

LIMIT_SECONDS = 60

Launch = Callable[..., "subprocess.CompletedProcess[str]"]  # the fixture `zeroshard`

REPORT = """
import json, os, pathlib, sys
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"
seen = {name: os.environ.get(name) for name in names} | {"args": sys.argv[1:]}
pathlib.Path("rank" + os.environ["RANK"]).write_text(json.dumps(seen))
"""

# Rank 1 ends as told once all ranks are up; the others would sleep on.
RANK_1_ENDS = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
pathlib.Path("pid" + rank).write_text(str(os.getpid()))
while len(list(pathlib.Path().glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if rank == "1":
    {ending}
while True:
    time.sleep(1)
"""


def write(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def reports(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank?"))]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"not within {LIMIT_SECONDS} s: {what}"
        time.sleep(0.02)


def rank_pids(folder: Path) -> list[int]:
    texts = (path.read_text() for path in sorted(folder.glob("pid?")))
    return [int(text) for text in texts if text]  # a file may be there before its text is


def test_ranks_get_their_place_and_the_script_its_words(zeroshard: Launch, tmp_path: Path) -> None:
    words = ["--nproc", "7", "-m", "--", "--help", "plain word"]
    result = zeroshard("run", "--nproc", "2", write(tmp_path, REPORT), *words)
    assert result.returncode == 0, result.stderr
    ranks = reports(tmp_path)
    assert [(seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) for seen in ranks] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert all(seen["args"] == words for seen in ranks)
    assert all(seen["MASTER_ADDR"] == "127.0.0.1" for seen in ranks)
    threads = ranks[0]["OMP_NUM_THREADS"]
    assert threads is not None
    assert f"OMP_NUM_THREADS={threads} for each of 2 ranks" in result.stderr


def test_module_default_size_and_the_users_threads(zeroshard: Launch, tmp_path: Path) -> None:
    write(tmp_path, REPORT)
    result = zeroshard("run", "--module", "script", "--x", OMP_NUM_THREADS="3", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    ranks = reports(tmp_path)
    assert {seen["OMP_NUM_THREADS"] for seen in ranks} == {"3"}
    assert "OMP_NUM_THREADS" not in result.stderr
    if "no accelerator found" in result.stderr:
        assert len(ranks) == 2
    assert ranks[0]["args"] == ["--x"]


@pytest.mark.parametrize(
    ("ending", "status", "told"),
    [
        ("sys.exit(3)", 3, "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies_stops_the_others(
    zeroshard: Launch,
    tmp_path: Path,
    is_running: Callable[[int], bool],
    ending: str,
    status: int,
    told: str,
) -> None:
    result = zeroshard("run", "--nproc", "3", write(tmp_path, RANK_1_ENDS.format(ending=ending)))
    assert result.returncode == status
    pids = rank_pids(tmp_path)
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"zeroshard: rank 1 (pid {pids[1]}) {told}")
    assert last.endswith("; the others were stopped")
    assert "Traceback" not in result.stderr
    assert not any(is_running(pid) for pid in pids)


# Deaf to Ctrl-C and to SIGTERM, of which it leaves a note.
STUBBORN = """signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("told to end").touch())
    pathlib.Path("deaf").touch()"""


def stop_once(launcher: subprocess.Popen[str], folder: Path, is_running: Callable[[int], bool]) -> None:
    launcher.send_signal(signal.SIGINT)


def stop_until_it_gives_up(
    launcher: subprocess.Popen[str], folder: Path, is_running: Callable[[int], bool]
) -> None:
    wait_until((folder / "deaf").exists, "rank 1 is deaf")
    launcher.send_signal(signal.SIGINT)
    wait_until(lambda: not is_running(rank_pids(folder)[0]), "rank 0 has stopped")
    launcher.send_signal(signal.SIGINT)
    wait_until((folder / "told to end").exists, "rank 1 was told to end")
    launcher.send_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="what is left is found in /proc")
@pytest.mark.parametrize(
    ("ending", "stop"),
    [("pass", stop_once), (STUBBORN, stop_until_it_gives_up)],
    ids=["one press", "three presses and a deaf rank"],
)
def test_ctrl_c_leaves_no_process(
    tmp_path: Path,
    clean_environment: dict[str, str],
    is_running: Callable[[int], bool],
    ending: str,
    stop: Callable[[subprocess.Popen[str], Path, Callable[[int], bool]], None],
) -> None:
    script = write(tmp_path, RANK_1_ENDS.format(ending=ending))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", script],
        cwd=tmp_path,
        env=clean_environment | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"},  # only a third press kills
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(rank_pids(tmp_path)) == 2, "two ranks are up")
        pids = rank_pids(tmp_path)
        stop(launcher, tmp_path, is_running)
        _, told = launcher.communicate(timeout=LIMIT_SECONDS)
        assert launcher.returncode == 128 + signal.SIGINT
        assert told.splitlines()[-1] == "zeroshard: stopped by SIGINT; all ranks have ended"
        wait_until(lambda: not any(is_running(pid) for pid in pids), "all ranks have ended")
    finally:
        launcher.kill()
        launcher.wait()
        for pid in rank_pids(tmp_path):
            if is_running(pid):  # the test has failed: leave nothing either
                os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="a parent that has ended is noticed on Linux")
def test_a_rank_whose_agent_has_gone_before_it_started_ends() -> None:
    words = [*child.start_through_child("SIGTERM"), "sh", "-c", "exit 5"]
    assert subprocess.run(words, timeout=LIMIT_SECONDS, check=False).returncode == 5
    words[words.index(str(os.getpid()))] = "1"
    assert subprocess.run(words, timeout=LIMIT_SECONDS, check=False).returncode == -signal.SIGTERM


def test_a_program_hears_when_nobody_reads_it_any_more() -> None:
    """Python ignores SIGPIPE, and what it starts would."""
    words = [*child.start_through_child("SIGTERM"), "sh", "-c", "yes | head -n 1"]
    done = subprocess.run(words, capture_output=True, timeout=LIMIT_SECONDS, check=True)
    assert (done.stdout, done.stderr) == (b"y\n", b"")


def test_a_program_that_cannot_start_is_one_line(zeroshard: Launch, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("echo no line that says what runs it\n")
    (tmp_path / "plain").chmod(0o755)
    done = zeroshard("run", "-n", "1", "--no_python", "./plain")
    assert done.returncode == 126
    assert done.stderr.splitlines()[0] == "zeroshard: cannot start './plain': Exec format error"
    assert "Traceback" not in done.stderr


def test_nohup_holds(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    """torchrun, which does the work, answers SIGHUP even where it is ignored. Ranks find it as nohup has it."""
    script = write(
        tmp_path,
        "import pathlib, signal, time\nassert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\npathlib.Path('up').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.02)\n",
    )
    words = [sys.executable, "-m", "zeroshard", "run", "-n", "1", script]
    launcher = subprocess.Popen(
        ["sh", "-c", 'trap "" HUP; exec "$@"', "-", *words], cwd=tmp_path, env=clean_environment
    )
    try:
        wait_until((tmp_path / "up").exists, "the rank is up")
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.5)  # the agent looks ten times a second
        (tmp_path / "go").touch()
        assert launcher.wait(LIMIT_SECONDS) == 0
    finally:
        launcher.kill()
        launcher.wait()


def test_the_exit_status_is_the_ranks_though_nobody_reads(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    script = write(tmp_path, "import sys; sys.exit(7)")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "zeroshard", "run", "-n", "2", script],
        cwd=tmp_path,
        env=clean_environment,
        stderr=subprocess.PIPE,
    )
    assert launcher.stderr is not None
    launcher.stderr.close()
    assert launcher.wait(LIMIT_SECONDS) == 7


def test_until_ranks_start_ctrl_c_ends_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt would come out of torch's threads as some other error."""
    found: list[object] = []

    def launch(config: object, python: str) -> Callable[..., None]:
        found.append(signal.getsignal(signal.SIGINT))
        return lambda *words: None

    monkeypatch.setattr(runner, "elastic_launch", launch)
    before = signal.getsignal(signal.SIGINT)
    assert runner.run_node(runner.Node(("true",), 1)) == 0
    assert found == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == before


def failure(exitcode: int, timestamp: int = 0) -> SimpleNamespace:
    return SimpleNamespace(pid=100 + timestamp, exitcode=exitcode, timestamp=timestamp, host="")


def test_the_killed_rank_is_the_cause_not_the_peer_that_lost_it() -> None:
    failures = {0: failure(1, timestamp=5), 1: failure(-9, timestamp=6), 2: failure(-15, timestamp=4)}
    assert exit_status(failures) == 128 + 9
    assert describe_failure(failures, 3) == (
        "rank 1 (pid 106) was killed by SIGKILL (rank 0 ended with exit code 1 in the same moment), "
        "which is what the system does when memory runs out; the others were stopped"
    )


def test_the_first_failure_is_the_cause() -> None:
    failures = {0: failure(2, timestamp=5), 1: failure(3, timestamp=4)}
    assert exit_status(failures) == 3
    assert describe_failure(failures, 2) == (
        "rank 1 (pid 104) ended with exit code 3 (rank 0 ended with exit code 2 in the same moment)"
    )


def test_a_record_has_the_words_of_the_cause_alone() -> None:
    failures = {0: Failure(1, 1, 5.0, log=("lost it",)), 1: Failure(2, -9, 6.0, log=("so it is",))}
    read = read_record(write_record(failures).removeprefix(RECORD_PREFIX), "b")
    assert read == {0: Failure(1, 1, 5.0, "b"), 1: Failure(2, -9, 6.0, "b", ("so it is",))}
