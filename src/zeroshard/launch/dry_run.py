"""`--dry_run`: what would run where, as lines that a shell takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zeroshard.launch.remote import Job, Start

if TYPE_CHECKING:
    from zeroshard.launch.runner import Node

__all__ = ["show_job", "show_node"]


def show_job(job: Job, starts: Sequence[Start]) -> None:
    """Print each host's environment and command, and the commands that bring them there."""
    for command in job.commands:
        print(f"{command.host}{' (this machine)' if command.here else ''}:")
        _show(job.environment, command.words)
    print("started here with:")
    for start in starts:
        _show(start.environment if not start.host or start.words[0] == "ssh" else {}, start.words)


def show_node(node: Node) -> None:
    """Print what each rank of this machine would be."""
    print(f"{node.ranks} ranks on this machine:")
    for rank in range(node.ranks):
        cores = {"OMP_NUM_THREADS": str(len(node.cores[rank]))} if node.cores else {}
        words = [word.replace("${local_rank}", str(rank)).replace("$$", "$") for word in node.command]
        _show({**node.environment, **cores, "LOCAL_RANK": str(rank)}, words)


def _show(environment: Mapping[str, str], words: Sequence[str]) -> None:
    for name, value in environment.items():
        print(f"  {name}={shlex.quote(value)}")
    print(f"  {shlex.join(words)}")
