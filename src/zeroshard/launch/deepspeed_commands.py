"""The commands that DeepSpeed installs, under their names and options."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zeroshard.console import guarded

__all__ = ["deepspeed", "ds_bench", "ds_report", "ds_ssh"]


def deepspeed(argv: Sequence[str] | None = None) -> int:
    """`deepspeed script.py`: `zeroshard run`, with that command's defaults.

    Scripts find the stand-in under the name `deepspeed`, and get `--local_rank=N` unless told otherwise.
    """
    from zeroshard.launch.command import run

    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: run(words, as_deepspeed=True, pass_local_rank=True), "deepspeed")


def ds_ssh(argv: Sequence[str] | None = None) -> int:
    """`ds_ssh [-f HOSTFILE] command...`: the command on every host of the hostfile, at once."""
    from zeroshard.launch.everywhere import run_everywhere

    return guarded(lambda: run_everywhere(sys.argv[1:] if argv is None else argv), "ds_ssh")


def ds_report() -> int:
    """`zeroshard report`; the original's options have no effect."""
    from zeroshard.launch.cli import main

    known = {"--hide_operator_status", "--hide_errors_and_warnings"}
    return main(["report", *(word for word in sys.argv[1:] if word not in known)])


def ds_bench() -> int:
    """`zeroshard bench`."""
    from zeroshard.launch.cli import main

    return main(["bench", *sys.argv[1:]])
