"""What a checkpoint holds besides tensors: plain values that torch reads back without running code."""

from __future__ import annotations

import importlib.metadata
import platform
import random
import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zeroshard.checkpoint.contents import aliases_of, group_options, persistent_buffers
from zeroshard.checkpoint.plain import pack, unpack
from zeroshard.errors import CheckpointError

if TYPE_CHECKING:
    from zeroshard.checkpoint.methods import Checkpoints

__all__ = [
    "EXTRAS",
    "checked_blob",
    "facts_of",
    "gather_extras",
    "random_state",
    "restore_extras",
    "set_random_state",
]

EXTRAS = "extras"
"""The blob of rank 0; `rng/<rank>` is that of each rank."""


def facts_of(engine: Checkpoints) -> dict[str, Any]:
    """What a look at the index alone should tell."""
    return {
        "step": engine._update.attempted,
        "world_size": engine._states.world,
        "zero_stage": engine.policy.stage,
        "zeroshard": importlib.metadata.version("zeroshard"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def gather_extras(
    engine: Checkpoints, client_state: Mapping[str, Any], base: Mapping[str, Any] | None
) -> Any:
    """`base`: digests of frozen parameters where those are left out."""
    if not isinstance(client_state, Mapping):
        raise CheckpointError(
            f"client_state is {type(client_state).__name__}, and must be a dict: give {{'name': value}}"
        )
    scheduler, loader = engine.lr_scheduler, engine.training_dataloader
    checked_blob(dict(client_state), "client_state")
    return checked_blob(
        {
            **engine._update.counters(),
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps,
            "loss_scale": engine._update.loss_scale.state_dict(),
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            "loader": loader.state_dict() if hasattr(loader, "state_dict") else None,
            "param_groups": group_options(engine._states, engine.optimizer),
            "client_state": dict(client_state),
            "optimizer": None if engine.optimizer is None else type(engine.optimizer).__name__,
            "aliases": aliases_of(engine.module),
            "buffers": [*persistent_buffers(engine.module)],
            "hugging_face": hugging_face_files(engine.module),
            "base": None if base is None else dict(base),
            "config": engine._config.model_dump_json(exclude_unset=True),
            **facts_of(engine),
        },
        "the state of the learning-rate scheduler, the loader or an optimizer option",
    )


def hugging_face_files(model: Any) -> dict[str, str]:
    """The small files beside the weights of a Hugging Face model, by name; none for other models."""
    found = {}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        config: Any = getattr(model, attribute, None)
        if hasattr(config, "to_json_string") and hasattr(config, "to_diff_dict"):
            found[name] = str(config.to_json_string())
    return found


def checked_blob(value: dict[str, Any], what: str) -> dict[str, Any]:
    """A copy of `value`, which nobody changes while it is written, as torch reads it back without running code;
    CheckpointError naming the entry that it does not."""
    copy = {}
    for key, entry in value.items():
        try:
            copy[key] = unpack(pack(entry))
        except Exception as error:  # pickle raises anything
            named = re.search(r"Unsupported \w+: GLOBAL (\S+)", str(error))
            culprit = named[1] if named else type(error).__name__
            raise CheckpointError(
                f"entry {key!r} ({type(entry).__name__}) of {what} cannot be saved, because of {culprit}: a "
                f"checkpoint holds tensors, numbers, text, paths, dates, members of enumerations, and lists, "
                f"tuples and dicts of them, so that opening one never runs code. Convert it first; or, if its "
                f"class is harmless, pass that to torch.serialization.add_safe_globals, also where it is loaded."
            ) from error
    return copy


def random_state(engine: Checkpoints) -> dict[str, Any]:
    """Of every generator that training draws from on this rank."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (str(name), torch.tensor(keys.astype("int64")), *(float(x) for x in rest))
    if engine.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(engine.device)
    return state


def set_random_state(engine: Checkpoints, state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        generator = (name, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached)
        numpy.random.set_state(generator)
    if "cuda" in state and engine.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], engine.device)


def restore_extras(engine: Checkpoints, extras: Mapping[str, Any], scheduler_states: bool) -> None:
    """Counters, loss scale, scheduler, loader."""
    engine._update.set_counters(extras)
    if extras["loss_scale"]:
        engine._update.loss_scale.load_state_dict(extras["loss_scale"])
    engine.global_samples = extras["global_samples"]
    engine.micro_steps = extras.get("micro_steps", 0)  # what follows is not in DeepSpeed's
    if scheduler_states and engine.lr_scheduler is not None and extras["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(extras["lr_scheduler"])
    loader = engine.training_dataloader
    if extras.get("loader") is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(extras["loader"])
