"""What of the environment goes to other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.forwarding import forwarded_environment, read_environment_file


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def test_prefixes_and_the_path_of_python(home: Path, here: Path) -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "UCX_TLS": "tcp",
        "MV2_X": "1",
        "MLFLOW_URI": "u",
        "ZEROSHARD_DEBUG": "collectives",
        "PYTHONPATH": "/a:/b",
        "CUDA_VISIBLE_DEVICES": "4,5",  # each host has its own
        "HOME": "/root",
    }
    sent = forwarded_environment(environ, home, here)
    kept = {k: v for k, v in environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "HOME")}
    assert sent == kept | {"PYTHONPATH": f"{here}:/a:/b"}
    assert forwarded_environment({}, home, here) == {"PYTHONPATH": str(here)}
    assert forwarded_environment({"PYTHONPATH": ""}, home, here) == {"PYTHONPATH": str(here)}


def test_the_file_here_wins_over_the_one_at_home_and_both_over_the_environment(
    home: Path, here: Path
) -> None:
    (home / ".deepspeed_env").write_text("A=home\nB=home\nNCCL_DEBUG=WARN\n")
    (here / ".deepspeed_env").write_text('# mine\n\nB=it\'s here\nexport C="a b"\nD=x=y\nPYTHONPATH=/more\n')
    sent = forwarded_environment({"NCCL_DEBUG": "INFO"}, home, here)
    assert sent == {
        "A": "home",
        "B": "it's here",
        "C": "a b",
        "D": "x=y",
        "NCCL_DEBUG": "WARN",
        "PYTHONPATH": f"{here}:/more",
    }


def test_the_file_may_have_another_name(home: Path, here: Path) -> None:
    (here / ".deepspeed_env").write_text("A=default\n")
    (here / "mine").write_text("A=mine\n")
    assert forwarded_environment({"DS_ENV_FILE": "mine"}, home, here)["A"] == "mine"
    (home / "whole").write_text("A=whole\n")
    assert forwarded_environment({"DS_ENV_FILE": str(home / "whole")}, home, here)["A"] == "whole"


def test_names_that_no_shell_would_make(here: Path) -> None:
    """accelerate writes its whole environment into the file."""
    (here / "e").write_text("a.b-c=1\nBASH_FUNC_x%%=2\nProgramFiles(x86)=3\n")
    assert read_environment_file(here / "e") == {"a.b-c": "1", "BASH_FUNC_x%%": "2", "ProgramFiles(x86)": "3"}


def test_a_file_that_is_no_text_is_named(here: Path) -> None:
    (here / "e").write_bytes(b"A=\xff\n")
    with pytest.raises(LaunchError, match="e cannot be read"):
        read_environment_file(here / "e")


@pytest.mark.parametrize("line", ["A", "=x", "two words=x", "1A=x"])
def test_a_bad_line_is_named(here: Path, line: str) -> None:
    (here / "e").write_text(f"B=1\n{line}\n")
    with pytest.raises(LaunchError, match=r"e, line 2: '.*' is not of the form NAME=VALUE"):
        read_environment_file(here / "e")
