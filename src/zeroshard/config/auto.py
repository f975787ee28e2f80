"""`"auto"`: values that the user leaves to whoever knows the model and the training arguments.

The rules are those of the Hugging Face integration. A key without a rule takes its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zeroshard.config.aliases import canonical_path
from zeroshard.config.batch import MICRO, STEPS, TOTAL
from zeroshard.config.keys import BY_PATH, SECTIONS
from zeroshard.config.scalars import plain
from zeroshard.errors import ConfigError

__all__ = ["AutoFacts", "resolve_auto"]


@dataclass(frozen=True, kw_only=True)
class AutoFacts:
    """What is known about a run; None is not known."""

    hidden_size: int | None = None
    """Width of the model (of a composite model: the largest)."""
    num_parameters: int | None = None
    """Elements of the model; bounds the buckets when the width is not known."""
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    micro_batch_size: int | None = None
    """Samples per rank and forward."""
    accumulation_steps: int | None = None
    world: int | None = None
    """Data-parallel ranks."""
    max_grad_norm: float | None = None
    max_steps: int | None = None
    """Optimizer steps of the whole run."""
    warmup_steps: int | None = None
    precision: Literal["fp32", "fp16", "bf16"] | None = None


@dataclass(frozen=True, kw_only=True)
class _Unknown:
    """Stands for a value that cannot be resolved; says what would."""

    cure: str


class _Default:
    """Stands for: remove the key, its default is right."""


Rule = Callable[[AutoFacts], Any]
_DEFAULT = _Default()


def _fact(name: str) -> Rule:
    def rule(facts: AutoFacts) -> Any:
        value = getattr(facts, name)
        return _Unknown(cure=f"needs {name}") if value is None else value

    return rule


def _sized(of_hidden: Callable[[int], int], default: int, *, bounded: bool = True) -> Rule:
    def rule(facts: AutoFacts) -> Any:
        if facts.hidden_size is not None:
            return of_hidden(facts.hidden_size)
        if facts.num_parameters is not None:
            # A bucket beyond the model's size would only cost memory.
            return min(default, facts.num_parameters) if bounded else default
        return _Unknown(cure="needs hidden_size or num_parameters")

    return rule


def _enabled(precision: str) -> Rule:
    def rule(facts: AutoFacts) -> Any:
        return _Unknown(cure="needs precision") if facts.precision is None else facts.precision == precision

    return rule


_ZERO = "zero_optimization"
_RULES: dict[str, Rule] = {
    f"{_ZERO}.reduce_bucket_size": _sized(lambda hidden: hidden * hidden, 500_000_000),
    f"{_ZERO}.stage3_prefetch_bucket_size": _sized(lambda hidden: int(0.9 * hidden * hidden), 50_000_000),
    f"{_ZERO}.stage3_param_persistence_threshold": _sized(lambda hidden: 10 * hidden, 100_000, bounded=False),
    f"{_ZERO}.stage": lambda facts: _Unknown(cure="no fact says this; write 0, 1, 2 or 3"),
    "optimizer.type": lambda facts: _Unknown(cure="no fact says this; write a name such as AdamW"),
    "optimizer.params.lr": _fact("lr"),
    "optimizer.params.betas": _fact("betas"),
    "optimizer.params.eps": _fact("eps"),
    "optimizer.params.weight_decay": _fact("weight_decay"),
    "scheduler.type": lambda facts: _Unknown(cure="no fact says this; write a name such as WarmupLR"),
    "scheduler.params.warmup_min_lr": lambda facts: 0,
    # Its default is the optimizer's lr, so nothing is missing where lr is not known.
    "scheduler.params.warmup_max_lr": lambda facts: _DEFAULT if facts.lr is None else facts.lr,
    "scheduler.params.warmup_num_steps": _fact("warmup_steps"),
    "scheduler.params.total_num_steps": _fact("max_steps"),
    "gradient_clipping": lambda facts: 1.0 if facts.max_grad_norm is None else facts.max_grad_norm,
    "fp16.enabled": _enabled("fp16"),
    "bf16.enabled": _enabled("bf16"),
}


@dataclass(kw_only=True)
class _Walk:
    facts: AutoFacts
    unknown: dict[str, str] = field(default_factory=dict)


def resolve_auto(
    raw: Mapping[str, Any], facts: AutoFacts, *, source: str = "config", strict: bool = True
) -> dict[str, Any]:
    """A copy of `raw` in which no known key is "auto" any more; spelling and unknown keys are left alone.

    Buckets follow the width h of the model: `reduce_bucket_size` h*h, `stage3_prefetch_bucket_size` 0.9*h*h,
    `stage3_param_persistence_threshold` 10*h (1024: 1048576, 943718 and 10240 elements). Optimizer and
    schedule values come from the facts. Batch keys follow from one another (`resolve_batch` does that) or
    come from the facts. `gradient_clipping` is 1.0. Every other key takes its default.

    Args:
        raw: the config as it was read.
        source: where it came from, for the message.
        strict: False gives unresolved keys their default instead of raising: for a config that is read
            before the facts are there, such as the one of a sharded construction.

    Raises:
        ConfigError: some keys cannot be resolved. It lists all of them and the fact that each needs.
    """
    data: dict[str, Any] = plain(raw)
    walk = _Walk(facts=facts)
    _resolve_batch_keys(data, walk)
    _resolve_section(data, "", walk)
    if walk.unknown and strict:
        lines = "".join(f"\n  {path}: {cure}" for path, cure in walk.unknown.items())
        raise ConfigError(
            f'{source}: "auto" must be resolved before training, and nothing given says how; '
            f"write a value; the trainers of transformers and accelerate fill in theirs{lines}"
        )
    return data


def _resolve_batch_keys(data: dict[str, Any], walk: _Walk) -> None:
    """Auto batch keys: derived if the other keys determine them, otherwise taken from the facts."""
    auto = [key for key in (TOTAL, MICRO, STEPS) if data.get(key) == "auto"]
    for key in auto:
        del data[key]
    determined = {TOTAL: (MICRO,), MICRO: (TOTAL,), STEPS: (TOTAL, MICRO)}
    known = {MICRO: walk.facts.micro_batch_size, STEPS: walk.facts.accumulation_steps}
    for key in (MICRO, STEPS):
        others = [data.get(other) for other in (TOTAL, MICRO, STEPS) if other != key]
        if key in auto and known[key] is not None and None in others:
            data[key] = known[key]
    if auto and all(data.get(key) is None for key in (TOTAL, MICRO)):
        for key in auto:
            if any(data.get(other) is None for other in determined[key]) and key != STEPS:
                walk.unknown[key] = "needs micro_batch_size"
    micro, steps, world = data.get(MICRO), data.get(STEPS), walk.facts.world
    if TOTAL in auto and isinstance(micro, int) and isinstance(steps, int) and world is not None:
        data[TOTAL] = micro * steps * world


def _resolve_section(section: dict[str, Any], prefix: str, walk: _Walk) -> None:
    for name in list(section):
        path = canonical_path(prefix + name)
        value = section[name]
        if isinstance(value, dict):
            _resolve_section(value, f"{path}.", walk)
        elif value == "auto" and _known(path):
            rule = _RULES.get(path)
            resolved = _DEFAULT if rule is None else rule(walk.facts)
            if isinstance(resolved, (_Unknown, _Default)):
                del section[name]
            else:
                section[name] = list(resolved) if isinstance(resolved, tuple) else resolved
            if isinstance(resolved, _Unknown):
                walk.unknown[path] = resolved.cure


def _known(path: str) -> bool:
    # An unknown key keeps its "auto", so that it is reported as unknown and not dropped.
    return path in BY_PATH or path in SECTIONS or path.startswith(("optimizer.params.", "scheduler.params."))
