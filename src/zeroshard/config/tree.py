"""`Config`: the whole config as one frozen tree, with DeepSpeed's names and defaults.

Fields have the canonical spelling of a key; other spellings are turned into it before (`aliases.py`).
What consumes each key, or why nothing does, is in the key table (`keys.py`).
"""

from typing import Any, Literal

from pydantic import Field, PrivateAttr

from zeroshard.config import sections
from zeroshard.config.batch import BatchPlan, resolve_batch
from zeroshard.config.scalars import (
    Bool,
    DType,
    FrozenMapping,
    NonNegativeFloat,
    NonNegativeInt,
    Params,
    Period,
    PositiveFloat,
    PositiveInt,
    Strings,
    plain,
)
from zeroshard.config.section import Section
from zeroshard.config.zero import Zero

__all__ = ["BF16", "FP16", "Config", "DataTypes", "Optimizer", "Scheduler"]

DTypeName = Literal["fp32", "fp16", "bf16"]


class Optimizer(Section):
    """`optimizer`: used when `initialize` gets no optimizer. No type: no optimizer."""

    type: str | None = None
    params: Params = Field(default_factory=FrozenMapping)
    """Keyword arguments of the optimizer; read them through `torch_optimizer`."""
    legacy_fusion: Bool = False


class Scheduler(Section):
    """`scheduler`: the learning-rate schedule."""

    type: str | None = None
    params: Params = Field(default_factory=FrozenMapping)


class FP16(Section):
    """`fp16`."""

    enabled: Bool = False
    auto_cast: Bool = False
    loss_scale: NonNegativeFloat = 0.0
    """0 is dynamic."""
    initial_scale_power: NonNegativeInt = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: Bool = False
    min_loss_scale: PositiveFloat = 1.0
    fp16_master_weights_and_grads: Bool = False


class BF16(Section):
    """`bf16`."""

    enabled: Bool = False
    immediate_grad_update: Bool = False
    check_grad_overflow: Bool = True
    bf16_master_weights_and_grads: Bool = False
    bf16_optimizer_states: Bool = False


class DataTypes(Section):
    """`data_types`."""

    grad_accum_dtype: DType | None = None
    param_dtype: DType | None = None
    buffer_dtype: DType | None = None
    keep_in_fp32_modules: Strings = ("auto",)


class TorchAutocast(Section):
    """`torch_autocast`."""

    enabled: Bool = False
    dtype: DType | None = None
    lower_precision_safe_modules: Strings | None = None


class Throughput(Section):
    """`timers.throughput`."""

    enabled: Bool = True
    synchronized: Bool = True


class Timers(Section):
    """`timers`."""

    throughput: Throughput = Field(default_factory=Throughput)


