"""Processes that carry a job, in place of ssh: small shell scripts that listen as a host does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroshard.launch import sessions
from zeroshard.launch.failures import RECORD_PREFIX, Failure, write_record
from zeroshard.launch.messages import show_from
from zeroshard.launch.remote import Start
from zeroshard.launch.sessions import run_starts

LIMIT_SECONDS = 60

# Says what it hears, and ends when it is told to.
LISTEN = (
    'touch "$0"; while read -r word; do [ -z "$word" ] || { echo "heard $word"; exit 143; }; done; echo "end"'
)
DEAF = 'touch "$0"; while read -r word; do [ -z "$word" ] || echo "$word" >> "$0"; done; sleep 600'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_SETTLE_SECONDS", 0.5)
    show_from("info")


def shell(host: str, script: str, note: Path | None = None) -> Start:
    return Start(host, ("sh", "-c", script, str(note)), listens=True)


def run(*starts: Start, enough: int | None = None) -> int:
    return run_starts(starts, os.environ, ".", enough)


def failure_of(rank: int, exitcode: int, timestamp: float, *log: str) -> str:
    record = write_record({rank: Failure(40 + rank, exitcode, timestamp, "", log)})
    return f"echo '{record}' >&2; exit {exitcode if exitcode > 0 else 128 - exitcode}"


def test_lines_carry_their_host(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(shell("a", "printf 'one\\ntwo'; echo oh >&2"), shell("b", "printf '10%%\\r20%%\\r'")) == 0
    printed = capfd.readouterr()
    assert sorted(printed.out.replace("\r", "\n").splitlines()) == ["a: one", "a: two", "b: 10%", "b: 20%"]
    assert printed.err == "a: oh\n"


MANY_HOSTS = """
import os, resource
from zeroshard.launch.remote import Start
from zeroshard.launch.sessions import run_starts

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
starts = [Start(f"host{number}", ("true",), listens=True) for number in range(16)]
print(run_starts(starts, os.environ, "."), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_hosts_need_more_files_than_a_process_may_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MANY_HOSTS],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0 64\n", "")


def test_the_rank_that_was_killed_is_the_cause_on_whichever_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sessions, "_SETTLE_SECONDS", 1000.0)
    first = f"touch {tmp_path}/lost; " + failure_of(0, 1, 4.0, "connection lost")
    killed = f"while [ ! -e {tmp_path}/lost ]; do sleep 0.02; done; "
    killed += failure_of(3, -9, 5.0, "loading", "all is well")
    assert run(shell("a", first), shell("b", killed)) == 128 + 9
    assert capfd.readouterr().err.splitlines() == [
        "zeroshard: last lines of rank 3:",
        "  | loading",
        "  | all is well",
        "zeroshard: rank 3 (pid 43) on b was killed by SIGKILL (rank 0 ended with exit code 1 in the same moment), "
        "which is what the system does when memory runs out; the others were stopped",
    ]


def test_a_host_that_ends_without_a_word_is_the_cause(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            shell("a", "echo 'zeroshard: no such port' >&2; exit 2"),
            shell("b", "sleep 0.1;" + failure_of(1, 1, 1)),
        )
        == 2
    )
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "zeroshard: a ended with exit status 2: no such port; the others were stopped"


def test_hosts_may_go_while_enough_are_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = 'echo $$ > "$0"; exit 255'
    # A process that has ended has its number until we have seen its end.
    goes_on = (
        'while [ ! -s "$0" ]; do :; done; while kill -0 "$(cat "$0")" 2>&-; do sleep 0.02; done; sleep 0.3'
    )
    assert run(shell("a", gone, tmp_path / "pid"), shell("b", goes_on, tmp_path / "pid"), enough=1) == 0
    assert "a ended with exit status 255; going on with 1" in capfd.readouterr().err
    assert run(shell("a", "exit 255"), shell("b", failure_of(1, 5, 1.0)), enough=1) == 255
    assert run(shell("a", failure_of(0, 5, 1.0)), shell("b", LISTEN, Path("/dev/null")), enough=1) == 5
    assert capfd.readouterr().out == "b: heard SIGTERM\n"


def test_a_rank_that_is_killed_within_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """As a progress bar leaves it: what tells of the failure comes in the same line."""
    assert run(shell("a", "printf '\\r 50%%' >&2; " + failure_of(3, -9, 5.0))) == 128 + 9
    told = capfd.readouterr().err
    assert "a:  50%\n" in told
    assert "rank 3 (pid 43) on a was killed by SIGKILL" in told
    assert RECORD_PREFIX not in told


def test_a_line_that_only_looks_like_a_record_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(shell("a", f"echo '{RECORD_PREFIX}of me' >&2; echo more >&2")) == 0
    assert capfd.readouterr().err == f"a: {RECORD_PREFIX}of me\na: more\n"


