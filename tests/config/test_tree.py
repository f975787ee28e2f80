"""The tree: values are checked strictly, all problems come in one error, unknown keys get a suggestion."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pydantic
import pytest

from zeroshard.config import Config, FrozenMapping, parse
from zeroshard.errors import ConfigError, UnknownKeyError

CONFIGS = sorted((Path(__file__).parent / "data" / "configs").glob("*.json"))


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def message_of(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert not isinstance(caught.value, pydantic.ValidationError)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_published_configs_parse_as_they_stand(path: Path) -> None:
    config = parse(path)
    assert config.source == f"file {path}"
    assert "auto" not in repr(config.zero_optimization)


def test_there_are_published_configs() -> None:
    assert len(CONFIGS) == 10


def test_values_of_a_published_config() -> None:
    config = parse(Path(__file__).parent / "data" / "configs" / "zero3_production_with_comments.json")
    assert config.zero_optimization.stage == 3
    assert config.zero_optimization.stage3_max_live_parameters == 10**9
    assert type(config.zero_optimization.stage3_prefetch_bucket_size) is int
    assert config.zero_optimization.offload_param.device == "cpu"


def test_defaults_are_those_of_deepspeed() -> None:
    config = parse({})
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert config.zero_optimization.stage3_prefetch_bucket_size == 50_000_000
    assert config.zero_optimization.overlap_comm is None
    assert config.optimizer.type is None
    assert config.train_batch_size is None
    assert config.notes == ()


def test_frozen_all_the_way_down() -> None:
    config = parse({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}}})
    with pytest.raises(pydantic.ValidationError):
        config.gradient_clipping = 2.0  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError):
        config.zero_optimization.stage = 2  # type: ignore[misc]
    assert isinstance(config.optimizer.params, FrozenMapping)
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 1.0  # type: ignore[index]
    assert config.optimizer.params["betas"] == (0.9, 0.99)


def test_copies_keep_source_and_values() -> None:
    config = parse({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other.optimizer.params["lr"] == 0.1
        assert other.source == "dict"
    assert parse(config) is config


def test_raw_is_what_was_given_and_fresh_each_time() -> None:
    config = parse(zero(stage=3, prefetch_bucket_size=7))
    assert config.raw == {"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}}
    config.raw.clear()
    assert config.raw["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("value", [5e8, 500_000_000])
def test_integral_floats_are_integers(value: float) -> None:
    size = parse(zero(reduce_bucket_size=value)).zero_optimization.reduce_bucket_size
    assert size == 500_000_000
    assert type(size) is int


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("3", "a number, not a string; remove the quotes"),
        (True, "must be a number"),
        (1.5, "must be a whole number; write 2"),
        (-1, "must be at least 1"),
        (0, "must be at least 1"),
        (None, "must be a number"),
        ([1], "must be a number"),
        (math.inf, "finite"),
        (math.nan, "finite"),
    ],
    ids=str,
)
def test_what_is_not_an_integer(value: Any, words: str) -> None:
    message = message_of(zero(reduce_bucket_size=value))
    assert message.startswith("dict: zero_optimization.reduce_bucket_size = ")
    assert words in message


@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_what_is_not_a_boolean(value: Any) -> None:
    assert "bf16.enabled" in message_of({"bf16": {"enabled": value}})


@pytest.mark.parametrize("value", [True, "1.0", -0.5, None])
def test_what_is_not_a_clipping_norm(value: Any) -> None:
    assert "gradient_clipping" in message_of({"gradient_clipping": value})


@pytest.mark.parametrize("stage", [-1, 4, 1.5, "3", True, None])
def test_stage_is_0_to_3(stage: Any) -> None:
    message = message_of(zero(stage=stage))
    assert "zero_optimization.stage" in message
    assert "must be 0, 1, 2 or 3" in message


@pytest.mark.parametrize("stage", [0, 1, 2, 3, 3.0])
def test_stages(stage: float) -> None:
    assert parse(zero(stage=stage)).zero_optimization.stage == stage


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("fp32", "fp32"),
        ("FP32", "fp32"),
        ("float", "fp32"),
        ("torch.bfloat16", "bf16"),
        ("Half", "fp16"),
        ("float32", "fp32"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("bf16", "bf16"),
    ],
)
def test_dtype_spellings(spelling: str, dtype: str) -> None:
    config = parse({"data_types": {"grad_accum_dtype": spelling}, "communication_data_type": spelling})
    assert config.grad_accum_dtype == config.reduce_dtype == dtype


def test_dtype_that_does_not_exist() -> None:
    message = message_of({"communication_data_type": "fp8"})
    assert 'communication_data_type = "fp8"' in message
    assert "'fp32', 'fp16' or 'bf16'" in message


def test_dtype_objects_are_known_by_their_name() -> None:
    class TorchDtype:
        def __str__(self) -> str:
            return "torch.float16"

    assert parse({"data_types": {"grad_accum_dtype": TorchDtype()}}).grad_accum_dtype == "fp16"


def test_derived_dtypes() -> None:
    assert parse({}).compute_dtype == "fp32"
    config = parse({"bf16": {"enabled": True}})
    assert (config.compute_dtype, config.reduce_dtype, config.grad_accum_dtype) == ("bf16", "bf16", "fp32")
    assert parse({"fp16": {"enabled": True}}).compute_dtype == "fp16"


def test_enums_ignore_case() -> None:
    config = parse(
        {"gradient_allreduce_op": "MEAN", "log_level": "Info", "checkpoint": {"tag_validation": "WARN"}}
    )
    assert config.gradient_allreduce_op == "mean"
    assert config.log_level == "info"
    assert config.checkpoint.tag_validation == "Warn"


def test_steps_per_print_infinity_is_never() -> None:
    assert parse({"steps_per_print": math.inf}).steps_per_print is None
    assert parse({"steps_per_print": 10}).steps_per_print == 10


def test_null_sections_are_absent() -> None:
    config = parse(
        {
            "bf16": None,
            "bfloat16": None,
            "amp": None,
            "optimizer": {"params": None},
            "zero_optimization": {"offload_param": None},
        }
    )
    assert config.zero_optimization.offload_param.device == "none"


def test_one_error_lists_every_problem() -> None:
    message = message_of(
        {
            "train_batch_size": 0,
            "gradient_clipping": "1",
            "zero_optimization": {"stage": 7, "overlap_comm": 1},
        }
    )
    assert message.startswith("dict: 4 problems")
    for line in ("train_batch_size = 0:", "gradient_clipping = ", "zero_optimization.stage = 7:"):
        assert f"\n  {line}" in message


def test_number_or_auto() -> None:
    assert parse(zero(zenflow={"update_interval": 4})).zero_optimization.zenflow.update_interval == 4  # type: ignore[union-attr]
    assert "zenflow.update_interval = 0: must be at least 1" in message_of(
        zero(zenflow={"update_interval": 0})
    )


def test_section_that_is_no_object() -> None:
    assert "must be an object" in message_of({"zero_optimization": 3})
    assert "must be an object" in message_of({"optimizer": {"params": [1]}})


@pytest.mark.parametrize(
    ("config", "wrong", "near"),
    [
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"train_batchsize": 8}, "train_batchsize", "train_batch_size"),
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        (zero(stge=3), "zero_optimization.stge", "zero_optimization.stage"),
        (
            zero(reduce_bucket_sise=3),
            "zero_optimization.reduce_bucket_sise",
            "zero_optimization.reduce_bucket_size",
        ),
        (
            zero(offload_param={"devise": "cpu"}),
            "zero_optimization.offload_param.devise",
            "zero_optimization.offload_param.device",
        ),
        (zero(leaf_module={"class": []}), "zero_optimization.leaf_module.class", "leaf_module.classes"),
        (
            zero(offload_optimizer={"buffer_cuont": 4}),
            "zero_optimization.offload_optimizer.buffer_cuont",
            "zero_optimization.offload_optimizer.buffer_count",
        ),
        ({"bf16": {"check_overflow": True}}, "bf16.check_overflow", "bf16.check_grad_overflow"),
        ({"reduce_bucket_size": 1}, "reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"paterns": []}]}}},
            "tensor_parallel.partition_config.layer_specs[0].paterns",
            "tensor_parallel.partition_config.layer_specs[].patterns",
        ),
        ({"lr": 1e-3}, "lr", "optimizer.params.lr"),
        ({"aio": {"blocksize": 1}}, "aio.blocksize", "aio.block_size"),
        (
            {"optimizer": {"type": "AdamW", "params": {"weight_decy": 0}}},
            "optimizer.params.weight_decy",
            "optimizer.params.weight_decay",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 5}}},
            "scheduler.params.warmup_steps",
            "scheduler.params.warmup_num_steps",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_keys_at_any_depth(config: dict[str, Any], wrong: str, near: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        parse(config)
    message = str(caught.value)
    assert f"dict: {wrong}: " in message
    assert f"{near}?" in message


def test_unknown_key_without_a_neighbour() -> None:
    with pytest.raises(UnknownKeyError, match="xyzzy: no such key; remove it"):
        parse({"xyzzy": 1})
    with pytest.raises(UnknownKeyError, match="seed: no such key; there is no such key in DeepSpeed"):
        parse({"seed": 1})


def test_flattened_key() -> None:
    with pytest.raises(UnknownKeyError, match="keys are nested: write stage inside zero_optimization"):
        parse({"zero_optimization.stage": 1})


def test_unknown_key_beside_another_problem() -> None:
    with pytest.raises(UnknownKeyError, match=r"(?s)2 problems.*stage = 9.*xyzzy"):
        parse({"zero_optimization": {"stage": 9}, "xyzzy": 1})


def test_the_tree_is_not_built_by_hand_with_unknown_keys() -> None:
    with pytest.raises(pydantic.ValidationError):
        Config.model_validate({"zero_optimization": {"stge": 1}})
