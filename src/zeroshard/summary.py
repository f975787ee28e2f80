"""What a run is going to do, in a few lines, before it does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroshard.compiling import compiled_units
from zeroshard.config import Config
from zeroshard.mixed_precision import Precision
from zeroshard.precision import dtype_name
from zeroshard.wording import first_few

__all__ = ["summary"]


def summary(engine: Any) -> str:
    """Stage, ranks, sizes, dtypes, batch, optimizer, schedule, clipping and loss scale of an engine."""
    policy, config = engine.policy, engine._config
    rows = {
        "ZeRO stage": f"{policy.stage} on {policy.world} rank(s) of {engine.device.type}"
        + (f": {policy.axes}" if policy.axes else ""),
        "parameters": f"{engine.layout.numel:,} in {len(engine.layout.buckets)} buckets, "
        f"{engine.layout.padding:,} elements of padding",
        "dtypes": _dtypes(engine),
        "batch": _batch(engine),
        "optimizer": _optimizer(engine),
        "schedule": type(engine.lr_scheduler).__name__ if engine.lr_scheduler is not None else "none",
        "clipping": _clipping(config),
        "not finite": _not_finite(engine),
    }
    compiled = compiled_units(engine.module)
    if compiled:
        rows["compiled"] = _compiled(compiled)
    return "\n".join(f"{name:12}{text}" for name, text in rows.items())


def _dtypes(engine: Any) -> str:
    config = engine._config
    precision = Precision.of(config)
    wide = engine.policy.wide_masters
    if precision.autocast is not None:
        compute = f"autocast to {dtype_name(precision.autocast)}, masters fp32"
    elif precision.compute is None:
        compute = "as the model has them; inputs are not cast"
    else:
        compute = (
            f"{config.compute_dtype}, masters {'fp32' if wide else config.compute_dtype}; floating-point "
        )
        compute += "inputs are cast"
    kept = precision.kept_modules(engine.module)
    if kept:
        compute += f"; kept in fp32: {first_few(kept, 3)}"
    buffers = config.data_types.buffer_dtype
    return compute + (f"; module buffers {buffers}" if buffers else "; module buffers as they are")


def _compiled(names: Sequence[str]) -> str:
    what = (
        "the whole model"
        if names == [""]
        else f"{len(names)} modules ({names[0]}{', ...' if names[1:] else ''})"
    )
    return f"{what}; graphs are broken where weights come and go, and compiled in the first step only"


def _batch(engine: Any) -> str:
    total, micro, steps = engine.get_batch_info()
    if total is None:
        return f"{steps} micro-batch(es) per step; sizes are the script's"
    return f"{total} samples = {micro} per forward x {steps} micro-batch(es) x {engine.policy.world} rank(s)"


def _optimizer(engine: Any) -> str:
    if engine.optimizer is None:
        return "none: nothing is trained"
    rates = ", ".join(f"{rate:g}" for rate in engine.get_lr())
    return f"{type(engine.optimizer).__name__}, lr {rates}"


def _clipping(config: Config) -> str:
    limit = config.gradient_clipping
    if not limit:
        return "off"
    given = "gradient_clipping" in config.model_fields_set
    return f"global norm {limit:g}" + ("" if given else " (the default, as in DeepSpeed; 0 turns it off)")


def _not_finite(engine: Any) -> str:
    scale = engine.loss_scale()
    if engine.dynamic_loss_scale():
        return f"a step with such gradients is skipped; dynamic loss scale, now {scale:g}"
    if engine._config.bf16.enabled and not engine._config.bf16.check_grad_overflow:
        return "applied with a warning (bf16.check_grad_overflow is false)"
    if engine._config.compute_dtype == "fp32" and scale == 1.0 and not _knows_norm(engine._config):
        return "not looked at, since compute_grad_norm is false"
    fixed = f"; static loss scale {scale:g}" if scale != 1.0 else ""
    return f"a step with such gradients is skipped, 10 in a row are an error{fixed}"


def _knows_norm(config: Config) -> bool:
    return config.gradient_clipping > 0 or config.zero_optimization.compute_grad_norm
