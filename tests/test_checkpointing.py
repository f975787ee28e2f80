"""`zeroshard.checkpointing` without an engine: any arguments and results, random numbers, settings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard import checkpointing
from zeroshard.errors import ConfigError, NotYetError


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a new process does, and leaves nothing to the next one."""
    for name, fresh in {
        "_told": checkpointing._Settings(),
        "_of_config": checkpointing._Settings(),
        "_mpu": None,
        "_configured": False,
        "_tracker": checkpointing.CudaRNGStatesTracker(),
    }.items():
        monkeypatch.setattr(checkpointing, name, fresh)


def gradients(function: Callable[..., Tensor], *parameters: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.autograd.grad(function(), parameters))


def test_is_reached_from_the_package() -> None:
    assert zeroshard.checkpointing is checkpointing
    assert set(checkpointing.__all__) <= set(dir(checkpointing))


def test_arguments_and_results_of_any_kind() -> None:
    weight, x, y = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    runs = 0

    def function(pair: tuple[Tensor, str], factor: float, *, more: dict[str, Any]) -> dict[str, Any]:
        nonlocal runs
        runs += 1
        z = torch.tanh(pair[0] @ weight) * factor + more["y"].sin()
        return {"z": z, "both": (z, more["none"]), "name": pair[1]}

    def loss(call: Callable[..., Any]) -> Tensor:
        out = call(function, (x, "name"), 2.0, more={"y": y, "none": None})
        assert out["name"] == "name"
        assert out["both"] == (out["z"], None)
        return out["z"].square().sum()

    plain = gradients(lambda: loss(lambda f, *args, **kwargs: f(*args, **kwargs)), weight, x, y)
    assert runs == 1
    made_again = gradients(lambda: loss(checkpointing.checkpoint), weight, x, y)
    assert runs == 3
    assert all(map(torch.equal, plain, made_again))


def test_first_layer_on_integers() -> None:
    """No input requires grad (an embedding on token ids), and the weights inside still get gradients."""
    embedding, ids = nn.Embedding(5, 4), torch.tensor([[1, 4, 1]])
    plain = gradients(lambda: embedding(ids).sin().sum(), embedding.weight)
    again = gradients(lambda: checkpointing.checkpoint(embedding, ids).sin().sum(), embedding.weight)
    assert torch.equal(plain[0], again[0])


def test_no_activation_is_kept() -> None:
    saved: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x = torch.randn(2, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        checkpointing.checkpoint(layers, x)
    assert sum(saved) == x.numel()  # torch 2.9 saves an empty tensor too


@pytest.mark.parametrize("nested", [False, True])
def test_inputs_move_to_host_memory_once(monkeypatch: pytest.MonkeyPatch, nested: bool) -> None:
    """By torch's `save_on_cpu`; here by one that counts. What a nested checkpoint saves is dropped anyway."""
    moved: list[Tensor] = []

    def save_on_cpu(pin_memory: bool) -> Any:
        assert not pin_memory  # there is no accelerator
        return torch.autograd.graph.saved_tensors_hooks(lambda t: moved.append(t) or t.clone(), lambda t: t)

    monkeypatch.setattr(checkpointing, "save_on_cpu", save_on_cpu)
    inner = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)

    def outer(x: Tensor) -> Tensor:
        return checkpointing.checkpoint(lambda x: inner(x).sin(), x.cos()) if nested else inner(x.cos()).sin()

    plain = gradients(lambda: inner(x.cos()).sin().sum(), x, inner.weight)
    checkpointing.configure(checkpoint_in_cpu=True)
    again = gradients(lambda: checkpointing.checkpoint(outer, x).sum(), x, inner.weight)
    assert all(map(torch.equal, plain, again))
    assert [t.shape for t in moved if t.numel()] == [x.shape]  # torch 2.9 saves an empty one too


