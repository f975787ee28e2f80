"""What clients hand to `save_checkpoint` beside the weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from zeroshard.checkpoint.plain import pack, unpack

__all__ = ["without_objects"]

log = logging.getLogger("zeroshard")

_TOLD = "hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type"
"""Where Lightning keeps the arguments that a module was made with. A run that goes on does not read them."""


def without_objects(client_state: Mapping[str, Any] | None, tells: bool) -> dict[str, Any]:
    """A copy in which Lightning's hyper-parameters are what a checkpoint can hold; the rest is named, if `tells`.

    Everything else stays as it is: what cannot be saved of it is an error of `save_checkpoint`.
    """
    state = dict(client_state or {})
    left: list[str] = []
    for key in state.keys() & set(_TOLD):
        if not _is_plain(state[key]):
            state[key] = _plain_part(state[key], key, left)
    state = {key: value for key, value in state.items() if value is not _NOTHING}
    if left and tells:
        _tell(tuple(sorted(left)))
    return state


_NOTHING = object()


def _plain_part(value: Any, path: str, left: list[str]) -> Any:
    if isinstance(value, Mapping):
        parts = {key: _plain_part(entry, f"{path}.{key}", left) for key, entry in value.items()}
        return {key: part for key, part in parts.items() if part is not _NOTHING}
    if _is_plain(value):
        return value
    left.append(f"{path} ({type(value).__module__}.{type(value).__qualname__})")
    return _NOTHING


def _is_plain(value: Any) -> bool:
    try:
        unpack(pack(value))
    except Exception:  # pickle raises anything
        return False
    return True


@functools.cache
def _tell(left: tuple[str, ...]) -> None:
    log.warning(
        "checkpoints are saved without %s: no file here holds code or objects that could run some. Give these to "
        "load_from_checkpoint as arguments; or, where a class is harmless, pass it to "
        "torch.serialization.add_safe_globals",
        ", ".join(left),
    )
