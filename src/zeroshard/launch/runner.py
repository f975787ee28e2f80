"""The ranks of one host, over torch's elastic agent.

torchrun does the work (`torch.distributed.launcher`). What is added here: which devices and cores each rank has, a
rendezvous that stays on the loopback interface where there is one host, one paragraph instead of a page when a rank
dies, and a Ctrl-C that leaves no process behind, however often it is pressed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeroshard.errors import LaunchError
from zeroshard.launch import child
from zeroshard.launch.cores import cores_here
from zeroshard.launch.failures import Failure, describe_failure, exit_status, last_lines, write_record
from zeroshard.launch.messages import log
from zeroshard.launch.network import can_resolve, interface_of, is_free, own_address
from zeroshard.launch.output import FILES_OF_A_RANK, RankOutput, python_of_ranks
from zeroshard.launch.peers import Peers
from zeroshard.launch.plan import Place
from zeroshard.launch.processes import child_processes, end_children, heir_of_orphans, room_for_files

__all__ = ["Node", "accelerators_here", "added_environment", "run_node", "run_ranks"]

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.1
_SECONDS_TO_PRINT = 2.0  # what ranks have said, after we were told to stop
_SECONDS_TO_STOP = "15"  # from the signal to stop until SIGKILL


@dataclass(frozen=True)
class Node:
    """The ranks of this host: `ranks` processes of `command`, in which `${local_rank}` is each one's place."""

    command: tuple[str, ...]
    ranks: int
    place: Place = field(default_factory=Place)
    max_restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)  # added for the ranks
    cores: Sequence[Sequence[int]] | None = None  # of each rank
    log_folder: str | None = None
    record_failures: bool = False  # for a launcher that reads our stderr, instead of telling people


