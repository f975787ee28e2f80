"""What goes together, what this release does not do yet, and what is said about keys without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroshard.config import parse, require_supported
from zeroshard.config.keys import TABLE, tree_fields
from zeroshard.config.section import literals
from zeroshard.errors import ConfigError, NotYetError, UnknownKeyError

DATA = Path(__file__).parent / "data" / "configs"
ASK_TOO_MUCH = {"qwen7b_zero3_cpu_offload", "zero3_production_with_comments"}


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def refusal(config: dict[str, Any]) -> tuple[type[Exception], str]:
    tree = parse(config)
    with pytest.raises(ConfigError) as caught:
        require_supported(tree)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_published_configs(path: Path) -> None:
    config = parse(path)
    if path.stem not in ASK_TOO_MUCH:
        require_supported(config)
        return
    with pytest.raises(NotYetError) as caught:
        require_supported(config)
    assert str(path) in str(caught.value)
    assert "remove it or set it to" in str(caught.value)


def test_one_error_lists_all_that_is_not_there_and_only_the_switches() -> None:
    kind, message = refusal(
        {
            "flops_profiler": {"enabled": True, "detailed": False},
            "sequence_parallel_size": 2,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        }
    )
    assert kind is NotYetError
    assert "3 keys" in message
    assert "flops_profiler.enabled = true: not in this release (the FLOPS profiler" in message
    assert "remove it or set it to false" in message
    assert 'offload_optimizer.device = "cpu"' in message
    assert "detailed" not in message
    assert "ratio" not in message


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "loss_scale": 128, "initial_scale_power": 20}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none", "buffer_count": 9}}},
        {"tensor_parallel": {"autotp_size": 1, "dtype": "bf16"}},
        {"zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"zero_optimization": {"zero_hpz_partition_size": 0, "mics_shard_size": 0}},
        {"sequence_parallel_size": 1},
        {"aio": {"block_size": 4096}},
        {"comet": {"enabled": False, "project": "runs"}},
        {"flops_profiler": {"enabled": False, "profile_step": 7}},
        {"elasticity": {"enabled": False}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"compression_training": {}},
        {
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": True,
                "profile": True,
            }
        },
        {"timers": {"throughput": {"enabled": False}}},
        {"wall_clock_breakdown": False, "steps_per_print": 10},
        {"optimizer": {"type": "AdamW", "params": {"bias_correction": True, "torch_adam": True}}},
        {"optimizer": {"type": "Adam", "params": {"bias_correction": False, "amsgrad": False}}},
        {"optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99]}}},
        {"optimizer": {"type": "Lamb", "params": {"eps_inside_sqrt": True, "amsgrad": False}}},
        {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "momentum": 0.9, "eps": 1e-9}}},
        {"optimizer": {"type": "Adafactor", "params": {"eps": [None, 1e-3], "d": 1.5}}},
        {"scheduler": {"params": {"warmup_num_steps": 5}}},
        {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
        {"optimizer": {"type": "Adagrad"}},
        {"optimizer": {"type": "SomeFutureOptimizer"}},
        {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_type": "linear", "warmup_max_lr": [1e-3, 1e-4]},
            }
        },
        {"scheduler": {"type": "StepLR", "params": {"step_size": 10}}},
    ],
    ids=str,
)
def test_neutral_values_ask_for_nothing(config: dict[str, Any]) -> None:
    require_supported(parse(config))


NOT_YET = {
    "fp16.fp16_master_weights_and_grads": True,
    "disable_python_gc": True,
    "checkpoint.use_node_local_storage": True,
    "zero_optimization.zenflow": {},
    "zero_optimization.zero_quantized_weights": True,
    "comet.enabled": True,
    "flops_profiler.enabled": True,
    "autotuning.enabled": True,
    "compile.deepcompile": True,
    "sequence_parallel_size": 2,
    "tensor_parallel.autotp_size": 2,
    "expert_parallel.enabled": True,
    "pipeline.activation_checkpoint_interval": 1,
}


@pytest.mark.parametrize("path", NOT_YET)
def test_not_yet_keys(path: str) -> None:
    config = nested(path, NOT_YET[path])
    if path.startswith("fp16."):
        config["fp16"]["enabled"] = True
    kind, message = refusal(config)
    assert kind is NotYetError
    assert f"dict: {path} = " in message
    assert "remove it" in message


REFUSED = {
    "sparse_gradients": True,
    "amp.enabled": True,
    "nebula.enabled": True,
    "elasticity.enabled": True,
    "hybrid_engine.enabled": True,
    "graph_harvesting": True,
    "compression_training": {"layer_reduction": {}},
    "data_efficiency": {"enabled": True},
    "zero_optimization.legacy_stage1": True,
    "zero_optimization.grad_hooks": True,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
}


@pytest.mark.parametrize("path", REFUSED)
def test_refused_keys(path: str) -> None:
    kind, message = refusal(nested(path, REFUSED[path]))
    assert kind is ConfigError
    assert ": refused, because " in message


@pytest.mark.parametrize(
    "type_",
    [
        "OneBitAdam",
        "LBFGS",
        "SparseAdam",
        "MuAdam",
    ],
)
def test_optimizers_that_are_refused(type_: str) -> None:
    kind, message = refusal({"optimizer": {"type": type_, "params": {"lr": 0.1, "freeze_step": 5}}})
    assert kind is ConfigError
    assert f'optimizer.type = "{type_}"' in message
    assert "choose AdamW" in message
    assert "freeze_step" not in message


@pytest.mark.parametrize(
    ("type_", "name", "near"),
    [
        ("Lion", "beta", "betas"),
        ("lion", "eps", None),
        ("Lamb", "max_coef", "max_coeff"),
        ("Lamb", "adam_w_mode", None),
        ("Muon", "muonlr", "muon_lr"),
        ("Muon", "nesterov", None),
        ("Adagrad", "lr_decayy", "lr_decay"),
        ("Adagrad", "betas", None),
        ("Adafactor", "beta2_decays", "beta2_decay"),
        ("Adafactor", "fused", None),
        ("AdamW", "beta", "betas"),
        ("SGD", "eps", None),
    ],
)
def test_parameters_an_optimizer_does_not_have(type_: str, name: str, near: str | None) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        parse({"optimizer": {"type": type_, "params": {name: 0.1}}})
    assert f"optimizer.params.{name}: {type_} has no such key" in str(caught.value)
    if near is not None:
        assert f"did you mean optimizer.params.{near}?" in str(caught.value)


def test_refused_wins_over_not_yet_and_both_are_listed() -> None:
    kind, message = refusal({"sparse_gradients": True, "disable_python_gc": True})
    assert kind is ConfigError
    assert "sparse_gradients" in message
    assert "disable_python_gc" in message


def other_value(value: Any) -> Any:
    return (not value) if isinstance(value, bool) else value + 1


NO_EFFECT = [key for key in TABLE if key.status.kind == "no effect" and not key.path.startswith("optimizer.")]


@pytest.mark.parametrize("key", NO_EFFECT, ids=lambda key: key.path)
def test_each_key_without_effect_is_one_note_with_the_reason(key: Any) -> None:
    field = tree_fields()[key.path]
    default = field.get_default(call_default_factory=True)
    words = [word for word in literals(field.annotation) if word != default]
    if words:
        value: Any = words[0]
    elif default is None:
        value = False if key.path.endswith("overlap_comm") else 30522
    else:
        value = other_value(default)
    config = nested(key.path, value)
    if key.path.startswith(("bf16.", "fp16.")):
        config[key.path[:4]]["enabled"] = True
    notes = parse(config).notes
    if value in key.neutral:
        assert notes == ()
    else:
        assert len(notes) == 1
        assert notes[0].startswith(f"{key.path} = ")
        assert key.status.text in notes[0]
    require_supported(parse(config))


def test_no_effect_at_its_default_is_silent() -> None:
    zero = {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
    }
    assert parse({"zero_optimization": zero}).notes == ()


def test_no_effect_in_a_section_that_is_off_is_silent() -> None:
    section = {"enabled": False, "immediate_grad_update": True}
    assert parse({"bf16": section}).notes == ()
    assert len(parse({"bf16": {**section, "enabled": True}}).notes) == 1


def test_no_effect_parameters_of_the_optimizer() -> None:
    notes = parse({"optimizer": {"type": "Adam", "params": {"set_grad_none": False}}}).notes
    assert len(notes) == 1
    assert "optimizer.params.set_grad_none" in notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16.enabled", "bf16.enabled")),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            ("offload_param.device", "stage 3"),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ("offload_optimizer.device", "stage 1"),
        ),
        (
            {"zero_optimization": {"stage": 0, "mics_shard_size": 4}},
            (
                "zero_optimization.mics_shard_size = 4",
                "needs zero_optimization.stage 1 or more",
                "set stage to 1",
            ),
        ),
        (
            {"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}},
            ("zero_optimization.zero_hpz_partition_size = 8", "the stage is 2", "set stage to 3"),
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            ("offload_param.nvme_path",),
        ),
        ({"data_types": {"param_dtype": "bf16"}}, ("data_types.param_dtype", "fp32", "enable bf16")),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.5}}},
            ("optimizer.params.max_grad_norm", "gradient_clipping: 1.5"),
        ),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-4"}}}, ("optimizer.params.lr", "quotes")),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": 0.9}}},
            ("optimizer.params.betas", "two numbers"),
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": 1}}},
            ("optimizer.params.torch_adam", "true or false"),
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"amsgrad": True}}},
            ("optimizer.params.amsgrad = true", "Lamb has no AMSGrad"),
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"amsgrad": True, "bias_correction": False}}},
            ("optimizer.params.amsgrad = true", "without bias correction"),
        ),
        (
            {"optimizer": {"type": "Muon", "params": {"ns_method": "newton"}}},
            ("optimizer.params.ns_method", '"gram", "standard"'),
        ),
        (
            {"optimizer": {"type": "Adafactor", "params": {"eps": 1e-3}}},
            ("optimizer.params.eps", "two numbers"),
        ),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}}, ("optimizer.params.betas", "SGD")),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
            ('scheduler.params.warmup_type = "cubic"', "log, linear"),
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"warmup_type": "log"}}},
            ("scheduler.params.warmup_type", "OneCycle"),
        ),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_combinations(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert all(word in str(caught.value) for word in words), caught.value
