"""Which implementation of the seam carries a process group: decided here, once, by all ranks together."""

from __future__ import annotations

import datetime
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zeroshard.comm.check import checker_for
from zeroshard.comm.local import LocalCollectives
from zeroshard.comm.record import GroupRecord
from zeroshard.comm.recorder import RecordingCollectives
from zeroshard.comm.rendezvous import Listener, Offer, connect_all
from zeroshard.comm.seam import Collectives
from zeroshard.comm.shared_memory import SharedMemoryCollectives
from zeroshard.comm.torch_backend import TorchCollectives
from zeroshard.comm.watch import debugs_collectives, process_watch
from zeroshard.errors import CommError

__all__ = ["new_group", "open_collectives"]

_LOG = logging.getLogger("zeroshard")
_CONNECT_TIMEOUT = 60.0  # seconds
_DEFAULT_TIMEOUT = 1800.0  # seconds; torch's own default

_T = TypeVar("_T")

_opened: Counter[str] = Counter()
"""How often collectives of each process group were opened: the same count on all its ranks."""


def open_collectives(group: dist.ProcessGroup | None, device: torch.device) -> Collectives:
    """Collectives of `group` for tensors on `device`; a call that all ranks of the group make together.

    `None` stands for the default group, or for a single rank when torch.distributed is not initialised.
    One rank: no communication. CPU ranks of one Linux host: shared memory. Anything else, or when
    ZEROSHARD_SHARED_MEMORY=0 is set on any rank: torch.distributed. If a rank that could use shared memory
    fails to, all ranks fall back together and rank 0 logs one warning.

    Raises `CommError` when this process is not in the group, or a rank is gone.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return LocalCollectives()
        group = dist.group.WORLD
        assert group is not None
    carried_by_torch = TorchCollectives(group)  # also checks that this rank is a member
    if carried_by_torch.size == 1:
        return LocalCollectives()
    if device.type == "cpu":
        shared = _open_shared_memory(group, carried_by_torch.rank)
        return _recorded(shared or carried_by_torch, group, device)
    return _recorded(carried_by_torch, group, device)


def new_group(device: torch.device, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A process group of these ranks (default all) with the time-out of the default group, which torch's own
    `new_group` does not take over. All ranks call it."""
    assert dist.group.WORLD is not None
    timeout = datetime.timedelta(seconds=_timeout_of(dist.group.WORLD, device))
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
    return group


def _recorded(inner: Collectives, group: dist.ProcessGroup, device: torch.device) -> RecordingCollectives:
    """`inner` under the watch of this process, and compared between ranks where ZEROSHARD_DEBUG says so."""
    watch = process_watch()
    _opened[group.group_name] += 1
    name = f"{group.group_name}.{_opened[group.group_name]}"
    record = GroupRecord(name, dist.get_process_group_ranks(group), _timeout_of(group, device))
    seconds = debugs_collectives()
    modes = _exchange(seconds is not None, group)
    if any(modes) != all(modes):
        ranks = [rank for rank, on in zip(record.ranks, modes, strict=True) if on]
        raise CommError(
            f"ZEROSHARD_DEBUG=collectives is set on ranks {ranks} of {list(record.ranks)} only. Set it for all "
            f"ranks, or for none."
        )
    checker = watch.checker = None if seconds is None else checker_for(watch, seconds)
    watch.add(record)
    return RecordingCollectives(inner, record, watch, checker)


def _open_shared_memory(group: dist.ProcessGroup, rank: int) -> SharedMemoryCollectives | None:
    listener = Listener()
    try:
        offers = _exchange(listener.offer, group)
        if not _agree(rank, offers):
            return None
        connections: Sequence[socket.socket | None] = ()
        failure = ""
        try:
            connections = connect_all(rank, offers, listener, _CONNECT_TIMEOUT)
        except OSError as error:
            failure = f"a rank could not connect: {error}"
        failures = _exchange(failure, group)
        if any(failures):
            for connection in connections:
                if connection is not None:
                    connection.close()
            _agree(rank, [Offer(reason) for reason in failures])
            return None
    finally:
        listener.close()
    ranks = dist.get_process_group_ranks(group)
    return SharedMemoryCollectives(rank, ranks, connections, _timeout_of(group, torch.device("cpu")))


def _agree(rank: int, offers: Sequence[Offer]) -> bool:
    """Whether all ranks can; every rank decides from the same offers, rank 0 says why not."""
    refusals = [(r, offer) for r, offer in enumerate(offers) if offer.reason]
    if not refusals:
        same_host = all(offer.fingerprint == offers[0].fingerprint for offer in offers)
        if not same_host and rank == 0:
            _LOG.debug("CPU ranks on several hosts (or containers): collectives go through torch.distributed")
        return same_host
    if rank == 0:
        refusing, offer = refusals[0]
        level = logging.DEBUG if all(o.expected for _, o in refusals) else logging.WARNING
        _LOG.log(
            level,
            "no shared memory between the CPU ranks of this host, because on rank %d of the group %s; "
            "collectives go through gloo, which takes 3 to 7 times as long",
            refusing,
            offer.reason,
        )
    return False


def _exchange(value: _T, group: dist.ProcessGroup) -> list[_T]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(gathered, value, group=group)
    except RuntimeError as error:
        raise CommError(
            f"open_collectives: ranks {dist.get_process_group_ranks(group)} could not exchange addresses: "
            f"{error}. All of them must call open_collectives with this group."
        ) from error
    return gathered


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's own time-out in seconds, which torch keeps in the options of its backend."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
