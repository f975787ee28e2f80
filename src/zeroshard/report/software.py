"""What is installed and what of it is in use: versions, devices, communication backends, fast paths.

Whether a fast path is on is asked of the code that decides it in a run; no rule is repeated here.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm.rendezvous import Listener
from zeroshard.comm.watch import debugs_collectives
from zeroshard.optimizer import build_optimizer
from zeroshard.streams import Lane
from zeroshard.tiles import Tiles

__all__ = ["FAST_PATHS", "backends", "devices", "environment", "versions"]

_PACKAGES = (
    "transformers",
    "accelerate",
    "peft",
    "lightning",
    "trl",
    "deepspeed",
    "safetensors",
    "numpy",
    "triton",
    "tensorboard",
    "matplotlib",
)
_BACKENDS = ("gloo", "nccl", "xccl", "ucc", "mpi")
_VARIABLES = re.compile(
    r"OMP_NUM_THREADS|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|LD_PRELOAD|PYTORCH_.*ALLOC_CONF"
    r"|(NCCL|GLOO|ZEROSHARD|TORCH|TORCHELASTIC|TORCHINDUCTOR)_.*"
)

Told = tuple[bool, str]
"""Whether it is on, and why or what it is."""


def versions() -> dict[str, str | None]:
    """By name; None is not installed, or not told by the system."""
    found: dict[str, str | None] = {
        "zeroshard": zeroshard.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "NCCL": _nccl_version(),
        "NVIDIA driver": _driver_version(),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _nccl_version() -> str | None:
    if not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _driver_version() -> str | None:
    try:
        found = re.search(r"Module(?: for \S+)?\s+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def devices() -> list[dict[str, Any]]:
    """Accelerators that this process sees, in their order: type, name, bytes of memory."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    found = []
    for index in range(torch.accelerator.device_count()):
        told = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        memory = getattr(told, "total_memory", None)
        found.append({"type": kind.type, "name": getattr(told, "name", kind.type), "memory": memory})
    return found


def backends() -> dict[str, dict[str, Any]]:
    """What torch.distributed can carry collectives with, and what it takes for which device."""
    found: dict[str, dict[str, Any]] = {}
    for name in _BACKENDS:
        built = dist.is_available() and dist.is_backend_available(name)
        kinds = [kind for kind, default in dist.Backend.default_device_backend_map.items() if default == name]
        why = f"the default for {', '.join(kinds)}" if built and kinds else ""
        found[name] = {"available": built, "why": why if built else "this torch was built without it"}
    return found


def environment() -> dict[str, str]:
    """Variables that change how a run computes or communicates."""
    return {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


def _device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _shared_memory() -> Told:
    listener = Listener()
    try:
        reason = listener.offer.reason
    finally:
        listener.close()
    return not reason, reason or "between CPU ranks of one host"


def _optimizer(name: str, **options: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(1, device=_device()))
    return build_optimizer(name, {"lr": 1e-3, **options}, [parameter], {id(parameter): "p"})


def _fused() -> Told:
    optimizer = _optimizer("AdamW")
    return bool(optimizer.defaults.get("fused")), f"AdamW of the config, on {_device().type}"


def _foreach() -> Told:
    from torch.optim.optimizer import _default_to_fused_or_foreach

    parameter = nn.Parameter(torch.zeros(1, device=_device()))
    _, foreach = _default_to_fused_or_foreach([parameter], differentiable=False)
    return bool(foreach), f"torch's default on {_device().type}, for optimizers without a fused kernel"


def _tiles() -> Told:
    return Tiles.suit(_optimizer("AdamW")), "sub_group_size cuts what the optimizer takes at once"


def _streams() -> Told:
    if Lane(_device()).overlaps:
        return True, "gathers and reductions are queued beside the compute"
    return False, f"{_device().type} has no streams"


def _compile() -> Told:
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    check_if_dynamo_supported()
    if _device().type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        return True, f"inductor, with {get_cpp_compiler()}"
    from torch.utils._triton import has_triton

    return (
        has_triton(),
        "inductor, with Triton" if has_triton() else "Triton is missing or does not work here",
    )


def _bf16() -> Told:
    if _device().type == "cpu":
        told = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return bool(told), f"matrix products on the CPU ({torch.backends.cpu.get_cpu_capability()})"
    module = torch.get_device_module(_device())
    return bool(module.is_bf16_supported()), f"on {_device().type}"


def _unchecked() -> Told:
    seconds = debugs_collectives()
    return seconds is None, "" if seconds is None else "ZEROSHARD_DEBUG compares every collective first"


FAST_PATHS: dict[str, Callable[[], Told]] = {
    "collectives through shared memory": _shared_memory,
    "communication on streams of its own": _streams,
    "collectives start at once": _unchecked,
    "fused optimizer": _fused,
    "foreach optimizer": _foreach,
    "optimizer in tiles": _tiles,
    "torch.compile": _compile,
    "bf16 in hardware": _bf16,
}