def accelerators_here() -> int:
    """How many accelerators this process can see."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def run_ranks(command: list[str], nproc: int) -> int:
    """Run `python command...` on `nproc` ranks of this machine; returns the exit status as `run_node` does."""
    return run_node(Node((*python_of_ranks(), *(word.replace("$", "$$") for word in command)), nproc))


def run_node(node: Node) -> int:
    """Run the ranks of this host to their end and return the exit status for the shell.

    0 when all ranks succeed; the exit code of the rank that failed first; 128 + signal when a rank was
    killed, or when this process was told to stop (Ctrl-C gives 130).

    Raises:
        LaunchError: the port is taken, or the hosts did not meet.
    """
    _quiet_torchrun()
    with room_for_files(FILES_OF_A_RANK, node.ranks, "ranks"), _environment_of(node):
        output = RankOutput(node.log_folder)
        fixed = not (_is_elastic(node) or node.place.alone)
        peers = Peers(node.place) if fixed and not node.record_failures else None
        try:
            _run_to_the_end(node, output)
        except ChildFailedError as error:
            return _tell_failure(node, error, output, peers)
        except SignalException as stop:
            if peers is not None and peers.status is not None:
                return peers.status
            tell = log.debug if node.record_failures else log.error
            tell("stopped by %s; all ranks have ended", signal.Signals(stop.sigval).name)
            return 128 + stop.sigval
        except (RendezvousError, DistError) as error:
            place, reason = node.place, str(error.__cause__ or error).partition("\n")[0]
            raise LaunchError(f"the hosts did not meet at {place.address}:{place.port}: {reason}") from error
    return 0


def _tell_failure(node: Node, error: ChildFailedError, output: RankOutput, peers: Peers | None) -> int:
    host = "" if node.place.alone else socket.gethostname()
    failures = {
        rank: Failure(f.pid, f.exitcode, f.timestamp, host, output.last_lines(f.local_rank))
        for rank, f in error.failures.items()
    }
    if node.record_failures:
        print(write_record(failures), file=sys.stderr, flush=True)
    else:
        if not (node.ranks == 1 and node.place.alone) and (said := last_lines(failures)):
            log.error(said)
        log.error(describe_failure(failures, node.ranks if node.place.alone else None))
        if peers is not None:
            peers.tell(describe_failure(failures, None), exit_status(failures))
    return exit_status(failures)


def _run_to_the_end(node: Node, output: RankOutput) -> None:
    """Return or raise only when no rank is left.

    torchrun answers a Ctrl-C by passing it on and waiting, and a second one by SIGTERM and waiting; a third
    one ends that wait too, and a rank that listens to neither would go on alone. What ranks have started is ended
    with them, unless all went well: what was left running then was left on purpose.
    """
    already_there = child_processes()
    output.before_start = lambda: end_children(already_there)  # of ranks that failed, and are started again
    # Until torchrun starts ranks and answers Ctrl-C itself, there is nothing to end but this process. It may wait
    # for other hosts in C++, where Python's own answer is not heard, or start a thread, where it is another error.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    cores = "/".join(",".join(map(str, part)) for part in node.cores) if node.cores else "-"
    python, *first = child.start_through_child("SIGKILL", "${local_rank}", cores)
    succeeded, until = False, None
    with heir_of_orphans():
        try:
            elastic_launch(_launch_config(node, output), python)(*first, *node.command)
            succeeded = True
        except SignalException:
            until = time.monotonic() + _SECONDS_TO_PRINT
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if not succeeded:
                with _deaf():
                    end_children(already_there)
            output.finish(until)
            signal.signal(signal.SIGINT, on_interrupt)


@contextmanager
def _deaf() -> Iterator[None]:
    """What cannot take long is not to be interrupted."""
    heard = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.signal(number, signal.SIG_IGN) for number in heard]
    try:
        yield
    finally:
        for number, handler in zip(heard, before, strict=True):
            signal.signal(number, handler)


def _launch_config(node: Node, output: RankOutput) -> LaunchConfig:
    """Hosts that are fixed keep their places ("static"); those that may come and go are sorted by c10d."""
    place = node.place
    address, port = place.address or _LOOPBACK, place.port or 0  # port 0: the system picks a free one
    if not can_resolve(address):
        raise LaunchError(
            f"this machine cannot resolve {address!r}, where the ranks meet: give --master_addr"
        )
    if place.node_rank == 0 and port and not is_free(port):
        raise LaunchError(f"port {port} is in use on this machine: choose another one with --master_port")
    static = port != 0 and not _is_elastic(node)
    local = address if place.alone else own_address(address) or address
    return LaunchConfig(
        min_nodes=place.min_nodes,
        max_nodes=place.max_nodes,
        nproc_per_node=node.ranks,
        # Several hosts agree on a name without having talked.
        run_id=uuid.uuid4().hex if place.alone else f"zeroshard-{port}",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs={"rank": place.node_rank} if static else {"is_host": place.node_rank == 0},
        local_addr=local,  # becomes MASTER_ADDR; the host's own name may not resolve
        max_restarts=node.max_restarts,
        monitor_interval=_POLL_SECONDS,
        logs_specs=output,
    )


def _is_elastic(node: Node) -> bool:
    """Whether hosts have to meet again while the job runs: they may come and go, or all ranks start again."""
    return node.place.min_nodes < node.place.max_nodes or (node.max_restarts > 0 and not node.place.alone)


@contextmanager
def _environment_of(node: Node) -> Iterator[None]:
    """What ranks inherit from this process."""
    before, added = dict(os.environ), added_environment(node, os.environ)
    if node.cores is None and (threads := added.get("OMP_NUM_THREADS")):
        told = "OMP_NUM_THREADS=%s for each of %d ranks on %d cores (set it to choose)"
        log.info(told, threads, node.ranks, len(cores_here()))
    try:
        os.environ.update(added)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def added_environment(node: Node, environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks find beside `environ`. Defaults among it do not replace what the user has set."""
    defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SECONDS_TO_STOP}
    if sys.platform == "linux":
        # gloo would look up the host's name, which may not lead back here.
        address = None if node.place.alone else own_address(node.place.address or _LOOPBACK)
        interface = "lo" if node.place.alone else address and interface_of(address)
        if interface:
            defaults["GLOO_SOCKET_IFNAME"] = interface
    if node.ranks > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, len(cores_here()) // node.ranks))
    added = {name: value for name, value in defaults.items() if name not in environ} | dict(node.environment)
    if node.cores:
        added["OMP_NUM_THREADS"] = str(len(node.cores[0]))
    return added


def _quiet_torchrun() -> None:
    """Keep torchrun's own log off the terminal, unless the user asked for it (LOGLEVEL, torchrun's name)."""
    if "LOGLEVEL" in os.environ:
        return
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
