"""The sections that later releases (or none) consume. They are here so that every config can be read today.

What each key means, and why it is not in effect, is in the key table (`later_keys.py`).
"""

from typing import Any, Literal

from pydantic import Field

from zeroshard.config.scalars import (
    Bool,
    DType,
    Float,
    FloatOrAuto,
    Int,
    IntOrAuto,
    NonNegativeFloat,
    NonNegativeInt,
    Params,
    PositiveInt,
    Strings,
)
from zeroshard.config.section import Section

__all__ = [
    "ActivationCheckpointing",
    "Aio",
    "Autotuning",
    "Checkpoint",
    "Comet",
    "CommsLogger",
    "Compile",
    "CsvMonitor",
    "Elasticity",
    "ExpertParallel",
    "FlopsProfiler",
    "HybridEngine",
    "Nebula",
    "Pipeline",
    "TensorBoard",
    "TensorParallel",
    "Wandb",
]


class Aio(Section):
    """`aio`: asynchronous file I/O for NVMe offload. Sizes are in bytes."""

    block_size: PositiveInt = 1_048_576
    queue_depth: PositiveInt = 8
    intra_op_parallelism: PositiveInt = 1
    single_submit: Bool = False
    overlap_events: Bool = True
    use_gds: Bool = False


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: how `zeroshard.checkpointing.checkpoint` works."""

    partition_activations: Bool = False
    cpu_checkpointing: Bool = False
    contiguous_memory_optimization: Bool = False
    number_checkpoints: PositiveInt | None = None
    synchronize_checkpoint_boundary: Bool = False
    profile: Bool = False


class Pipeline(Section):
    """`pipeline`."""

    stages: IntOrAuto = "auto"
    partition: str = "best"
    seed_layers: Bool = False
    activation_checkpoint_interval: NonNegativeInt = 0
    pipe_partitioned: Bool = True
    grad_partitioned: Bool = True
    use_reentrant: Bool = True


class TensorParallelGroup(Section):
    """`tensor_parallel.tensor_parallel`."""

    tp_size: PositiveInt = 1
    tp_grain_size: PositiveInt = 1
    mpu: Any = None
    tp_group: Any = None


class LayerSpec(Section):
    """One of `tensor_parallel.partition_config.layer_specs`."""

    patterns: Strings = ()
    partition_type: Literal["row", "column", "skip"] = "column"
    shape: tuple[Any, ...] | None = None
    partition_dim: Int | None = None
    model_types: Strings | None = None
    gather_output: Bool = False
    grad_allreduce: Bool = False


class PartitionConfig(Section):
    """`tensor_parallel.partition_config`; its presence switches it on."""

    use_default_specs: Bool = True
    layer_specs: tuple[LayerSpec, ...] = ()
    tp_size: PositiveInt = 1
    embedding_partition_dim: Int = 1
    lm_head_patterns: Strings = ("lm_head", "embed_out")
    strict_mode: Bool = False


class TensorParallel(Section):
    """`tensor_parallel`: the sharding of single weights."""

    autotp_size: NonNegativeInt = 0
    dtype: DType = "fp16"
    tp_overlap_comm: Bool = False
    tensor_parallel: TensorParallelGroup = Field(default_factory=TensorParallelGroup)
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = (
        None
    )
    partition_config: PartitionConfig | None = None
    injection_policy_tuple: Any = None
    keep_module_on_host: Bool = False
    replace_with_kernel_inject: Bool = False
    vocab_parallel_lm_head: Bool | None = None
    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Bool = False


class Writer(Section):
    """`checkpoint.writer`; its presence switches it on. Sizes are in bytes."""

    type: Literal["mock", "python", "fast"] = "fast"
    io_buffer_size: PositiveInt = 67_108_864
    io_buffer_double: Bool = True
    io_multiplier: PositiveInt = 1
    show_statistics: Bool = False
    data_parallel: Literal["replica", "socket", "machine"] | None = None
    decoupled: Bool = False


class Checkpoint(Section):
    """`checkpoint`."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = "Warn"
    load_universal: Bool = False
    use_node_local_storage: Bool = False
    parallel_write: ParallelWrite = Field(default_factory=ParallelWrite)
    checkpoint_serialization: Bool = True
    writer: Writer | None = None
    keep_last: NonNegativeInt = 0
    keep_every: NonNegativeInt = 0


class Nebula(Section):
    """`nebula`."""

    enabled: Bool = False
    persistent_storage_path: str | None = None
    persistent_time_interval: PositiveInt = 100
    num_of_version_in_retention: PositiveInt = 2
    enable_nebula_load: Bool = True
    nebula_load_path: str | None = None


LOGGED_AS: dict[str, str | None] = {
    **{name: name for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "sum_to_host")},
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_coalesced", "allgather_fn"), "all_gather"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_fn"), "reduce_scatter"),
    **dict.fromkeys(("all_reduce_coalesced", "inference_all_reduce"), "all_reduce"),
    "broadcast_object_list": "broadcast",
    **dict.fromkeys(("all_gather_object", "all_to_all", "all_to_all_single", "barrier", "gather"), None),
    **dict.fromkeys(("irecv", "isend", "monitored_barrier", "recv", "reduce", "scatter", "send"), None),
}
"""What `prof_ops` may name, and the collective of the seam that it is here; None is never launched by an engine."""


