"""What is wrong with hosts, from what they answered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from zeroshard.launch.preflight import find_problems
from zeroshard.launch.probe import PROBE_PREFIX, Answer, Question, read_answer

LIMIT_SECONDS = 60
GOOD = Answer("3.11", "2.13.0", "0.1.0", 2, lacks_script=False, port_taken=False, knows_master=True)
QUESTION = Question("train.py", None, "a", 29500, serves=False)
HOSTS = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}


def problems(**changed: Answer | str) -> dict[str, str]:
    return find_problems({host: changed.get(host, GOOD) for host in HOSTS}, HOSTS, QUESTION)


def test_hosts_that_are_alike() -> None:
    assert problems() == {}
    cpu = replace(GOOD, accelerators=0)
    assert problems(a=cpu, b=cpu, c=cpu) == {}  # there a slot is a number


def test_each_host_and_its_problem_are_named() -> None:
    assert problems(b="cannot be reached over ssh (timed out)") == {
        "b": "cannot be reached over ssh (timed out)"
    }
    assert problems(c=replace(GOOD, torch="2.9.1")) == {"c": "torch 2.9.1, the others have 2.13.0"}
    assert problems(a=replace(GOOD, zeroshard="0.0.9", python="3.10")) == {
        "a": "python 3.10, the others have 3.11; zeroshard 0.0.9, the others have 0.1.0"
    }
    fewer = "has 1 accelerators, and 2 ranks up to slot 1 were asked for"
    assert problems(b=replace(GOOD, accelerators=1)) == {"b": fewer}
    assert "has 0 accelerators" in problems(b=replace(GOOD, accelerators=0))["b"]
    assert problems(b=replace(GOOD, lacks_script=True)) == {"b": "there is no train.py"}
    assert problems(a=replace(GOOD, port_taken=True))["a"].startswith("port 29500 is in use")
    assert problems(c=replace(GOOD, knows_master=False))["c"].startswith("cannot resolve 'a'")


def test_an_answer_is_found_among_what_a_shell_prints() -> None:
    assert read_answer("Welcome!\n") is None
    line = PROBE_PREFIX + (
        '{"python": "3.11", "torch": "2.13.0", "zeroshard": "0.1.0", "accelerators": 2, "lacks_script": false, '
        '"port_taken": false, "knows_master": true}'
    )
    assert read_answer(f"Welcome!\n{line}\nbye\n") == GOOD
    assert read_answer(f"no end of line{line}\n") == GOOD


@pytest.mark.skipif(sys.platform != "linux", reason="a parent that has ended is noticed on Linux")
def test_no_question_outlives_who_asks(tmp_path: Path, is_running: Callable[[int], bool]) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho $$ > started && mv started pid && exec sleep 600\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("192.0.2.1 slots=1\n")
    (tmp_path / "script.py").touch()
    launcher = subprocess.Popen(
        [sys.executable, "-m", "zeroshard", "run", "--launcher", "ssh", "-H", "hosts", "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + LIMIT_SECONDS
    try:
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        pid = int((tmp_path / "pid").read_text())
        launcher.terminate()
        assert launcher.wait(LIMIT_SECONDS) == -signal.SIGTERM
        while is_running(pid):
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        launcher.kill()
        launcher.communicate()
