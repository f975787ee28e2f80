"""`deepspeed.DeepSpeedConfig`: a parsed config, under the attributes that scripts ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zeroshard.config import parse

__all__ = ["DeepSpeedConfig"]


class DeepSpeedConfig:
    """Read and check a config: a dict, a path, or JSON text. Raises ConfigError.

    Has every section and key as an attribute, and the batch sizes that follow from each other.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | os.PathLike[str], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        from zeroshard.compat.comm import get_world_size

        self._config = parse(config)
        self._param_dict = self._config.raw
        batch = self._config.batch_on(get_world_size(), "torch.distributed")
        self.train_batch_size = batch.train_batch_size
        self.train_micro_batch_size_per_gpu = batch.micro_batch_size
        self.gradient_accumulation_steps = batch.accumulation_steps
        self.zero_config = self._config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = self.zero_config.stage > 0
        self.optimizer_name = self._config.optimizer.type
        self.optimizer_params = dict(self._config.optimizer.params)
        self.scheduler_name = self._config.scheduler.type
        self.scheduler_params = dict(self._config.scheduler.params)
        self.fp16_enabled = self._config.fp16.enabled
        self.bfloat16_enabled = self._config.bf16.enabled

    def __getattr__(self, name: str) -> Any:
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)
