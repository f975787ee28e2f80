"""Where a thread is, told from its stack: which line of the script, and what the script called.

Looked up only when somebody asks. So the hooks and the engine need to keep no notes for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType

import torch

__all__ = ["place_of", "site_of"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMM = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SCRIPTS = tuple(os.path.join(_PACKAGE, wing) + os.sep for wing in ("testing", "planner"))
"""Parts of this package that use it as scripts do."""
_LIBRARIES = (
    "<frozen",
    os.path.dirname(torch.__file__) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

_ENTRIES = {
    "before_forward": "forward",
    "after_forward": "forward",
    "__torch_function__": "forward",
    "__enter__": "GatheredParameters",
    "__exit__": "GatheredParameters",
    "before_backward": "backward",
    "gradient_ready": "backward",
    "<lambda>": "backward",  # what runs when autograd is done
    "_before_optimizer": "step",
    "_after_optimizer": "step",
}
"""Functions that torch calls for us; others go by their own names."""


def place_of(thread: int | None = None) -> tuple[str, str]:
    """(what the script called, `file:line in function` of the script) of a thread, by default the main one.

    The first is empty where the thread is not in this package.
    """
    ident = threading.main_thread().ident if thread is None else thread
    entry, nearest = "", ""
    for frame in _outwards(sys._current_frames().get(ident or 0)):
        code = frame.f_code
        if _is_ours(code.co_filename):
            entry = _ENTRIES.get(code.co_name, code.co_name)
        elif not _is_library(frame):
            return entry, _line(frame)
        nearest = nearest or _line(frame)
    return entry, nearest  # no script: an embedded interpreter, a script that is itself installed


def site_of() -> str:
    """The function that made the collective that this thread launches."""
    for frame in _outwards(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(_COMM):
            return frame.f_code.co_name
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and not filename.startswith(_SCRIPTS)


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    generated = name == "<string>" and frame.f_globals.get("__name__") != "__main__"  # not `python -c`
    return generated or name.startswith(_LIBRARIES)


def _line(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    with contextlib.suppress(OSError):  # the directory may be gone
        name = name.removeprefix(os.getcwd() + os.sep)
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
