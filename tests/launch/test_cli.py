"""The command line without ranks: help, version, and one line for every mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard
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


def test_a_mistake_with_ds_ssh_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert deepspeed_commands.ds_ssh(["--"]) == 2
    assert capsys.readouterr().err == "ds_ssh: give a command to run on every host\n"
    assert deepspeed_commands.ds_ssh(["-f", "absent", "--", "ls", "--h"]) == 2
    assert capsys.readouterr().err == "ds_ssh: there is no hostfile 'absent'; name one with -f\n"
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    assert deepspeed_commands.ds_ssh(["-f", str(tmp_path / "hosts"), "ls"]) == 2
    assert capsys.readouterr().err.startswith(f"ds_ssh: --hostfile {tmp_path / 'hosts'} cannot be read: ")


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
