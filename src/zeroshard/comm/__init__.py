"""Collectives: one narrow seam, several ways to carry it.

Read `seam.py` first (the protocol), then `choose.py` (which implementation a group gets).
"""

from zeroshard.comm.choose import open_collectives
from zeroshard.comm.local import LocalCollectives
from zeroshard.comm.seam import Collectives, Done, Work
from zeroshard.comm.torch_backend import TorchCollectives

__all__ = ["Collectives", "Done", "LocalCollectives", "TorchCollectives", "Work", "open_collectives"]
