"""`deepspeed.accelerator.get_accelerator()`: torch.accelerator, the host where there is none."""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.world import VISIBLE_DEVICES

__all__ = ["Accelerator", "get_accelerator", "is_current_accelerator_supported"]


class Accelerator:
    """The device that a run trains on, with the methods scripts call. `torch` has all of them in other places."""

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self._name = "cpu" if found is None or found.type == "mps" else found.type

    @property
    def _module(self) -> Any:
        """`torch.cuda` and its like."""
        return torch.get_device_module(self._name)

    @property
    def _on_host(self) -> bool:
        return self._name == "cpu"

    # ---- devices ------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda`, or `cuda:1` for an index; `cpu` has none."""
        return self._name if device_index is None or self._on_host else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        return 0 if self._on_host else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """What `tensor.to()` takes for this process's device."""
        return self.device_name(self.current_device())

    def device(self, device_index: int | None = None) -> Any:
        """A context in which that device is the current one."""
        return nullcontext() if self._on_host else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        if not self._on_host:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Devices of this host; of the CPU the ranks that run on it."""
        return (
            int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if self._on_host
            else torch.accelerator.device_count()
        )

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return self._on_host

    def communication_backend_name(self) -> str:
        backend = dist.get_default_backend_for_device(self._name)
        return str(backend)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def visible_devices_envs(self) -> list[str]:
        return [VISIBLE_DEVICES[self._name]] if self._name in VISIBLE_DEVICES else []

    # ---- dtypes -------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return bool(self._on_host or self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # ---- random numbers -----------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._on_host else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._on_host else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed() if self._on_host else int(self._module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        if self._on_host:
            return torch.get_rng_state()
        state: Tensor = self._module.get_rng_state(*self._given(device_index))
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._on_host:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *self._given(device_index))

    # ---- streams ------------------------------------------------------------------------------------

    def synchronize(self, device_index: int | None = None) -> None:
        if not self._on_host:
            self._module.synchronize(*self._given(device_index))

    @property
    def Stream(self) -> Any:
        return torch.Stream

    @property
    def Event(self) -> Any:
        return None if self._on_host else self._module.Event

    def stream(self, stream: Any) -> Any:
        return nullcontext() if self._on_host else self._module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._on_host else self._module.current_stream(*self._given(device_index))

    def default_stream(self, device_index: int | None = None) -> Any:
        return None if self._on_host else self._module.default_stream(*self._given(device_index))

    def range_push(self, msg: str, *_: Any) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self, *_: Any) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    # ---- memory -------------------------------------------------------------------------------------

    def _bytes(self, name: str, device_index: int | None) -> int:
        """0 on the host, whose memory torch does not count."""
        return 0 if self._on_host else int(getattr(self._module, name)(*self._given(device_index)))

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._bytes("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._bytes("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._bytes("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._bytes("max_memory_reserved", device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {} if self._on_host else dict(self._module.memory_stats(*self._given(device_index)))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if not self._on_host:
            self._module.reset_peak_memory_stats(*self._given(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device; of the host without a device."""
        if self._on_host:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(self._module.get_device_properties(device_index or self.current_device()).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        if self._on_host:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return int(self._module.mem_get_info(*self._given(device_index))[0])

    def empty_cache(self) -> None:
        if not self._on_host:
            self._module.empty_cache()

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor if self._on_host else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return not self._on_host and tensor.is_pinned()

    @staticmethod
    def _given(device_index: int | None) -> tuple[int, ...]:
        return () if device_index is None else (device_index,)


@functools.cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    return True
