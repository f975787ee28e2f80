"""`ds_ssh`: one command on every host of a hostfile, at once."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import parse_hostfile
from zeroshard.launch.messages import show_from
from zeroshard.launch.options import DEFAULT_HOSTFILE
from zeroshard.launch.remote import Job, Start, require_program, ssh_words
from zeroshard.launch.sessions import run_starts

__all__ = ["run_everywhere"]


def run_everywhere(words: Sequence[str]) -> int:
    """Run a shell command on all hosts; returns the exit status of one that failed, or 0."""
    parser = argparse.ArgumentParser(
        prog="ds_ssh", description="Run a command on every host, over ssh.", allow_abbrev=False
    )
    parser.add_argument(
        "-f", "--hostfile", default=DEFAULT_HOSTFILE, metavar="FILE", help="lines 'host slots=N'"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for the shell there")
    given = parser.parse_args(list(words))
    show_from("info")
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise LaunchError("give a command to run on every host")
    file = Path(given.hostfile)
    if not file.is_file():
        raise LaunchError(f"there is no hostfile {given.hostfile!r}; name one with -f")
    hosts = parse_hostfile(file.read_text(encoding="utf-8-sig"), str(file))
    require_program("ssh")
    line = command[0] if len(command) == 1 else shlex.join(command)
    job = Job((), os.getcwd(), {})
    starts = [Start(host, (*ssh_words(job, host), line)) for host in hosts]
    return run_starts(starts, os.environ, job.directory, enough=0)
