"""Adapters over frozen weights: by hand and through PEFT, trained, saved and merged as in plain PyTorch; and
what is said of adapters that come too late."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, features
from pairs import STAGES, Pair, attempt, config
from torch import Tensor, nn

import zeroshard
from zeroshard import zero
from zeroshard.testing import FP32_TOLERANCE, RankPool, assert_parity

every_stage = pytest.mark.parametrize("stage", STAGES)
BF16 = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}


class Adapter(nn.Module):
    """Of rank 2 around a Linear, made from what the Linear's weight says of itself."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = base.weight.shape
        kind = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.down = nn.Parameter(torch.randn(2, inputs, **kind) / inputs)
        self.up = nn.Parameter(torch.ones(outputs, 2, **kind) / outputs)
        base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.up @ self.down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.head = nn.Linear(6, 11)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adapt(net: nn.Module) -> None:
    for module in list(net.modules()):
        if isinstance(module, Block):
            module.up, module.down = Adapter(module.up), Adapter(module.down)


def adapted() -> nn.Module:
    net = Net().requires_grad_(False)
    adapt(net)
    return net


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)


def loss_of(net: Any, step: int, at: int) -> Tensor:
    return net(features(step, 0, at)).float().square().mean()


def by_hand(rank: int, world: int, stage: int) -> float:
    """Trained, merged inside `GatheredParameters` by one rank, and still equal."""
    pair = Pair.of(rank, world, stage, adapted, adamw)
    for step in range(4):
        pair.engine.backward(loss_of(pair.engine, step, rank))
        pair.everybody(lambda net, at, s=step: loss_of(net, s, at))
        pair.engine.step()
        pair.update()
    adapters = {n: p for n, p in pair.model.named_parameters() if p.requires_grad}
    with zero.GatheredParameters(adapters.values()):
        for name, parameter in adapters.items():
            difference = (parameter - pair.reference.get_parameter(name)).abs().max()
            assert float(difference) <= 1e-6
    with zero.GatheredParameters(pair.model, modifier_rank=1):
        for ours, theirs in zip(merged(pair.model), merged(pair.reference), strict=True):
            if rank == 1:
                ours.merge()
            theirs.merge()
    return pair.finish()


def merged(net: nn.Module) -> Iterator[Adapter]:
    return (module for module in net.modules() if isinstance(module, Adapter))


@every_stage
def test_adapters_by_hand(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(by_hand, stage)) <= 1e-6


def too_late(rank: int, world: int, stage: int) -> tuple[str, str, float]:
    """Adapters around sharded layers: made properly, run properly, and not trained without a word."""
    pair = Pair.of(
        rank,
        world,
        stage,
        lambda: Net().requires_grad_(False),
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    )
    torch.manual_seed(3)
    adapt(pair.model)
    torch.manual_seed(3)
    adapt(pair.reference)
    shapes = [tuple(p.shape) for p in pair.model.parameters()]
    assert shapes == [tuple(p.shape) for p in pair.reference.parameters()]
    loss = loss_of(pair.engine, 0, rank)
    distance = float((loss - loss_of(pair.reference, 0, rank)).abs())
    kind, message = attempt(lambda: (pair.engine.backward(loss), pair.engine.step()))
    # The cure that it names.
    pair.engine.close()
    engine, *_ = zeroshard.initialize(model=pair.model, optimizer=adamw(pair.model), config=config(stage))
    expected = adamw(pair.reference)
    for parameter in (*pair.model.parameters(), *pair.reference.parameters()):
        parameter.grad = None
    for step in range(3):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
        pair.everybody(lambda net, at, s=step: loss_of(net, s, at))
        expected.step()
        expected.zero_grad()
    engine.close()
    both = zip(pair.model.parameters(), pair.reference.parameters(), strict=True)
    return kind, message, max(distance, *(float((p - q).detach().abs().max()) for p, q in both))


@pytest.mark.parametrize("stage", [0, 3])
def test_adapters_after_initialize(ranks2: RankPool, stage: int) -> None:
    """D 47."""
    for kind, message, distance in ranks2.run(too_late, stage):
        assert kind == "StateError"
        assert "'blocks.0.up.down' (shape (2, 6)) came into the model after `initialize`" in message
        assert "engine.close()" in message
        assert distance <= 1e-6


