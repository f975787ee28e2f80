"""Collectives: one narrow seam, several ways to carry it.

Read `seam.py` first (the protocol), then `choose.py` (which implementation a group gets).
"""

from zeroshard.comm.agreement import ballot, unanimous
from zeroshard.comm.choose import new_group, open_collectives
from zeroshard.comm.counting import CountingCollectives, Traffic
from zeroshard.comm.fake import FakeCollectives
from zeroshard.comm.local import LocalCollectives
from zeroshard.comm.log import (
    CommsLog,
    configure_log,
    has_log,
    log_for,
    logged_operations,
    reset_log,
)
from zeroshard.comm.log_table import log_summary
from zeroshard.comm.recorder import RecordingCollectives
from zeroshard.comm.seam import Collectives, Done, Work
from zeroshard.comm.shared_memory import SharedMemoryCollectives
from zeroshard.comm.timing import TimedCollectives
from zeroshard.comm.torch_backend import TorchCollectives
from zeroshard.comm.wrapper import labelled

__all__ = [
    "Collectives",
    "CommsLog",
    "CountingCollectives",
    "Done",
    "FakeCollectives",
    "LocalCollectives",
    "RecordingCollectives",
    "SharedMemoryCollectives",
    "TimedCollectives",
    "TorchCollectives",
    "Traffic",
    "Work",
    "ballot",
    "configure_log",
    "has_log",
    "labelled",
    "log_for",
    "log_summary",
    "logged_operations",
    "new_group",
    "open_collectives",
    "reset_log",
    "unanimous",
]
