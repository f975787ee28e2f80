"""Every call that the libraries make into deepspeed, in the form in which they make it.

Read off transformers 5.24, accelerate 1.15, PEFT 0.21, Lightning 2.6 and TRL 1.16. Here each call's arguments are
bound to what the stand-in has; that they do what they should is in `tests/dist/test_deepspeed_calls.py` and the
clients' own tests.
"""

from __future__ import annotations

import importlib
import inspect
from datetime import timedelta
from typing import Any

import pytest
from torch import nn

import zeroshard.compat
from zeroshard.errors import NotYetError

zeroshard.compat.activate()

X: Any = object()

CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "deepspeed.initialize": [
        ((), {"model": X, "config_params": {}}),
        ((), {"model": X, "config_params": {}, "model_parameters": X, "optimizer": X, "lr_scheduler": X}),
        ((), {"model": X, "config_params": {}, "mpu": None}),
        ((), {"args": X, "config": {}, "model": X, "optimizer": X, "dist_init_required": False}),
        ((), {"model": X, "config": {}}),
    ],
    "deepspeed.init_distributed": [
        (("nccl",), {"distributed_port": 1, "timeout": timedelta(minutes=1)}),
        ((), {"dist_backend": "nccl", "auto_mpi_discovery": False, "timeout": timedelta(minutes=1)}),
    ],
    "deepspeed.comm.init_distributed": [
        ((), {"dist_backend": None, "auto_mpi_discovery": False, "timeout": X})
    ],
    "deepspeed.comm.is_initialized": [((), {})],
    "deepspeed.comm.get_rank": [((), {})],
    "deepspeed.zero.Init": [
        ((), {"config_dict_or_path": {}}),
        ((), {"enabled": False, "remote_device": "cpu", "config_dict_or_path": {}}),
    ],
    "deepspeed.zero.GatheredParameters": [
        ((X,), {}),
        ((X,), {"modifier_rank": 0}),
        ((X,), {"modifier_rank": None, "fwd_module": X, "enabled": True}),
    ],
    "deepspeed.zero.register_external_parameter": [((X, X), {})],
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": [
        ((X,), {}),
        ((X, X), {"target_device": "cpu"}),
    ],
    "deepspeed.runtime.zero.partition_parameters.get_accelerator": [((), {})],
    "deepspeed.accelerator.get_accelerator": [((), {})],
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save": [(({},), {})],
    "deepspeed.checkpointing.configure": [
        (
            (),
            {
                "mpu_": None,
                "partition_activations": False,
                "contiguous_checkpointing": False,
                "checkpoint_in_cpu": False,
                "profile": None,
            },
        )
    ],
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": [(("d", "t"), {})],
    "deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict": [(("d", "o"), {})],
    "deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint": [((X, "d"), {})],
    "deepspeed.utils.zero_to_fp32.get_model_state_file": [(("d", 3), {})],
    "deepspeed.utils.zero_to_fp32.get_optim_files": [(("d",), {})],
    "deepspeed.ops.adam.DeepSpeedCPUAdam": [((X,), {"lr": 1e-3, "weight_decay": 0.1, "adamw_mode": True})],
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": [((X,), {"lr": 1e-3, "weight_decay": 0.1})],
    "deepspeed.ops.lion.DeepSpeedCPULion": [((X,), {"lr": 1e-3, "weight_decay": 0.1})],
    "deepspeed.utils.set_z3_leaf_modules": [((X, [nn.Linear]), {})],
    "deepspeed.utils.safe_get_full_grad": [((X,), {})],
    "deepspeed.DeepSpeedEngine.forward": [((X,), {"labels": X})],
    "deepspeed.DeepSpeedEngine.backward": [((X, X), {}), ((X, X), {"scale_wrt_gas": False})],
    "deepspeed.DeepSpeedEngine.set_gradient_accumulation_boundary": [((X,), {"is_boundary": True})],
    "deepspeed.DeepSpeedEngine.step": [((X,), {}), ((X,), {"lr_kwargs": {}})],
    "deepspeed.DeepSpeedEngine.get_global_grad_norm": [((X,), {})],
    "deepspeed.DeepSpeedEngine.zero_grad": [((X,), {})],
    "deepspeed.DeepSpeedEngine.train": [((X,), {}), ((X, False), {})],
    "deepspeed.DeepSpeedEngine.save_checkpoint": [
        ((X, "d"), {}),
        ((X, "d"), {"exclude_frozen_parameters": True}),
        ((X, "d", "tag"), {}),
        ((X, "d"), {"client_state": {}, "tag": "checkpoint", "exclude_frozen_parameters": False}),
    ],
    "deepspeed.DeepSpeedEngine.load_checkpoint": [
        (
            (X, "d"),
            {"load_module_strict": True, "load_optimizer_states": True, "load_lr_scheduler_states": True},
        ),
        ((X, "d", "tag"), {}),
        ((X, "d"), {"tag": "checkpoint", "load_optimizer_states": True, "load_lr_scheduler_states": False}),
    ],
    "deepspeed.DeepSpeedEngine._zero3_consolidated_16bit_state_dict": [
        ((X,), {}),
        ((X,), {"exclude_frozen_parameters": True}),
    ],
    "deepspeed.DeepSpeedEngine._consolidated_16bit_state_dict": [((X,), {})],
    "deepspeed.DeepSpeedEngine.compile": [((X,), {"backend": "inductor", "compile_kwargs": {}})],
    "deepspeed.DeepSpeedEngine.destroy": [((X,), {})],
    "deepspeed.DeepSpeedEngine.no_sync": [((X,), {})],
}

NAMES = [
    "deepspeed.__version__",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer",
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES",
    "deepspeed.runtime.lr_schedules.WarmupLR",
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.AVAILABLE",
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
    "deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME",
    "deepspeed.ops.__compatible_ops__",
    "deepspeed.utils.logger.setLevel",
    "deepspeed.utils.logging.logger",
    "deepspeed.utils.groups._get_sequence_parallel_group",
    "deepspeed.utils.groups._get_sequence_parallel_world_size",
    "deepspeed.utils.groups._get_sequence_parallel_rank",
    "deepspeed.DeepSpeedEngine.parameters",
    "deepspeed.DeepSpeedEngine.modules",
]

ABSENT = [
    "deepspeed.tp_model_init",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter",
]


def found(path: str) -> Any:
    """By attributes after a bare `import deepspeed`, as clients reach it."""
    root, *parts = path.split(".")
    value: Any = importlib.import_module(root)
    for part in parts:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("path", CALLS)
def test_calls_fit(path: str) -> None:
    target = found(path)
    for args, kwargs in CALLS[path]:
        inspect.signature(target).bind(*args, **kwargs)


@pytest.mark.parametrize("path", NAMES)
def test_names_are_there(path: str) -> None:
    assert found(path) is not None


@pytest.mark.parametrize("path", ABSENT)
def test_what_is_not_there_yet_says_so(path: str) -> None:
    with pytest.raises(NotYetError, match=r"is not in zeroshard: .*planned"):
        found(path)(1, key=2)


def test_saving_tells_its_parameters() -> None:
    """Trainer asks the signature whether frozen parameters may be left out."""
    assert (
        "exclude_frozen_parameters"
        in inspect.signature(found("deepspeed.DeepSpeedEngine.save_checkpoint")).parameters
    )
