"""N ranks of one script on this machine, over torch's elastic agent.

torchrun does the work (`torch.distributed.launcher`). What is added here: a rendezvous that stays on the
loopback interface, a fair share of the cores per rank, one paragraph instead of a page when a rank dies, and
a Ctrl-C that leaves no process behind, however often it is pressed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = ["describe_failure", "exit_status", "run_ranks"]

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.1
_SECONDS_TO_STOP = "15"  # from the signal to stop until SIGKILL


class Failure(Protocol):
    """What is read of torch's `ProcessFailure`; `exitcode` is minus the signal, as in `subprocess`."""

    pid: int
    exitcode: int
    timestamp: int


def run_ranks(command: list[str], nproc: int | None) -> int:
    """Run `python command...` on `nproc` ranks and return the exit status for the shell.

    0 when all ranks succeed; the exit code of the rank that failed first; 128 + signal when a rank was
    killed, or when this process was told to stop (Ctrl-C gives 130).
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    nproc = _default_nproc() if nproc is None else nproc
    _set_environment(nproc)
    _quiet_torchrun()
    try:
        _run_to_the_end(nproc, command)
    except ChildFailedError as error:
        _say(describe_failure(error.failures, nproc))
        return exit_status(error.failures)
    except (SignalException, KeyboardInterrupt) as stop:
        received = getattr(stop, "sigval", signal.SIGINT)
        _say(f"stopped by {received.name}; all ranks have ended")
        return 128 + received
    return 0


def _run_to_the_end(nproc: int, command: list[str]) -> None:
    """Return or raise only when no rank is left.

    torchrun answers a Ctrl-C by passing it on and waiting, and a second one by SIGTERM and waiting; a third
    one ends that wait too, and a rank that listens to neither would go on alone.
    """
    from torch.distributed.launcher.api import elastic_launch

    already_there = _child_processes()
    try:
        elastic_launch(_launch_config(nproc), sys.executable)("-u", *command)
    finally:
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for pid in _child_processes() - already_there:
            _kill_session(pid)
        signal.signal(signal.SIGINT, on_interrupt)


def _launch_config(nproc: int) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",  # port 0: the system picks a free one
        local_addr=_LOOPBACK,  # becomes MASTER_ADDR; the host's own name may not resolve
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
    )


def _default_nproc() -> int:
    import torch

    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    _say("no accelerator found: starting 2 ranks on the CPU (--nproc N chooses)")
    return 2


def _set_environment(nproc: int) -> None:
    """Defaults the ranks inherit. What the user has set stays."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS_TO_STOP)
    if sys.platform == "linux":
        # All ranks are on this host: gloo would look up the host's name, which may not lead back here.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ and nproc > 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // nproc)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        _say(f"OMP_NUM_THREADS={threads} for each of {nproc} ranks on {cores} cores (set it to choose)")


def _quiet_torchrun() -> None:
    """Keep torchrun's own log off the terminal, unless the user asked for it (LOGLEVEL, torchrun's name)."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _root_cause(failures: Mapping[int, Failure]) -> int:
    """The rank that failed by itself.

    Ranks that torchrun stopped show SIGTERM and come last. A rank that was killed comes first: its peers fail
    in the same moment because their connection broke, with exceptions of their own.
    """

    def order(rank: int) -> tuple[bool, bool, int, int]:
        failure = failures[rank]
        return failure.exitcode == -signal.SIGTERM, failure.exitcode > 0, failure.timestamp, rank

    return min(failures, key=order)


def exit_status(failures: Mapping[int, Failure]) -> int:
    """The root cause's exit code; 128 + signal if it was killed, as shells have it."""
    code = failures[_root_cause(failures)].exitcode
    return code if code > 0 else 128 - code


def describe_failure(failures: Mapping[int, Failure], nproc: int) -> str:
    """One paragraph: who failed first and how, who failed with it, and what became of the rest.

    `rank 1 (pid 4711) was killed by SIGKILL; the others were stopped`
    """
    root = _root_cause(failures)
    message = f"rank {root} (pid {failures[root].pid}) {_ending(failures[root].exitcode)}"
    also = [
        f"rank {rank} {_ending(failure.exitcode)}"
        for rank, failure in sorted(failures.items())
        if rank != root and failure.exitcode != -signal.SIGTERM
    ]
    if also:
        message += f" ({', '.join(also)} in the same moment)"
    if failures[root].exitcode == -signal.SIGKILL:
        message += ", which is what the system does when memory runs out"
    if failures[root].exitcode == -signal.SIGABRT:
        message += ", which gloo does when ranks launch collectives of different sizes: run it again with "
        message += "ZEROSHARD_DEBUG=collectives to see which"
    return message + ("; the others were stopped" if len(also) + 1 < nproc else "")


def _ending(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with exit code {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def _child_processes() -> set[int]:
    """Direct children of this process, where the system can say (Linux)."""
    children: set[int] = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        try:
            children.update(int(pid) for pid in tasks.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def _kill_session(pid: int) -> None:
    """Kill a rank together with what it started: torchrun gives each rank a session of its own."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _say(line: str) -> None:
    print(f"zeroshard: {line}", file=sys.stderr, flush=True)
