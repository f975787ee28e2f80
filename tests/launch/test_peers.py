"""A host tells the others that its ranks have failed, however early."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from zeroshard.launch import peers
from zeroshard.launch.peers import Peers
from zeroshard.launch.plan import Place

LIMIT = timedelta(seconds=60)


def test_a_failure_is_told_though_the_store_was_not_there_yet() -> None:
    """A rank may fail before the thread that watches the others has connected."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    port = store.port
    Peers(Place(1, 2, 2, "127.0.0.1", port)).tell("rank 1 ended", 7)
    store.wait([peers._KEY], LIMIT)
    assert store.get(peers._KEY) == b"7 rank 1 ended"
