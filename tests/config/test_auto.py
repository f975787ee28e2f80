"""The values that "auto" becomes, and the one error for what cannot be resolved."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import AutoFacts, parse, resolve_auto, resolve_batch
from zeroshard.errors import ConfigError, UnknownKeyError

HF = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": "auto",
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_param": {"device": "auto"},
    },
}
FACTS = AutoFacts(
    hidden_size=1024,
    lr=2e-5,
    betas=(0.9, 0.95),
    eps=1e-6,
    weight_decay=0.1,
    micro_batch_size=2,
    accumulation_steps=4,
    world=8,
    max_steps=500,
    warmup_steps=10,
    precision="bf16",
)


def test_a_trainer_config_is_fully_resolved() -> None:
    config = parse(HF, facts=FACTS)
    assert config.bf16.enabled
    assert not config.fp16.enabled
    assert config.gradient_clipping == 1.0
    assert config.optimizer.params["betas"] == (0.9, 0.95)
    assert dict(config.optimizer.params) | {"betas": None} == {
        "lr": 2e-5,
        "betas": None,
        "eps": 1e-6,
        "weight_decay": 0.1,
    }
    assert dict(config.scheduler.params) == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 2e-5,
        "warmup_num_steps": 10,
        "total_num_steps": 500,
    }
    zero = config.zero_optimization
    assert zero.reduce_bucket_size == 1024 * 1024
    assert zero.stage3_prefetch_bucket_size == 943_718
    assert zero.stage3_param_persistence_threshold == 10_240
    assert zero.overlap_comm is None
    assert zero.offload_param.device == "none"
    assert config.train_batch_size == 2 * 4 * 8
    assert HF["train_batch_size"] == "auto", "the user's dict was changed"
    assert "auto" not in str(config.raw)
    assert config.raw["zero_optimization"]["param_persistence_threshold"] == 10_240


def test_everything_unresolved_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(HF)
    message = str(caught.value)
    for path, needs in {
        "train_batch_size": "micro_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "bf16.enabled": "precision",
        "fp16.enabled": "precision",
        "optimizer.params.lr": "lr",
        "optimizer.params.betas": "betas",
        "scheduler.params.total_num_steps": "max_steps",
        "scheduler.params.warmup_num_steps": "warmup_steps",
        "zero_optimization.reduce_bucket_size": "hidden_size or num_parameters",
        "zero_optimization.stage3_param_persistence_threshold": "hidden_size or num_parameters",
    }.items():
        assert f"\n  {path}: needs {needs}" in message
    for path in ("gradient_clipping", "overlap_comm", "gather_16bit", "device"):
        assert path not in message


def test_the_peak_rate_of_a_warm_up_may_stay_open() -> None:
    """Absent, it is the optimizer's own rate: unknown to the config, and no error."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    assert dict(parse({"scheduler": scheduler}).scheduler.params) == {}
    assert dict(parse({"scheduler": scheduler}, facts=AutoFacts(lr=0.5)).scheduler.params) == {
        "warmup_max_lr": 0.5
    }


def test_not_strict_takes_defaults() -> None:
    config = parse(resolve_auto(HF, AutoFacts(), strict=False))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.train_batch_size is None


def test_size_of_the_model_bounds_buckets_when_the_width_is_unknown() -> None:
    data: dict[str, Any] = {
        "zero_optimization": {"reduce_bucket_size": "auto", "prefetch_bucket_size": "auto"}
    }
    zero = parse(data, facts=AutoFacts(num_parameters=1_000_000)).zero_optimization
    assert zero.reduce_bucket_size == 1_000_000
    assert zero.stage3_prefetch_bucket_size == 1_000_000


def test_stage_and_types_have_no_fact() -> None:
    data = {"zero_optimization": {"stage": "auto"}, "optimizer": {"type": "auto"}}
    with pytest.raises(ConfigError, match=r"(?s)stage: no fact says this; write 0.*optimizer\.type: no fact"):
        parse(data, facts=FACTS)


def test_unknown_key_with_auto_is_still_unknown() -> None:
    with pytest.raises(UnknownKeyError, match="reduce_bucket_size"):
        parse({"zero_optimization": {"reduce_bucket_sise": "auto"}}, facts=FACTS)


def test_old_section_name() -> None:
    assert parse({"bfloat16": {"enabled": "auto"}}, facts=FACTS).bf16.enabled


def test_clipping_from_the_facts() -> None:
    assert parse({"gradient_clipping": "auto"}, facts=AutoFacts(max_grad_norm=0.5)).gradient_clipping == 0.5


@pytest.mark.parametrize(
    ("keys", "facts", "expected"),
    [
        # Two given: the third is derived, whatever the facts say.
        (("auto", 2, 3), AutoFacts(micro_batch_size=9, accumulation_steps=9), (24, 2, 3)),
        ((24, "auto", 3), AutoFacts(micro_batch_size=9), (24, 2, 3)),
        ((24, 2, "auto"), AutoFacts(accumulation_steps=9), (24, 2, 3)),
        ((24, "auto", "auto"), AutoFacts(micro_batch_size=2), (24, 2, 3)),
        ((24, "auto", "auto"), AutoFacts(accumulation_steps=3), (24, 2, 3)),
        ((24, "auto", "auto"), AutoFacts(), (24, 6, 1)),
        (("auto", "auto", "auto"), AutoFacts(micro_batch_size=2, accumulation_steps=3), (24, 2, 3)),
        (("auto", "auto", 3), AutoFacts(micro_batch_size=2), (24, 2, 3)),
        (("auto", 2, "auto"), AutoFacts(), (8, 2, 1)),
    ],
)
def test_batch_keys(keys: tuple[Any, ...], facts: AutoFacts, expected: tuple[int, int, int]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = parse(dict(zip(names, keys, strict=True)), facts=facts)
    plan = resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        4,
        "test",
    )
    assert (plan.train_batch_size, plan.micro_batch_size, plan.accumulation_steps) == expected
