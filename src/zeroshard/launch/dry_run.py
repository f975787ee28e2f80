"""`--dry_run`: what would run where, as commands for a shell."""

from __future__ import annotations

import os
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
        print(f"{command.host}{' (this machine)' if command.here else ''}, in {job.directory}:")
        _show(job.environment, command.words)
    print("started here with:")
    for start in starts:
        _show(start.environment, start.words)


def show_node(node: Node) -> None:
    """Print what each rank of this machine would be."""
    from zeroshard.launch.runner import added_environment

    added = added_environment(node, os.environ)
    where = f"{node.place.address or '127.0.0.1'}, port {node.place.port or 'free to choose'}"
    print(f"{node.ranks} ranks on this machine, which meet at {where}:")
    for rank in range(node.ranks):
        place = {"LOCAL_RANK": str(rank)}
        if node.place.alone:
            place |= {"RANK": str(rank), "WORLD_SIZE": str(node.ranks)}
        words = [word.replace("${local_rank}", str(rank)).replace("$$", "$") for word in node.command]
        _show(added | place, words)


def _show(environment: Mapping[str, str], words: Sequence[str]) -> None:
    """One command, with its variables in front of it."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    print("  " + " \\\n  ".join([*variables, shlex.join(words)]))
