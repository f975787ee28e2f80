"""Each mistake is one clear error, on every rank, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.errors import CommError
from zeroshard.testing import RankPool

Case = tuple[str, str]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def attempt(**arguments: Any) -> Case:
    """(class of the error, its message) of a call of `initialize`."""
    try:
        zeroshard.initialize(**arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def with_config(rank: int, world: int, config: Any) -> Case:
    return attempt(model=small(), config=config)


def no_parameters(rank: int, world: int) -> Case:
    return attempt(model=nn.ReLU(), config={})


def no_model(rank: int, world: int) -> Case:
    return attempt(model=None, config={})


def no_config(rank: int, world: int) -> Case:
    return attempt(model=small())


def foreign_optimizer(rank: int, world: int) -> Case:
    other = small()
    return attempt(model=small(), optimizer=torch.optim.SGD(other.parameters(), lr=0.1), config={})


class Unheard(torch.optim.Optimizer):
    """Nobody knows whether it works on slices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def unknown_optimizer(rank: int, world: int) -> Case:
    model = small()
    return attempt(
        model=model, optimizer=Unheard(model.parameters()), config={"zero_optimization": {"stage": 1}}
    )


def meta_model(rank: int, world: int) -> Case:
    with torch.device("meta"):
        model = small()
    return attempt(model=model, config={})


def lazy_model(rank: int, world: int) -> Case:
    return attempt(model=nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()), config={})


def second_engine(rank: int, world: int) -> Case:
    model = small()
    engine, _, _, _ = zeroshard.initialize(model=model, config={})
    case = attempt(model=model, config={})
    engine.close()
    return case


def loader_without_batch_size(rank: int, world: int) -> Case:
    return attempt(model=small(), training_data=[1, 2, 3], config={})


def step_without_optimizer(rank: int, world: int) -> Case:
    engine, _, _, _ = zeroshard.initialize(model=small(), config={})
    try:
        engine.step()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        engine.close()
    return "nothing", ""


def after_close(rank: int, world: int) -> Case:
    engine, _, _, _ = zeroshard.initialize(model=small(), config={})
    engine.close()
    try:
        engine(torch.ones(1, 4))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def expect(pool: RankPool, case: Any, kind: str, words: tuple[str, ...], *arguments: Any) -> None:
    for found, message in pool.run(case, *arguments, timeout=20):
        assert found == kind, message
        for word in words:
            assert word in message
        assert len(message) < 1200


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        (no_parameters, "ModelError", ("ReLU has no parameters",)),
        (no_model, "ModelError", ("NoneType",)),
        (no_config, "ConfigError", ("exactly one config", "none")),
        (foreign_optimizer, "ModelError", ("group 0", "shape (4, 4)", "this model's parameters()")),
        (unknown_optimizer, "ModelError", ("Unheard", "zero_allow_untested_optimizer")),
        (meta_model, "ModelError", ("'0.weight'", "meta")),
        (lazy_model, "ModelError", ("'0.weight'", "lazy", "run one forward")),
        (second_engine, "ModelError", ("'0.weight' already belongs to an engine", "close()")),
        (loader_without_batch_size, "ConfigError", ("train_micro_batch_size_per_gpu",)),
        (step_without_optimizer, "StateError", ("optimizer",)),
        (after_close, "StateError", ("forward after engine.close()",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistakes_in_the_call(ranks2: RankPool, case: Any, kind: str, words: tuple[str, ...]) -> None:
    expect(ranks2, case, kind, words)


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, "ConfigError", ("stage", "4")),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "ConfigError", ("bf16", "fp16")),
        ({"zero_optimization": {"stage": "three"}}, "ConfigError", ("stage", "three")),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "ConfigError", ("reduce_bucket_size", "-1")),
        ({"train_micro_batch_size_per_gpu": 0}, "ConfigError", ("train_micro_batch_size_per_gpu", "0")),
        ({"zero_optimisation": {}}, "UnknownKeyError", ("zero_optimisation", "zero_optimization")),
        ({"zero_optimization": {"stge": 3}}, "UnknownKeyError", ("stge", "stage")),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            "ConfigError",
            ("7", "world size = 2", "torch.distributed process group"),
        ),
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "ConfigError", ("fp16.hysteresis = 0", "at least 1")),
        ({"gradient_clipping": -1}, "ConfigError", ("gradient_clipping = -1", "at least 0")),
        ({"scheduler": {"type": "WarmupLR"}}, "ConfigError", ("WarmupLR", "needs an optimizer")),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "ConfigError", ("autocast", "bfloat16")),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linnear"]}},
            "ConfigError",
            ("torch.nn.Linnear", "torch.nn.Linear"),
        ),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "ConfigError",
            ("bf16.bf16_optimizer_states", "bf16_master_weights_and_grads"),
        ),
        (
            {
                "train_micro_batch_size_per_gpu": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            },
            "ConfigError",
            ("train_micro_batch_size_per_gpu", "optimizer.params.lr"),
        ),
        ("no/such/file.json", "ConfigError", ("no/such/file.json",)),
    ],
    ids=str,
)
def test_mistakes_in_the_config(ranks2: RankPool, config: Any, kind: str, words: tuple[str, ...]) -> None:
    expect(ranks2, with_config, kind, words, config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("empty",)),
        ("not json", ("line 1",)),
        ('{"bf16": {"enabled": true}, "bf16": {}}', ("bf16",)),
        ("[]", ("object",)),
    ],
)
def test_mistakes_in_the_file(ranks2: RankPool, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    expect(ranks2, with_config, "ConfigError", (str(file), *words), str(file))


LAUNCHERS = {
    "WORLD_SIZE": ("2", "WORLD_SIZE=2 but not RANK, MASTER_ADDR, MASTER_PORT"),
    "SLURM_NTASKS": ("4", "Slurm started 4 processes"),
    "OMPI_COMM_WORLD_SIZE": ("8", "Open MPI started 8 processes"),
}


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_processes_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    value, words = LAUNCHERS[variable]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(CommError) as error:
        zeroshard.initialize(model=nn.Linear(2, 2), config={})
    assert words in str(error.value)
    assert "zeroshard run --nproc" in str(error.value)
