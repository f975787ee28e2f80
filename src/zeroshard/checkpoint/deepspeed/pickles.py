"""Opening the files of a DeepSpeed checkpoint, which are pickles, without running what they say.

torch's weights-only unpickler builds plain values and tensors and refuses everything else. DeepSpeed also pickled a
few objects of its own classes; those become `Kept`, which has their attributes and can do nothing. Tensors stay in
the file, mapped, until somebody copies them.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.deepspeed.files import COPY
from zeroshard.checkpoint.plain import harmless
from zeroshard.errors import CheckpointError

__all__ = ["Kept", "open_states", "open_value"]


class Kept:
    """Stands for an object of a DeepSpeed class: the attributes it was saved with."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


_ALLOWED: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (Kept, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Kept, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Kept, "deepspeed.utils.tensor_fragment.fragment_address"),
    (Kept, "deepspeed.checkpoint.universal_checkpoint.SubparamShape"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""What is built for a class by its name in the pickle."""


def open_states(path: Path) -> dict[str, Any]:
    """The dict in one `.pt` file. Raises CheckpointError as `open_value` does, or if it is no dict."""
    states = open_value(path)
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, not the dict that DeepSpeed writes.")
    return states


def open_value(path: Path) -> Any:
    """What one `.pt` file holds. Raises CheckpointError if it is missing, cut off, or holds other objects."""
    try:
        with open(path, "rb") as file:
            is_zip = (
                file.read(4) == b"PK\x03\x04"
            )  # else of `checkpoint_serialization: false`, which cannot be mapped
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        with harmless(asked, _ALLOWED):
            return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {COPY}") from None
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if name is None:
            raise _damaged(path, error) from None
        raise CheckpointError(
            f"{path} holds {name[1]}, which was not read: a pickle can run any code, so only tensors, plain values "
            f"and DeepSpeed's own records are built. If it is a harmless class in the client_state, pass it to "
            f"torch.serialization.add_safe_globals first, or save again without it."
        ) from None
    except Exception as error:  # what an unpickler may raise on bytes that are not a pickle has no end
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    size = path.stat().st_size
    return CheckpointError(f"{path} ({size} bytes) is cut off or damaged: {reason}. {COPY}")
