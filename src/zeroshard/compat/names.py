"""Every name of the stand-in and where it lives in zeroshard; and what is not there, and where to go.

MODULES["deepspeed.zero"]["Init"] == "zeroshard.zero:Init"
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ABSENT", "ABSENT_NAMES", "COLLECTIVES", "COMMANDS", "MODULES"]


def _at(home: str, *names: str, **renamed: str) -> dict[str, str]:
    """Names as they are called in module `home`, or `name=` what they are called there."""
    return {name: f"{home}:{there}" for name, there in {**{n: n for n in names}, **renamed}.items()}


def _modules(**homes: str) -> dict[str, str]:
    """Names that are modules of the stand-in."""
    return {name: f"deepspeed.{path}" for name, path in homes.items()}


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""Functions of torch.distributed that take arguments for DeepSpeed's logger as well (`compat.comm`)."""

_ENGINE = "zeroshard.compat.engine"
_COMM = "zeroshard.compat.comm"
_FILES = "zeroshard.compat.files"
_MESSAGES = "zeroshard.compat.messages"
_OPTIMIZERS = "zeroshard.compat.optimizers"
_RUNTIME = "zeroshard.compat.runtime"
_PARAMETERS = "zeroshard.compat.parameters"

_ACCELERATOR = _at("zeroshard.compat.accelerator", "get_accelerator", "is_current_accelerator_supported")
_LOGGING = _at(_MESSAGES, "log_dist", "log_dist_once", "logger", "set_log_level_from_string")
_CONFIG = {
    **_at("zeroshard.compat.config", "DeepSpeedConfig"),
    **_at("zeroshard.errors", DeepSpeedConfigError="ConfigError"),
}
_SAFE = tuple(
    f"safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
)
_TENSORS = {
    **_at("zeroshard.parameters", *_SAFE),
    **_at(_PARAMETERS, "safe_update_full_grad_vectorized"),
}
_LEAVES = {
    **_at(
        "zeroshard.zero",
        "get_z3_leaf_modules",
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules",
        "z3_leaf_module",
    ),
    **_at(_PARAMETERS, "z3_leaf_parameter"),
}
_SCHEDULES = {
    **_at("zeroshard.lr_schedules", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
    **_at(_RUNTIME, "VALID_LR_SCHEDULES"),
    **_at("zeroshard.compat.arguments", "add_tuning_arguments"),
}
_PARTITION = {
    **_at("zeroshard.zero", "Init", "register_external_parameter", "unregister_external_parameter"),
    **_at(_PARAMETERS, "GatheredParameters", "ZeroParamStatus", "ZeroParamType"),
}
_TILES = _at("zeroshard.tiled_linear", "TiledLinear", "TiledLinearReturnBias")
_ZERO2_ESTIMATES = tuple(
    f"estimate_zero2_model_states_mem_needs{end}" for end in ("", "_all_live", "_all_cold")
)
_ZERO3_ESTIMATES = tuple(name.replace("zero2", "zero3") for name in _ZERO2_ESTIMATES)
_ZERO_TO_FP32 = _at(
    _FILES,
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
)
_ALL_RANKS = {"group": "get_world_group", "rank": "get_rank", "world_size": "get_world_size"}
_ONE_RANK = {"group": "no_group", "rank": "rank_alone", "world_size": "size_alone"}
_GROUPS = _at(
    _COMM,
    _get_broadcast_src_rank="rank_alone",
    _get_model_parallel_world_size="size_alone",
    **{
        f"{getter}_parallel_{what}": there
        for getter, answers in (
            ("_get_data", _ALL_RANKS),
            ("_get_sequence_data", _ALL_RANKS),
            ("_get_sequence", _ONE_RANK),
            ("get_data", _ALL_RANKS),
            ("get_model", _ONE_RANK),
            ("get_tensor_model", _ONE_RANK),
        )
        for what, there in answers.items()
    },
)
_ADAM = _at(_OPTIMIZERS, "DeepSpeedCPUAdam", "FusedAdam")
_LION = _at(_OPTIMIZERS, "DeepSpeedCPULion", "FusedLion")
_ENVIRONMENT_FILE = _at("zeroshard.launch.forwarding", DEEPSPEED_ENVIRONMENT_NAME="ENVIRONMENT_FILE")
_UTILS = {
    **_LOGGING,
    **_TENSORS,
    **_LEAVES,
    **_at(_RUNTIME, "OnDevice", "get_caller_func", "instrument_w_nvtx"),
    **_at("zeroshard.data", "RepeatingLoader"),
    **_modules(groups="utils.groups", logging="utils.logging"),
}

MODULES: Mapping[str, Mapping[str, str]] = {
    "deepspeed": {
        **_at(_ENGINE, "DeepSpeedEngine", "initialize"),
        **_at("zeroshard.compat.arguments", "add_config_arguments", "add_tuning_arguments"),
        **_at(_COMM, "init_distributed"),
        **_at("zeroshard.compat", __version__="VERSION", version="VERSION"),
        **_at(_RUNTIME, "OnDevice", "__git_branch__", "__git_hash__", "is_compile_supported"),
        **_at(_OPTIMIZERS, "DeepSpeedOptimizer"),
        **_at("zeroshard.data", DeepSpeedDataLoader="TrainingLoader"),
        **_at(_MESSAGES, "log_dist", "logger"),
        **_CONFIG,
        **_ACCELERATOR,
        **_modules(
            checkpointing="runtime.activation_checkpointing.checkpointing",
            zero="runtime.zero",
            dist="comm",
        ),
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.accelerator.real_accelerator": _ACCELERATOR,
    "deepspeed.checkpoint.ds_to_universal": _at(_FILES, main="universal_main"),
    "deepspeed.checkpoint.utils": _at(_FILES, "clone_tensors_for_torch_save"),
    "deepspeed.comm": {
        **_at("zeroshard.comm", "log_summary", "reset_log", has_comm_data="has_log"),
        **_at(
            "torch.distributed",
            "ProcessGroup",
            "ReduceOp",
            "destroy_process_group",
            "is_available",
            "is_initialized",
            "new_group",
        ),
        **_at(
            _COMM,
            *COLLECTIVES,
            "all_gather_coalesced",
            "all_reduce_coalesced",
            "configure",
            "get_all_ranks_from_group",
            "get_comm_operation_count",
            "get_global_rank",
            "get_local_rank",
            "get_logged_comm_ops",
            "get_rank",
            "get_world_group",
            "get_world_size",
            "has_all_gather_into_tensor",
            "init_distributed",
            "initialize_mesh_device",
            allgather_fn="all_gather_into_tensor",
            has_all_reduce_coalesced="has_all_gather_into_tensor",
            has_coalescing_manager="has_all_gather_into_tensor",
            has_reduce_scatter_tensor="has_all_gather_into_tensor",
            inference_all_reduce="all_reduce",
            reduce_scatter_fn="reduce_scatter_tensor",
        ),
    },
    "deepspeed.constants": _at("zeroshard.launch.plan", TORCH_DISTRIBUTED_DEFAULT_PORT="DEFAULT_PORT"),
    "deepspeed.env_report": _at(
        "zeroshard.launch.deepspeed_commands", cli_main="ds_report", main="ds_report"
    ),
    "deepspeed.launcher.constants": _ENVIRONMENT_FILE,
    "deepspeed.launcher.runner": {
        **_ENVIRONMENT_FILE,
        **_at("zeroshard.launch.options", DLTS_HOSTFILE="DEFAULT_HOSTFILE"),
        **_at("zeroshard.launch.deepspeed_commands", main="deepspeed"),
    },
    "deepspeed.monitor.monitor": _at(_RUNTIME, "MonitorMaster"),
    "deepspeed.ops": {"__compatible_ops__": f"{_OPTIMIZERS}:compatible_ops"},
    "deepspeed.ops.adagrad": _at(_OPTIMIZERS, "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": _ADAM,
    "deepspeed.ops.adam.fused_adam": _ADAM,
    "deepspeed.ops.lamb": _at(_OPTIMIZERS, "FusedLamb"),
    "deepspeed.ops.lion": _LION,
    "deepspeed.runtime.activation_checkpointing.checkpointing": _at(
        "zeroshard.checkpointing",
        "CudaRNGStatesTracker",
        "checkpoint",
        "configure",
        "get_cuda_rng_tracker",
        "is_configured",
        "model_parallel_cuda_manual_seed",
        "model_parallel_reconfigure_tp_seed",
        "non_reentrant_checkpoint",
        "partition_activations_in_checkpoint",
        "reset",
        "set_num_layers",
    ),
    "deepspeed.runtime.base_optimizer": _at(_OPTIMIZERS, "DeepSpeedOptimizer", "ZeROOptimizer"),
    "deepspeed.runtime.bf16_optimizer": _at(_OPTIMIZERS, "BF16_Optimizer"),
    "deepspeed.runtime.config": _CONFIG,
    "deepspeed.runtime.dataloader": _at(
        "zeroshard.data", "RepeatingLoader", DeepSpeedDataLoader="TrainingLoader"
    ),
    "deepspeed.runtime.engine": _at(_ENGINE, "DeepSpeedEngine"),
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.utils": {
        **_at("zeroshard.tiled_linear", "partition_uniform"),
        **_at(
            _RUNTIME,
            "clip_grad_norm_",
            "empty_cache",
            "ensure_directory_exists",
            "get_global_norm",
            "memory_status",
            "move_to_device",
            "partition_balanced",
            "see_memory_usage",
            "set_random_seed",
        ),
    },
    "deepspeed.runtime.zero.tiling": _TILES,
    "deepspeed.runtime.zero": {**_PARTITION, **_TILES, **_at(_PARAMETERS, "unwrap_model_for_generation")},
    "deepspeed.runtime.zero.config": _at(_RUNTIME, "ZeroStageEnum"),
    "deepspeed.runtime.zero.offload_config": _at(_RUNTIME, "OffloadDeviceEnum", "OffloadStateTypeEnum"),
    "deepspeed.runtime.zero.partition_parameters": {
        **_PARTITION,
        **_ACCELERATOR,
        **_at(
            _PARAMETERS,
            "_orig_torch_arange",
            "is_zero_param",
            "restore_init_context",
            "shutdown_init_context",
            "zero_wrapper_for_fp_tensor_constructor",
        ),
    },
    "deepspeed.runtime.zero.stage3": {
        **_at(_OPTIMIZERS, "DeepSpeedZeroOptimizer_Stage3"),
        **_at("zeroshard.planner.estimators", *_ZERO3_ESTIMATES),
        **_at(_PARAMETERS, "unwrap_model_for_generation"),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        **_at(_OPTIMIZERS, "DeepSpeedZeroOptimizer"),
        **_at("zeroshard.planner.estimators", *_ZERO2_ESTIMATES),
    },
    "deepspeed.runtime.zero.utils": _at(_PARAMETERS, "is_zero_param"),
    "deepspeed.utils": _UTILS,
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.logging": {**_LOGGING, **_at(_MESSAGES, "print_rank_0", "warning_once")},
    "deepspeed.utils.tensor_fragment": _TENSORS,
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": {**_ZERO_TO_FP32, **_at(_FILES, "main")},
}

COMMANDS: Mapping[str, str] = {
    "deepspeed.checkpoint.ds_to_universal": f"{_FILES}:universal_main",
    "deepspeed.env_report": "zeroshard.launch.deepspeed_commands:ds_report",
    "deepspeed.launcher.launch": "zeroshard.launch.deepspeed_commands:deepspeed",
    "deepspeed.launcher.runner": "zeroshard.launch.deepspeed_commands:deepspeed",
    "deepspeed.utils.zero_to_fp32": f"{_FILES}:main",
}
"""What `python -m` of a module runs."""

_LATER = (
    "it is planned and not there yet; train this with ZeRO (stages 1 to 3), or stay with DeepSpeed for it"
)
_INFERENCE = "inference engines are out of scope; serve what `zeroshard export` writes with vLLM or SGLang"
_COMPRESSION = "compression is out of scope; torchao quantises and prunes plain PyTorch modules"
_DATA = "data efficiency is out of scope; do it in the dataset, sampler or model"
_KERNELS = "zeroshard has no kernels of its own; use torch's (scaled_dot_product_attention, fused optimizers)"
_INSIDE = "it is an internal of DeepSpeed; docs/migrate.md has what there is instead"

ABSENT: Mapping[str, str] = {
    "deepspeed.autotuning": "out of scope; `zeroshard estimate` and `zeroshard explain` tell what a setting costs",
    "deepspeed.checkpoint": _INSIDE,
    "deepspeed.compile": "DeepCompile is out of scope; engine.compile() compiles with torch.compile",
    "deepspeed.compression": _COMPRESSION,
    "deepspeed.datastates": _INSIDE,
    "deepspeed.domino": _LATER,
    "deepspeed.elasticity": "use `zeroshard run --num_nodes MIN:MAX --max_restarts N`; checkpoints open anywhere",
    "deepspeed.inference": _INFERENCE,
    "deepspeed.io": _INSIDE,
    "deepspeed.launcher": _INSIDE,
    "deepspeed.linear": "use PEFT: zeroshard trains its adapters at every stage",
    "deepspeed.model_implementations": _INFERENCE,
    "deepspeed.module_inject": _INFERENCE,
    "deepspeed.moe": _LATER,
    "deepspeed.monitor": _INSIDE,
    "deepspeed.nebula": "save_checkpoint with `checkpoint.async` writes in the background",
    "deepspeed.nvme": "offload to NVMe is planned and not there yet",
    "deepspeed.ops": _KERNELS,
    "deepspeed.pipe": _LATER,
    "deepspeed.profiling": "use torch.profiler, or `wall_clock_breakdown` in the config",
    "deepspeed.runtime": _INSIDE,
    "deepspeed.runtime.data_pipeline": _DATA,
    "deepspeed.runtime.domino": _LATER,
    "deepspeed.runtime.pipe": _LATER,
    "deepspeed.runtime.sequence_parallel": _LATER,
    "deepspeed.runtime.tensor_parallel": _LATER,
    "deepspeed.sequence": _LATER,
    "deepspeed.utils": _INSIDE,
}
"""Modules of DeepSpeed of which zeroshard has nothing, or nothing but what MODULES names, with all below them: why,
and where to go."""

ABSENT_NAMES: Mapping[str, str] = {
    "deepspeed.DeepSpeedHybridEngine": _INFERENCE,
    "deepspeed.DeepSpeedInferenceConfig": _INFERENCE,
    "deepspeed.DeepSpeedTransformerConfig": _KERNELS,
    "deepspeed.DeepSpeedTransformerLayer": _KERNELS,
    "deepspeed.InferenceEngine": _INFERENCE,
    "deepspeed.PipelineEngine": _LATER,
    "deepspeed.PipelineModule": _LATER,
    "deepspeed.default_inference_config": _INFERENCE,
    "deepspeed.init_inference": _INFERENCE,
    "deepspeed.set_autotp_mode": _LATER,
    "deepspeed.tp_model_init": _LATER,
}
"""The same of single names of a module."""
