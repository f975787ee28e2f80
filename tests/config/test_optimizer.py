"""DeepSpeed's reading of the optimizer section, in torch's terms."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.config import parse, torch_optimizer
from zeroshard.errors import ConfigError


def choice(type_: str, **params: Any) -> tuple[str, dict[str, Any]]:
    chosen = torch_optimizer(parse({"optimizer": {"type": type_, "params": params}}).optimizer)
    assert chosen is not None
    return chosen.name, chosen.kwargs


def test_no_type_is_no_optimizer() -> None:
    assert torch_optimizer(parse({}).optimizer) is None


@pytest.mark.parametrize(
    ("type_", "params", "name"),
    [
        ("Adam", {}, "AdamW"),
        ("adam", {"adam_w_mode": True}, "AdamW"),
        ("Adam", {"adam_w_mode": False}, "Adam"),
        ("Adam", {"adam_w_mode": False, "decoupled_weight_decay": True}, "AdamW"),
        ("AdamW", {"adam_w_mode": False}, "AdamW"),
        ("sgd", {}, "SGD"),
        ("adagrad", {}, "Adagrad"),
        ("LION", {}, "Lion"),
        ("lamb", {}, "Lamb"),
        ("adafactor", {}, "Adafactor"),
        ("muon", {}, "Muon"),
        ("Adam", {"bias_correction": False}, "AdamWithoutBiasCorrection"),
        ("Future", {}, "Future"),
    ],
)
def test_names(type_: str, params: dict[str, Any], name: str) -> None:
    assert choice(type_, **params)[0] == name


def test_weight_decay_default_is_zero_unless_torch_adam() -> None:
    assert choice("AdamW")[1] == {"weight_decay": 0.0}
    assert choice("AdamW", torch_adam=True)[1] == {}
    assert choice("AdamW", weight_decay=0.1)[1] == {"weight_decay": 0.1}
    assert choice("SGD", lr=0.1)[1] == {"lr": 0.1}


def test_keys_of_deepspeed_do_not_reach_torch() -> None:
    params = {
        "bias_correction": True,
        "set_grad_none": True,
        "fp32_optimizer_states": True,
        "adam_w_mode": False,
    }
    assert choice("Adam", lr=0.1, betas=[0.9, 0.95], torch_adam=True, **params) == (
        "Adam",
        {"lr": 0.1, "betas": (0.9, 0.95)},
    )


def test_without_bias_correction() -> None:
    def kwargs(type_: str, **params: Any) -> dict[str, Any]:
        name, found = choice(type_, bias_correction=False, **params)
        assert name == "AdamWithoutBiasCorrection"
        return found

    assert kwargs("Adam", lr=0.1, amsgrad=False) == {"lr": 0.1, "weight_decay": 0.0, "decoupled": True}
    assert kwargs("Adam", adam_w_mode=False) == {"weight_decay": 0.0, "decoupled": False}
    assert kwargs("AdamW", torch_adam=True) == {"weight_decay": 0.01, "decoupled": True}
    assert kwargs("Adam", adam_w_mode=False, torch_adam=True) == {"weight_decay": 0.0, "decoupled": False}


@pytest.mark.parametrize(
    ("type_", "params", "kwargs"),
    [
        ("Lion", {"betas": [0.9, 0.99], "set_grad_none": False, "fp32_optimizer_states": True}, ("betas",)),
        (
            "Lamb",
            {"amsgrad": False, "bias_correction": False, "max_coeff": 5},
            ("bias_correction", "max_coeff"),
        ),
        ("Adagrad", {"eps": 1e-6, "fp32_optimizer_states": True}, ("eps",)),
        ("Adafactor", {"eps": [None, 1e-3], "d": 2.0}, ("eps", "d")),
        ("Muon", {"muon_lr": 0.1, "adam_lr": 0.2, "ns_method": "gram"}, ("muon_lr", "adam_lr", "ns_method")),
    ],
)
def test_what_reaches_the_class(type_: str, params: dict[str, Any], kwargs: tuple[str, ...]) -> None:
    found = choice(type_, **params)[1]
    assert tuple(found) == kwargs
    assert all(found[key] == (tuple(p) if isinstance(p := params[key], list) else p) for key in kwargs)


def test_what_cannot_be_built_is_an_error() -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        choice("LBFGS")