class Config(Section):
    """A parsed config; `zeroshard.config.parse` makes it. Frozen; values are not `"auto"` any more."""

    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    managed_gradient_accumulation: Bool = True
    dataloader_drop_last: Bool = False

    steps_per_print: Period = None
    """Optimizer steps between two progress lines; None is never."""
    wall_clock_breakdown: Bool = False
    memory_breakdown: Bool = False
    dump_state: Bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    timers: Timers = Field(default_factory=Timers)
    vocabulary_size: PositiveInt | None = None
    disable_allgather: Bool = False
    disable_python_gc: Bool = False

    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global L2 norm of the gradient; 0 is no clipping. The default is 1.0, as in DeepSpeed."""
    prescale_gradients: Bool = False
    gradient_predivide_factor: PositiveFloat = 1.0
    gradient_allreduce_op: Literal["mean", "sum"] = "mean"
    communication_data_type: DType | None = None
    seq_parallel_communication_data_type: DType = "fp32"
    sparse_gradients: Bool = False
    use_data_before_expert_parallelism: Bool = False

    optimizer: Optimizer = Field(default_factory=Optimizer)
    zero_allow_untested_optimizer: Bool = False
    zero_force_ds_cpu_optimizer: Bool = True
    scheduler: Scheduler = Field(default_factory=Scheduler)

    fp16: FP16 = Field(default_factory=FP16)
    bf16: BF16 = Field(default_factory=BF16)
    amp: Params = Field(default_factory=FrozenMapping)
    data_types: DataTypes = Field(default_factory=DataTypes)
    torch_autocast: TorchAutocast = Field(default_factory=TorchAutocast)

    zero_optimization: Zero = Field(default_factory=Zero)
    aio: sections.Aio = Field(default_factory=sections.Aio)
    activation_checkpointing: sections.ActivationCheckpointing = Field(
        default_factory=sections.ActivationCheckpointing
    )
    checkpoint: sections.Checkpoint = Field(default_factory=sections.Checkpoint)

    pipeline: sections.Pipeline = Field(default_factory=sections.Pipeline)
    tensor_parallel: sections.TensorParallel = Field(default_factory=sections.TensorParallel)
    sequence_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt | None = None
    expert_parallel: sections.ExpertParallel = Field(default_factory=sections.ExpertParallel)
    compile: sections.Compile = Field(default_factory=sections.Compile)

    comms_logger: sections.CommsLogger = Field(default_factory=sections.CommsLogger)
    flops_profiler: sections.FlopsProfiler = Field(default_factory=sections.FlopsProfiler)
    tensorboard: sections.TensorBoard = Field(default_factory=sections.TensorBoard)
    wandb: sections.Wandb = Field(default_factory=sections.Wandb)
    csv_monitor: sections.CsvMonitor = Field(default_factory=sections.CsvMonitor)
    comet: sections.Comet = Field(default_factory=sections.Comet)
    autotuning: sections.Autotuning = Field(default_factory=sections.Autotuning)

    nebula: sections.Nebula = Field(default_factory=sections.Nebula)
    datastates_ckpt: Params = Field(default_factory=FrozenMapping)
    elasticity: sections.Elasticity = Field(default_factory=sections.Elasticity)
    graph_harvesting: Bool = False
    hybrid_engine: sections.HybridEngine = Field(default_factory=sections.HybridEngine)
    weight_quantization: Params = Field(default_factory=FrozenMapping)
    data_efficiency: Params = Field(default_factory=FrozenMapping)
    curriculum_learning: Params = Field(default_factory=FrozenMapping)
    progressive_layer_drop: Params = Field(default_factory=FrozenMapping)
    eigenvalue: Params = Field(default_factory=FrozenMapping)
    quantize_training: Params = Field(default_factory=FrozenMapping)
    compression_training: Params = Field(default_factory=FrozenMapping)
    sparse_attention: Params = Field(default_factory=FrozenMapping)

    _source: str = PrivateAttr(default="defaults")
    _notes: tuple[str, ...] = PrivateAttr(default=())
    _raw: FrozenMapping = PrivateAttr(default_factory=FrozenMapping)

    @property
    def source(self) -> str:
        """Where the config came from, for messages: `file PATH`, `dict` or `text`."""
        return self._source

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each key that was given and is converted or has no effect. For rank 0 to print."""
        return self._notes

    @property
    def raw(self) -> dict[str, Any]:
        """A new plain dict of what the user gave, spelt as given, with each "auto" resolved."""
        copy: dict[str, Any] = plain(self._raw)
        return copy

    def batch_on(self, world: int, world_origin: str) -> BatchPlan:
        """The batch sizes on `world` ranks; see `resolve_batch`. They may be left to the script."""
        return resolve_batch(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world,
            world_origin,
            source=self.source,
            allow_unset=True,
        )

    @property
    def compute_dtype(self) -> DTypeName:
        """What the model computes in: bf16 or fp16 when that section is enabled, otherwise fp32."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def reduce_dtype(self) -> DTypeName:
        """What gradients are reduced in: `communication_data_type`, by default the compute dtype."""
        return self.communication_data_type or self.compute_dtype

    @property
    def grad_accum_dtype(self) -> DTypeName:
        """What gradients are accumulated in over micro-batches: fp32 unless `data_types` says otherwise."""
        return self.data_types.grad_accum_dtype or "fp32"
