"""The `zero_optimization` section. Sizes are in elements unless a field says otherwise."""

import sys
from typing import Literal

from pydantic import Field

from zeroshard.config.scalars import (
    Bool,
    Int,
    IntOrAuto,
    NonNegativeInt,
    PositiveInt,
    Ratio,
    Stage,
    Strings,
)
from zeroshard.config.section import Section

__all__ = ["LeafModule", "OffloadOptimizer", "OffloadParam", "ZenFlow", "Zero", "ZeroPPLoco"]

Device = Literal["none", "cpu", "nvme"]


class LeafModule(Section):
    """`zero_optimization.leaf_module`: modules that are gathered as one unit, with all they contain."""

    classes: Strings = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    names: Strings = ()
    name_suffixes: Strings = ()


class OffloadParam(Section):
    """`zero_optimization.offload_param`: where parameter shards live between uses."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 5
    buffer_size: NonNegativeInt = 100_000_000
    max_in_cpu: NonNegativeInt = 1_000_000_000
    pin_memory: Bool = True


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`: where masters, moments and gradients live."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: NonNegativeInt = 4
    pin_memory: Bool = True
    pipeline_read: Bool = False
    pipeline_write: Bool = False
    fast_init: Bool = False
    ratio: Ratio = 1.0
    super_offload: Bool = False
    cpuadam_cores_perc: Ratio = 0.8


class ZenFlow(Section):
    """`zero_optimization.zenflow`; its presence switches it on."""

    topk_ratio: Ratio = 0.1
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: IntOrAuto = "auto"
    update_interval: IntOrAuto = "auto"
    overlap_step: Bool = False
    offload: Bool = False
    auto_ratio: Ratio = 0.99
    full_warm_up_rounds: NonNegativeInt = 0
    pt_reserved_cores_perc: Ratio = 0.5
    steps_per_epoch: PositiveInt | None = None


class ZeroPPLoco(Section):
    """`zero_optimization.zeropp_loco_param`."""

    err_beta: Ratio = 0.8
    reset_T: PositiveInt = 1024


class Zero(Section):
    """`zero_optimization`: the stage, and what the schedule is compiled from."""

    stage: Stage = 0
    contiguous_gradients: Bool = True
    reduce_scatter: Bool = True
    reduce_bucket_size: PositiveInt = 500_000_000
    use_multi_rank_bucket_allreduce: Bool = True
    allgather_partitions: Bool = True
    allgather_bucket_size: NonNegativeInt = 500_000_000
    overlap_comm: Bool | None = None
    load_from_fp32_weights: Bool = True
    elastic_checkpoint: Bool = False
    sub_group_size: NonNegativeInt = 1_000_000_000
    ignore_unused_parameters: Bool = True
    legacy_stage1: Bool = False
    round_robin_gradients: Bool = False
    grad_hooks: Bool | None = None

    stage3_prefetch_bucket_size: NonNegativeInt = 50_000_000
    stage3_param_persistence_threshold: NonNegativeInt = 100_000
    stage3_model_persistence_threshold: NonNegativeInt = sys.maxsize
    stage3_max_live_parameters: NonNegativeInt = 1_000_000_000
    stage3_max_reuse_distance: NonNegativeInt = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: Bool = False
    stage3_module_granularity_threshold: NonNegativeInt = 0
    stage3_use_all_reduce_for_fetch_params: Bool = False
    stage3_allgather_sequential: Bool = False
    pipeline_loading_checkpoint: Bool = False
    memory_efficient_linear: Bool = True
    override_module_apply: Bool = True
    log_trace_cache_warnings: Bool = False
    enable_sanity_checks: Bool = False
    leaf_module: LeafModule = Field(default_factory=LeafModule)

    save_muon_momentum_buffer_in_memory: Bool = False
    compute_grad_norm: Bool = True
    parameter_alignment: Bool = False
    offload_param: OffloadParam = Field(default_factory=OffloadParam)
    offload_optimizer: OffloadOptimizer = Field(default_factory=OffloadOptimizer)
    zenflow: ZenFlow | None = None
    zero_hpz_partition_size: NonNegativeInt = 1
    zero_quantized_weights: Bool = False
    zero_quantized_nontrainable_weights: Bool = False
    zero_quantized_gradients: Bool = False
    zeropp_loco_param: ZeroPPLoco | None = None
    mics_shard_size: Int = -1
    mics_hierarchical_params_gather: Bool = False
