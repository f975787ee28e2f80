"""The commands that DeepSpeed installs, under their names and options."""

from __future__ import annotations

import sys
from pathlib import Path

from zeroshard.interrupts import end_at_once, raise_again

__all__ = ["deepspeed", "ds_bench", "ds_report", "ds_ssh", "zero_to_fp32"]


def _called() -> str:
    """The name of this command: `deepspeed` is also `ds`, and `ds_report` also `dsr`."""
    name = Path(sys.argv[0]).name
    end_at_once(name)
    return name


def deepspeed() -> int:
    """`deepspeed script.py`: `zeroshard run --as-deepspeed` with the original's defaults."""
    name = _called()
    from zeroshard.launch.cli import deepspeed_command

    return deepspeed_command(name=name)


def ds_ssh() -> int:
    """`ds_ssh -f hostfile command`: the command on all hosts."""
    _called()
    from zeroshard.launch.cli import ds_ssh as command

    return command()


def ds_report() -> int:
    """`zeroshard report`; the original's options have no effect."""
    name = _called()
    from zeroshard.launch.cli import run_under

    known = {"--hide_operator_status", "--hide_errors_and_warnings"}
    return run_under(name, "report", [word for word in sys.argv[1:] if word not in known])


def ds_bench() -> int:
    """`zeroshard bench`."""
    name = _called()
    from zeroshard.launch.cli import run_under

    return run_under(name, "bench")


def zero_to_fp32() -> int:
    """`zero_to_fp32.py checkpoint out`: weights as whole tensors."""
    _called()
    from zeroshard.compat.files import main

    raise_again()
    return main()
