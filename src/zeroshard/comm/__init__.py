"""Collectives: one narrow seam, several ways to carry it.

Read `seam.py` first (the protocol), then `choose.py` (which implementation a group gets).
"""

from zeroshard.comm.agreement import ballot, unanimous
from zeroshard.comm.choose import new_group, open_collectives
from zeroshard.comm.counting import CountingCollectives, Traffic
from zeroshard.comm.fake import FakeCollectives
from zeroshard.comm.local import LocalCollectives
from zeroshard.comm.recorder import RecordingCollectives, labelled
from zeroshard.comm.seam import Collectives, Done, Work
from zeroshard.comm.shared_memory import SharedMemoryCollectives
from zeroshard.comm.torch_backend import TorchCollectives

__all__ = [
    "Collectives",
    "CountingCollectives",
    "Done",
    "FakeCollectives",
    "LocalCollectives",
    "RecordingCollectives",
    "SharedMemoryCollectives",
    "TorchCollectives",
    "Traffic",
    "Work",
    "ballot",
    "labelled",
    "new_group",
    "open_collectives",
    "unanimous",
]