class CommsLogger(Section):
    """`comms_logger`."""

    enabled: Bool = False
    verbose: Bool = False
    prof_all: Bool = True
    debug: Bool = False
    prof_ops: Strings = ()


class FlopsProfiler(Section):
    """`flops_profiler`."""

    enabled: Bool = False
    recompute_fwd_factor: NonNegativeFloat = 0.0
    profile_step: NonNegativeInt = 1
    module_depth: Int = -1
    top_modules: PositiveInt = 1
    detailed: Bool = True
    output_file: str | None = None


class TensorBoard(Section):
    """`tensorboard`."""

    enabled: Bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Wandb(Section):
    """`wandb`."""

    enabled: Bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CsvMonitor(Section):
    """`csv_monitor`."""

    enabled: Bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class Comet(Section):
    """`comet`."""

    enabled: Bool = False
    samples_log_interval: PositiveInt = 100
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: Bool | None = None
    mode: str | None = None


class ModelInfo(Section):
    """`autotuning.model_info`."""

    profile: Bool = False
    num_params: NonNegativeInt | None = None
    hidden_size: NonNegativeInt | None = None
    num_layers: NonNegativeInt | None = None


class Autotuning(Section):
    """`autotuning`."""

    enabled: Bool = False
    fast: Bool = True
    results_dir: str = "autotuning_results"
    exps_dir: str = "autotuning_exps"
    overwrite: Bool = True
    start_profile_step: NonNegativeInt = 3
    end_profile_step: NonNegativeInt = 5
    metric: Literal["throughput", "latency", "flops"] = "throughput"
    metric_path: str | None = None
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"
    tuner_early_stopping: PositiveInt = 5
    tuner_num_trials: PositiveInt = 50
    arg_mappings: Params | None = None
    model_info: ModelInfo = Field(default_factory=ModelInfo)
    model_info_path: str | None = None
    mp_size: PositiveInt = 1
    max_train_batch_size: PositiveInt | None = None
    min_train_batch_size: PositiveInt = 1
    max_train_micro_batch_size_per_gpu: PositiveInt = 1024
    min_train_micro_batch_size_per_gpu: PositiveInt = 1
    num_tuning_micro_batch_sizes: PositiveInt = 3


class Elasticity(Section):
    """`elasticity`."""

    enabled: Bool = False
    max_train_batch_size: PositiveInt = 2000
    micro_batch_sizes: tuple[PositiveInt, ...] = (2, 4, 6)
    min_gpus: PositiveInt = 1
    max_gpus: PositiveInt = 10_000
    min_time: NonNegativeInt = 0
    prefer_larger_batch: Bool = True
    ignore_non_elastic_batch_info: Bool = False
    version: NonNegativeFloat = 0.2
    num_gpus_per_node: PositiveInt = 1
    model_parallel_size: PositiveInt = 1


class Compile(Section):
    """`compile`: the graph passes of DeepCompile."""

    deepcompile: Bool = False
    free_activation: Bool = False
    free_activation_threshold: NonNegativeInt = 10_485_760
    offload_activation: Bool = False
    offload_activation_pin_memory: Bool = True
    offload_opt_states: Bool = False
    double_buffer: Bool = True
    symmetric_memory: Bool = False
    debug_log: Bool = False
    offload_parameters: Bool = False
    sync_before_reduce: Bool = False
    sync_after_reduce: Bool = False
    sync_before_allgather: Bool = False
    sync_after_allgather: Bool = False
    keep_int_input_tensors: Bool = True
    keep_all_input_tensors: Bool = False
    passes: tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None = None
    autoep_non_moe: Bool = False


class HybridEngine(Section):
    """`hybrid_engine`."""

    enabled: Bool = False
    max_out_tokens: PositiveInt = 512
    inference_tp_size: PositiveInt = 1
    release_inference_cache: Bool = False
    pin_parameters: Bool = True
    tp_gather_partition_size: PositiveInt = 8
    enable_cuda_graph: Bool = False


class ExpertParallel(Section):
    """`expert_parallel`."""

    enabled: Bool = False
    autoep_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt = 1
    validate_folding_routing: Bool = False
    preset_model: Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"] | None = None
    moe_layer_pattern: str | None = None
    expert_pattern: str | None = None
    router_pattern: str | None = None
    use_grouped_mm: Bool = True
    disable_triton_grouped_mm: Bool = False
    route_norm: Bool | None = None
    route_scale: Float = 1.0
    score_apply: Literal["auto", "pre", "post"] = "auto"
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = "auto"
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto"
    top_k: IntOrAuto = "auto"
    routed_scaling_factor: FloatOrAuto = "auto"
    num_expert_groups: PositiveInt | None = None
    num_limited_groups: PositiveInt | None = None
    load_balance_coeff: None = None
    expert_w1: str | None = None
    expert_w2: str | None = None
    expert_w3: str | None = None
    num_experts_attr: str | None = None
    top_k_attr: str | None = None
    has_shared_experts: Bool | None = None
    shared_experts_pattern: str | None = None
    shared_experts_gate_pattern: str | None = None