# ---- PEFT ----------------------------------------------------------------------------------------------------


def peft_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from test_hugging_face import llama

    base = llama()
    torch.manual_seed(1)
    chosen = LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
        modules_to_save=None,
    )
    return get_peft_model(base, chosen)


def peft_llama_of_16_bit() -> nn.Module:
    """With frozen weights that 16 bits hold: the engine keeps no others of them, the reference would."""
    model = peft_llama()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().float()
    return model


def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    from test_hugging_face import batch as of_llama

    return of_llama(step, micro, rank)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@every_stage
def test_peft_trains_as_plain_pytorch(ranks2: RankPool, stage: int) -> None:
    pytest.importorskip("peft")
    assert_parity(peft_llama, batch, config(stage), optimizer_fn=sgd, pool=ranks2, steps=3)


@pytest.mark.parametrize("stage", [1, 3])
def test_peft_in_16_bit(ranks2: RankPool, stage: int) -> None:
    pytest.importorskip("peft")
    more = {**config(stage), **BF16}
    made = peft_llama_of_16_bit
    assert_parity(made, batch, more, optimizer_fn=sgd, pool=ranks2, steps=2, tolerance=FP32_TOLERANCE)


def peft_saved(rank: int, world: int, stage: int, folder: str) -> None:
    """`save_pretrained` by all ranks, the adapter loaded back onto the base, and merged weights."""
    from peft import PeftModel, get_peft_model_state_dict
    from test_hugging_face import llama

    model: Any = peft_llama()
    reference = copy.deepcopy(model)
    engine, *_ = zeroshard.initialize(model=model, optimizer=sgd(model), config=config(stage))
    expected = sgd(reference)
    for step in range(2):
        engine.backward(engine(**batch(step, 0, rank)).loss)
        engine.step()
        for at in range(world):
            (reference(**batch(step, 0, at)).loss / world).backward()
        expected.step()
        expected.zero_grad()
    state, other = get_peft_model_state_dict(model), get_peft_model_state_dict(reference)
    assert list(state) == list(other)
    assert all(torch.allclose(state[key], other[key], rtol=0, atol=1e-6) for key in state)
    model.save_pretrained(folder, is_main_process=rank == 0)
    torch.distributed.barrier()
    loaded = PeftModel.from_pretrained(llama(), folder)
    again = get_peft_model_state_dict(loaded)
    assert all(torch.equal(again[key], state[key]) for key in state)
    # Merged in place on one rank, for all.
    with zero.GatheredParameters(model, modifier_rank=0):
        if rank == 0:
            model.merge_adapter()
    reference.merge_adapter()
    name = "base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"
    merged = model.state_dict()[name]
    assert torch.allclose(merged, reference.state_dict()[name], rtol=0, atol=1e-6)
    assert not torch.allclose(merged, loaded.state_dict()[name], rtol=0, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_peft_saves_and_merges(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("peft")
    ranks2.run(peft_saved, stage, str(tmp_path))


def peft_too_late(rank: int, world: int) -> tuple[str, str]:
    """PEFT reads sizes, dtypes and devices of sharded weights: its adapters are as large as they should be."""
    from peft import LoraConfig, get_peft_model
    from test_hugging_face import llama

    model = llama().requires_grad_(False)
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(3)
    )
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    plain = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    ours = {name: (tuple(p.shape), p.dtype, p.device) for name, p in wrapped.named_parameters()}
    assert ours == {name: (tuple(p.shape), p.dtype, p.device) for name, p in plain.named_parameters()}

    def stepped() -> None:
        engine.backward(engine(**batch(0, 0, rank)).loss)
        engine.step()

    found = attempt(stepped)
    engine.close()
    return found


def test_peft_after_initialize(ranks2: RankPool) -> None:
    """D 47."""
    pytest.importorskip("peft")
    for kind, message in ranks2.run(peft_too_late):
        assert kind == "StateError"
        assert "lora_A.default.weight' (shape (2, 24)) came into the model after `initialize`" in message
