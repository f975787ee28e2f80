"""Collectives: one narrow seam, several ways to carry it."""

from zeroshard.comm.seam import Collectives, Done, Work

__all__ = ["Collectives", "Done", "Work"]