def test_random_numbers_are_the_same_again() -> None:
    """Also those that differ by model-parallel rank."""
    checkpointing.configure(mpu_=SimpleNamespace(get_tensor_model_parallel_rank=lambda: 3))
    tracker = checkpointing.get_cuda_rng_tracker()
    weight = torch.randn(50, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x * weight)
        with tracker.fork():
            return torch.nn.functional.dropout(x * weight)

    def loss(call: Callable[..., Tensor]) -> Tensor:
        checkpointing.model_parallel_cuda_manual_seed(5)
        out = call(function, weight)
        torch.rand(3)  # both sorts of random numbers go on between forward and backward
        with tracker.fork():
            torch.rand(3)
        return out.sum()

    plain = gradients(lambda: loss(lambda f, *args: f(*args)), weight)
    went_on = tracker.get_states()[checkpointing.MODEL_PARALLEL]
    again = gradients(lambda: loss(checkpointing.checkpoint), weight)
    assert torch.equal(plain[0], again[0])
    assert torch.equal(went_on, tracker.get_states()[checkpointing.MODEL_PARALLEL])


def test_seeds_by_model_parallel_rank() -> None:
    checkpointing.configure(mpu_=SimpleNamespace(get_model_parallel_rank=lambda: 3))
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    assert torch.initial_seed() == 5
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(2)
    assert torch.equal(before, torch.get_rng_state())
    checkpointing.model_parallel_reconfigure_tp_seed(5)
    with tracker.fork():
        assert torch.equal(first, torch.rand(2))
    assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(5 + 2718 + 3)))
    with pytest.raises(ValueError, match="'model-parallel-rng' exists already"):
        tracker.add(checkpointing.MODEL_PARALLEL, 1)
    with pytest.raises(ValueError, match="seed 2726 is used"):
        tracker.add("other", 2726)
    with (
        pytest.raises(ValueError, match="no random state 'else'; known are model-parallel-rng"),
        tracker.fork("else"),
    ):
        pass


def test_profile_prints_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    checkpointing.configure(profile=True, synchronize=True)
    x = torch.randn(2, requires_grad=True)
    checkpointing.checkpoint(nn.Sequential(nn.Tanh(), nn.Tanh()), x).sum().backward()
    forward, again = capsys.readouterr().out.splitlines()
    assert forward.startswith("checkpoint Sequential: forward ")
    assert again.startswith("checkpoint Sequential: recomputation ")
    assert again.endswith(" ms")


def test_arguments_win_over_the_config() -> None:
    assert not checkpointing.is_configured()
    section = {"activation_checkpointing": {"profile": True, "cpu_checkpointing": True}}
    checkpointing.configure(profile=False)
    checkpointing.configure(deepspeed_config=section)
    assert checkpointing.is_configured()
    settings = checkpointing._told.over(checkpointing._of_config)
    assert (settings.profile, settings.cpu_checkpointing) == (False, True)


def test_initialize_takes_the_section() -> None:
    model = nn.Linear(2, 2)
    engine, *_ = zeroshard.initialize(model=model, config={"optimizer": {"type": "SGD"}})
    assert not checkpointing.is_configured()
    engine.close()
    config = {"optimizer": {"type": "SGD"}, "activation_checkpointing": {"cpu_checkpointing": True}}
    zeroshard.initialize(model=model, config=config)[0].close()
    assert checkpointing.is_configured()
    assert checkpointing._of_config.cpu_checkpointing


def test_settings_that_need_one_another() -> None:
    with pytest.raises(ConfigError, match="packs what partition_activations cuts"):
        checkpointing.configure(contiguous_checkpointing=True)
    assert not checkpointing.is_configured()
    with pytest.raises(ConfigError, match="needs num_checkpoints"):
        checkpointing.configure(contiguous_checkpointing=True, partition_activations=True)
    checkpointing.configure(contiguous_checkpointing=True, partition_activations=True, num_checkpoints=4)
    checkpointing.set_num_layers(8)
    checkpointing.reset()
    with pytest.raises(NotYetError, match="2 model-parallel ranks"):
        checkpointing.configure(mpu_=SimpleNamespace(get_model_parallel_world_size=lambda: 2))
    checkpointing.configure(contiguous_checkpointing=False)
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.configure(mpu_=SimpleNamespace(get_model_parallel_world_size=lambda: 2))
