"""Every accepted spelling means the same; two spellings of one key are an error that names both."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import parse
from zeroshard.config.keys import TABLE
from zeroshard.errors import ConfigError

UNPREFIXED = [
    key for key in TABLE if key.status.kind == "alias" and key.path.startswith("zero_optimization.")
]


def test_stage3_aliases_are_all_there() -> None:
    assert len(UNPREFIXED) == 9
    assert all(key.status.text == key.path.replace("zation.", "zation.stage3_") for key in UNPREFIXED)


@pytest.mark.parametrize("key", UNPREFIXED, ids=lambda key: key.path)
def test_both_spellings_of_a_stage3_key(key: Any) -> None:
    short, full = key.path.split(".")[1], key.status.text.split(".")[1]
    boolean = short.startswith(("gather", "use", "allgather"))
    value: Any = True if boolean else 7
    by_short = parse({"zero_optimization": {short: value}})
    assert getattr(by_short.zero_optimization, full) == value
    assert by_short.zero_optimization == parse({"zero_optimization": {full: value}}).zero_optimization
    with pytest.raises(ConfigError) as caught:
        parse({"zero_optimization": {short: value, full: value}})
    assert key.path in str(caught.value)
    assert key.status.text in str(caught.value)


def test_bfloat16_is_bf16() -> None:
    config = parse({"bfloat16": {"enabled": True}})
    assert config.bf16.enabled
    assert config.notes == ("bfloat16 is an old name of bf16; write bf16",)
    with pytest.raises(ConfigError, match=r"bfloat16 = .* stands beside bf16 = .* remove bfloat16"):
        parse({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.parametrize(
    ("old", "new"), [("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")]
)
def test_cpu_offload_is_converted(old: str, new: str) -> None:
    config = parse({"zero_optimization": {"stage": 3, old: True}})
    assert getattr(config.zero_optimization, new).device == "cpu"
    assert len(config.notes) == 1
    assert new in config.notes[0]
    off = parse({"zero_optimization": {"stage": 3, old: False, new: {"device": "cpu"}}})
    assert getattr(off.zero_optimization, new).device == "cpu"
    with pytest.raises(ConfigError, match=f"{old} .*{new}"):
        parse({"zero_optimization": {"stage": 3, old: True, new: {"device": "cpu"}}})


def test_cpu_offload_of_another_type() -> None:
    with pytest.raises(ConfigError):
        parse({"zero_optimization": {"stage": 3, "cpu_offload": 3}})


def test_boolean_zero_optimization() -> None:
    on = parse({"zero_optimization": True, "allgather_size": 1000})
    assert on.zero_optimization.stage == 1
    assert on.zero_optimization.allgather_bucket_size == 1000
    assert any("old form" in note for note in on.notes)
    assert parse({"zero_optimization": False}).zero_optimization.stage == 0


def test_loss_scale_keys_in_bf16_are_one_note() -> None:
    config = parse({"bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}})
    assert config.bf16.enabled
    assert len(config.notes) == 1
    assert "bf16.{loss_scale, initial_scale_power, hysteresis}" in config.notes[0]


def test_old_save_key_and_dropped_keys() -> None:
    config = parse(
        {
            "zero_optimization": {
                "stage3_gather_fp16_weights_on_model_save": True,
                "cpu_offload_use_pin_memory": True,
            },
            "aio": {"thread_count": 1},
        }
    )
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert len(config.notes) == 3


def test_short_tensor_parallel_name() -> None:
    assert parse({"tensor_parallel": {"tp": {"tp_size": 2}}}).tensor_parallel.tensor_parallel.tp_size == 2