def test_output_without_lines_comes_in_parts(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(shell("a", "head -c 2500000 /dev/zero | tr '\\0' x")) == 0
    parts = capfd.readouterr().out.splitlines()
    assert len(parts) == 3
    assert {part[:4] for part in parts} == {"a: x"}
    assert sum(part.count("x") for part in parts) == 2500000


def test_output_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom zeroshard.launch.remote import Start\n"
        "from zeroshard.launch.sessions import run_starts\n"
        "words = 'sh', '-c', 'yes | head -c 300000; touch done'\n"
        "sys.exit(run_starts([Start('a', words, listens=True)], os.environ, '.'))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(LIMIT_SECONDS) == 0
    finally:
        launcher.kill()
        launcher.wait()
    assert (tmp_path / "done").exists()


def test_who_reads_slowly_gets_all(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom zeroshard.launch.remote import Start\n"
        "from zeroshard.launch.sessions import run_starts\n"
        # More than one pipe takes; less than two do, of which the second has 5 bytes for each 2 of the first.
        "words = 'sh', '-c', 'yes | head -n 36000; touch done'\n"
        "sys.exit(run_starts([Start('a', words, listens=True)], os.environ, '.'))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while not (tmp_path / "done").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(1.5)
        said, _ = launcher.communicate(timeout=LIMIT_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
    assert said == b"a: y\n" * 36000
    assert launcher.returncode == 0


def test_nohup_holds() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGHUP))
    try:
        timer.start()
        assert run(shell("a", "sleep 0.8")) == 0
    finally:
        timer.join()
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def press(tmp_path: Path) -> Iterator[list[int]]:
    """Ctrl-C as soon as both notes are there, and again whenever the first has grown by a line: three times."""
    pressed: list[int] = []
    over = threading.Event()

    def heard() -> int:
        return len((tmp_path / "note0").read_text().splitlines())

    def press_keys() -> None:
        while not over.wait(0.05):
            if len(list(tmp_path.glob("note*"))) == 2 and heard() >= len(pressed) < 3:
                pressed.append(1)
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_keys)
    thread.start()
    yield pressed
    over.set()
    thread.join()


def test_ctrl_c_is_passed_on_then_sigterm_then_the_connection_ends(
    tmp_path: Path, press: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sessions, "_SECONDS_TO_STOP", 1000.0)  # only the third one ends what is deaf
    note = tmp_path / "note0"
    assert run(shell("a", DEAF, note), shell("b", LISTEN, tmp_path / "note1")) == 128 + signal.SIGINT
    assert note.read_text().split()[:2] == ["SIGINT", "SIGTERM"]
    printed = capfd.readouterr()
    assert printed.out == "b: heard SIGINT\n"
    assert printed.err.splitlines()[-1] == (
        "zeroshard: stopped by SIGINT; all ranks have ended, but a did not say so"
    )
    assert len(press) == 3


def press_when(note: Path) -> threading.Thread:
    """Ctrl-C as soon as the note is there."""

    def press_key() -> None:
        while not note.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_key)
    thread.start()
    return thread


def test_what_does_not_listen_gets_the_signal_itself(tmp_path: Path) -> None:
    note = tmp_path / "note"
    words = ("sh", "-c", f"trap 'touch {note}2; exit 3' INT; touch {note}; while :; do sleep 0.05; done")
    thread = press_when(note)
    assert run(Start("", words)) == 128 + signal.SIGINT
    thread.join()
    assert (tmp_path / "note2").exists()


def test_what_had_to_be_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sessions, "_SECONDS_TO_STOP", 0.2)
    words = ("sh", "-c", f"trap '' INT; touch {tmp_path}/note; while :; do sleep 0.05; done")
    thread = press_when(tmp_path / "note")
    assert run(Start("", words)) == 128 + signal.SIGINT
    thread.join()
    assert capfd.readouterr().err == (
        "zeroshard: stopped by SIGINT; all ranks have ended, but sh did not say so\n"
    )


# The force that ends it at last comes after seconds, which are nothing on a machine under load. It is for "stuck"
# alone: there the main thread never answers a signal, as in C that does not come back. Signals are blocked for
# that, since a main thread that is only about to enter C would still answer.
LIFELINE = """
import os, signal, sys, time
from zeroshard.launch import lifeline, processes
state, beats = sys.argv[1:]
lifeline._SILENCE_SECONDS = 2.0
processes._SECONDS_TO_LEAVE = 0.2 if state == "stuck" else 1000.0
if state != "no ranks":
    def stop(number, frame):
        print("stopped by", signal.Signals(number).name, flush=True)
        sys.exit(9)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
if state == "stuck":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
lifeline.hold_lifeline(beats=beats == "beats")
assert os.read(0, 1) == b""  # the ranks read nothing there
for _ in range(300):
    time.sleep(0.1)  # as torchrun, which looks after its ranks
"""


@pytest.mark.parametrize(
    ("state", "beats", "written", "close", "status", "told"),
    [
        ("ranks", "beats", b"SIGINT\n", False, 9, ["stopped by SIGINT"]),
        ("ranks", "beats", b"\n\nSIGTERM\n", False, 9, ["stopped by SIGTERM"]),
        ("ranks", "beats", b"\n", False, 9, ["stopped by SIGTERM"]),  # silence
        (
            "ranks",
            "no beats",
            b"SIGINT\n",
            True,
            9,
            ["stopped by SIGTERM"],
        ),  # pdsh writes nothing; only its end counts
        ("no ranks", "no beats", b"", True, 143, []),
        ("stuck", "beats", b"SIGTERM\n", False, 143, []),
        ("no ranks", "beats", b"SIGINT\n", False, 130, []),
    ],
)
def test_a_lifeline(
    state: str, beats: str, written: bytes, close: bool, status: int, told: list[str]
) -> None:
    words = [sys.executable, "-c", LIFELINE, state, beats]
    held = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert held.stdin is not None
    assert held.stdout is not None
    try:
        held.stdin.write(written)
        held.stdin.flush()
        if close:
            held.stdin.close()
        printed = held.stdout.read().decode().splitlines()  # until it has ended
        assert held.wait(LIMIT_SECONDS) == status
    finally:
        held.kill()
        held.wait()
    assert printed == told
