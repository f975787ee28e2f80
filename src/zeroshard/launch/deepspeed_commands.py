"""The commands that DeepSpeed installs, under their names and options."""

from __future__ import annotations

import sys

__all__ = ["deepspeed", "ds_bench", "ds_report", "ds_ssh"]


def deepspeed() -> int:
    """`deepspeed script.py`: `zeroshard run --as-deepspeed` with the original's defaults."""
    from zeroshard.launch.cli import deepspeed_command

    return deepspeed_command()


def ds_ssh() -> int:
    """`ds_ssh -f hostfile command`: the command on all hosts."""
    from zeroshard.launch.cli import ds_ssh as command

    return command()


def ds_report() -> int:
    """`zeroshard report`; the original's options have no effect."""
    from zeroshard.launch.cli import main

    known = {"--hide_operator_status", "--hide_errors_and_warnings"}
    return main(["report", *(word for word in sys.argv[1:] if word not in known)])


def ds_bench() -> int:
    """`zeroshard bench`."""
    from zeroshard.launch.cli import main

    return main(["bench", *sys.argv[1:]])
