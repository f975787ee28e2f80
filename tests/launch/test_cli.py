"""The command line without ranks: help, version, and one line for every mistake."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard
from zeroshard import interrupts
from zeroshard.console import command_line, guarded
from zeroshard.launch import cli, deepspeed_commands


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeroshard {zeroshard.__version__}\n"


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words or ["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("run", "config", *cli.ELSEWHERE):
        assert f"\n  {command} " in shown


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["run", "missing.py"]])
def test_starts_without_torch(words: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "zeroshard", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert not {"torch", "numpy"} & imported


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run"], "script"),
        (["run", "missing.py"], "'missing.py'"),
        (["run", "--nproc", "0", __file__], "'0' is not a whole number of at least 1"),
        (["run", "--nproc", "-2", __file__], "'-2' is not a whole number of at least 1"),
        (["run", "--nproc", "two", __file__], "'two' is not a whole number of at least 1"),
        (["run", "--nodes", "2", __file__], "--nodes"),
        (["rum", __file__], "'rum'"),
        (["config"], "--keys"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("zeroshard: ")
    assert printed.err.count("\n") == 1
    assert told in printed.err


def test_a_mistake_with_ds_ssh_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert deepspeed_commands.ds_ssh(["--"]) == 2
    assert (
        capsys.readouterr().err
        == "ds_ssh: give a command to run on every host; `ds_ssh --help` has the options\n"
    )
    assert deepspeed_commands.ds_ssh(["-f", "absent", "--", "ls", "--h"]) == 2
    assert capsys.readouterr().err == "ds_ssh: there is no hostfile 'absent'; name one with -f\n"
    assert deepspeed_commands.ds_ssh(["-f", str(Path(__file__).parent), "ls"]) == 2
    assert capsys.readouterr().err.endswith(" cannot be read: Is a directory\n")
    assert deepspeed_commands.ds_ssh(["--hostfiel", "hosts", "ls"]) == 2
    assert capsys.readouterr().err == "ds_ssh: there is no option --hostfiel; did you mean --hostfile?\n"


def test_help_and_mistakes_have_the_name_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert deepspeed_commands.deepspeed(["--help"], "ds") == 0
    assert capsys.readouterr().out.startswith("usage: ds [options] script")
    assert deepspeed_commands.deepspeed(["--num_gpu_", "2", "train.py"], "ds") == 2
    assert capsys.readouterr().err == "ds: there is no option --num_gpu_; did you mean --num_gpus?\n"
    assert cli.run_under("dsr", "report", ["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: dsr [OPTIONS]")


def test_an_error_of_the_file_system_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        Path("absent").read_text()
        return 0

    assert guarded(command, "zeroshard") == 1
    assert capsys.readouterr().err == "zeroshard: absent: No such file or directory\n"


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signals of POSIX")
def test_ctrl_c_among_imports_is_one_line_and_status_130(tmp_path: Path) -> None:
    """Also where the code that is being imported passes over every exception, as torch's does."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(zeroshard.__file__).parents[1])])
    result = subprocess.run(
        [sys.executable, "-m", "zeroshard", "report"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (130, "zeroshard: stopped by SIGINT\n")


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signals of POSIX")
def test_ctrl_c_among_imports_ends_without_stderr() -> None:
    code = (
        "import os, signal; from zeroshard.interrupts import end_at_once; end_at_once('zeroshard'); os.close(2); "
        "os.kill(os.getpid(), signal.SIGINT)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 130


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("/usr/bin/deepspeed.pt", "deepspeed.pt"),
        ("/usr/bin/ds", "ds"),
        ("deepspeed/launcher/runner.py", "deepspeed"),
        ("-c", "deepspeed"),
        ("", "deepspeed"),
    ],
)
def test_messages_have_the_name_that_was_typed(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    monkeypatch.setattr(deepspeed_commands, "end_at_once", lambda name: None)
    assert deepspeed_commands.deepspeed() == 2
    assert capsys.readouterr().err == f"{name}: give a script to run; `{name} --help` has the options\n"


def test_ctrl_c_in_a_command_is_one_line_and_status_130(capsys: pytest.CaptureFixture[str]) -> None:
    def command(seconds: int = 1) -> None:
        with interrupts.held(), contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    assert guarded(lambda: command_line(command, "zeroshard check")([]), "zeroshard") == 130
    assert capsys.readouterr().err == "zeroshard: stopped by SIGINT\n"


def test_commands_elsewhere_get_their_words_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[str]] = []

    class Wing:
        @staticmethod
        def main(arguments: list[str]) -> int:
            received.append(arguments)
            return 7

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Wing)
    assert cli.main(["check", "--help", "--steps", "3", "tiny"]) == 7
    assert received == [["--help", "--steps", "3", "tiny"]]
