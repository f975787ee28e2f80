"""`ds_ssh`: one command on every host of a hostfile, at once."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from zeroshard.errors import LaunchError
from zeroshard.launch.hosts import read_hostfile
from zeroshard.launch.messages import show_from
from zeroshard.launch.options import DEFAULT_HOSTFILE, OneLine
from zeroshard.launch.remote import Job, Start, require_program, ssh_words
from zeroshard.launch.sessions import run_starts

__all__ = ["run_everywhere"]


def run_everywhere(words: Sequence[str]) -> int:
    """Run a shell command on all hosts; returns the exit status of one that failed, or 0."""
    parser = OneLine(prog="ds_ssh", description="Run a command on every host, over ssh.", allow_abbrev=False)
    parser.add_argument(
        "-f",
        "--hostfile",
        default=DEFAULT_HOSTFILE,
        metavar="FILE",
        help="lines 'host slots=N' (default: %(default)s)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run there, by a shell")
    given = parser.parse_args(list(words))
    show_from("info", "ds_ssh")
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        raise LaunchError("give a command to run on every host; `ds_ssh --help` has the options")
    file = Path(given.hostfile)
    if not file.exists():
        raise LaunchError(f"there is no hostfile {given.hostfile!r}; name one with -f")
    hosts = read_hostfile(file, "-f")
    require_program("ssh")
    line = command[0] if len(command) == 1 else shlex.join(command)
    job = Job((), os.getcwd(), {})
    starts = [Start(host, (*ssh_words(job, host), line)) for host in hosts]
    return run_starts(starts, os.environ, job.directory, enough=0)
