"""The commands that DeepSpeed installs, under their names and options.

Each runs the words it is given, or without any those of this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zeroshard.console import guarded
from zeroshard.interrupts import end_at_once, raise_again

__all__ = ["deepspeed", "ds_bench", "ds_report", "ds_ssh", "zero_to_fp32"]


def _called(name: str) -> str:
    """The name that this process was called by (`ds` is `deepspeed`, `dsr` is `ds_report`); `name` where that is no
    command: a module, `python -c`, an interpreter."""
    called = Path(sys.argv[0])
    if called.suffix != ".py" and called.name not in ("", "-c"):
        name = called.name
    end_at_once(name)
    return name


def deepspeed(words: Sequence[str] | None = None, name: str = "deepspeed") -> int:
    """`deepspeed script.py`: `zeroshard run`, with that command's defaults.

    Scripts find the stand-in under the name `deepspeed`, and get `--local_rank=N` unless told otherwise.
    """
    if words is None:
        words, name = sys.argv[1:], _called(name)
    from zeroshard.launch.cli import run_under

    return run_under(name, "run", words, as_deepspeed=True, pass_local_rank=True)


def ds_ssh(words: Sequence[str] | None = None) -> int:
    """`ds_ssh [-f HOSTFILE] command...`: the command on every host of the hostfile, at once."""
    name = "ds_ssh"
    if words is None:
        words = sys.argv[1:]
        end_at_once(name)
    from zeroshard.launch.everywhere import run_everywhere

    raise_again()
    return guarded(lambda: run_everywhere(words), name)


def ds_report() -> int:
    """`zeroshard report`; the original's options have no effect."""
    name = _called("ds_report")
    from zeroshard.launch.cli import run_under

    known = {"--hide_operator_status", "--hide_errors_and_warnings"}
    return run_under(name, "report", [word for word in sys.argv[1:] if word not in known])


def ds_bench() -> int:
    """`zeroshard bench`."""
    end_at_once("ds_bench")
    from zeroshard.launch.cli import run_under

    return run_under("ds_bench", "bench", sys.argv[1:])


def zero_to_fp32() -> int:
    """`zero_to_fp32.py checkpoint out`: weights as whole tensors."""
    end_at_once("zero_to_fp32.py")
    from zeroshard.compat.files import main

    raise_again()
    return main()
