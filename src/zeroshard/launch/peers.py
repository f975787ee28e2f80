"""Hosts that were started by hand, pdsh, mpirun or srun tell each other when one of them fails.

torchrun's store, which the first host serves, gets one more key. Without it the others would learn of a dead rank
at the time-out of a collective, or never.
"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from zeroshard.launch.messages import log
from zeroshard.launch.plan import Place
from zeroshard.launch.processes import end_this_process

__all__ = ["Peers"]

_KEY = "zeroshard/failed"
_POLL_SECONDS = 0.5
_SECONDS_TO_CONNECT = 60.0  # ranks may fail before the store is found: clients try ever more seldom
_SECONDS_TO_READ = 2.0  # the store goes with the first host: the others have to see the key before
_SECONDS_TO_FINISH = 10.0  # a store that has gone is how a job ends, too
_SECONDS_TO_MEET = 900


class Peers:
    """The other hosts of a job with fixed hosts."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: TCPStore | None = None
        self._connected = threading.Event()
        self._has_told = False
        self.status: int | None = None  # the exit status of the failure that others have told
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def tell(self, failure: str, status: int) -> None:
        """That ranks here have failed."""
        self._has_told = True
        if self._connected.wait(_SECONDS_TO_CONNECT) and self._store is not None:
            try:
                self._store.set(_KEY, f"{status} {failure}")
                if self._place.node_rank == 0:
                    time.sleep(_SECONDS_TO_READ)
            except DistError:  # the first host has gone; its end tells the others
                pass

    def _watch(self) -> None:
        assert self._place.address is not None
        assert self._place.port is not None
        try:
            store = TCPStore(
                self._place.address,
                self._place.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_SECONDS_TO_MEET),
            )
            self._store = store
            self._connected.set()
            while not store.check([_KEY]):
                time.sleep(_POLL_SECONDS)
            status, _, said = store.get(_KEY).decode().partition(" ")
        except DistError:
            self._connected.set()
            if self._store is None:
                return
            time.sleep(_SECONDS_TO_FINISH)
            status, said = "1", f"the connection to {self._place.address} ended"
        if not self._has_told:
            log.error("stopping: %s", said)
            self.status = int(status)
            end_this_process(signal.SIGTERM, self.status)
