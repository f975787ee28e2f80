"""`state_dict` and `load_state_dict` after `initialize`: full tensors out and in at every stage, as of a plain
model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, Odd, sgd, tokens
from pairs import STAGES, Pair, attempt
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import ShardedAccessError
from zeroshard.testing import RankPool

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
}
every_stage = pytest.mark.parametrize("stage", STAGES)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


class Full(Odd):
    """Also with a buffer, a frozen block, and a module that saves and loads in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(3.0))
        self.blocks[1].requires_grad_(False)
        self.own = Transposed(4, 3)


class Transposed(nn.Linear):
    """Saves its weight transposed, as code with a format of its own does; `extra` is state that is no tensor."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self.weight.detach().t()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        mine = {key: value.t() if key == prefix + "weight" else value for key, value in state_dict.items()}
        super()._load_from_state_dict(mine, prefix, *args)

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


def trained(rank: int, world: int, stage: int, precision: str = "fp32") -> Pair:
    pair = Pair.of(rank, world, stage, Full, sgd, **PRECISIONS[precision])
    pair.engine.backward(pair.engine(tokens(0, 0, rank)))
    pair.engine.step()
    return pair


def plain(pair: Pair) -> dict[str, Any]:
    """What a plain model with the engine's weights gives, in the dtype that the engine's model has."""
    reference: Any = copy.deepcopy(pair.reference)
    named = zip(reference.parameters(), pair.model.parameters(), strict=True)
    for theirs, ours in named:
        theirs.data = pair.engine.full_fp32(ours).to(ours.dtype)
    return reference.state_dict()


def same(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> None:
    assert list(a) == [prefix + key for key in b]
    for key, value in b.items():
        if isinstance(value, Tensor):
            assert a[prefix + key].dtype is value.dtype, key
            assert torch.equal(a[prefix + key], value), key
        else:
            assert a[prefix + key] == value


def sharded_again(pair: Pair) -> bool:
    return not any(buffer.is_live for buffer in pair.engine._states.buffers if not buffer.layout.resident)


def saved(rank: int, world: int, stage: int, precision: str) -> None:
    pair = trained(rank, world, stage, precision)
    engine, model = pair.engine, pair.model
    expected = plain(pair)
    state = model.state_dict()
    same(state, expected)
    same(engine.state_dict(), expected, "module.")
    assert sharded_again(pair)
    # Tied names share one tensor; all others have memory of their own, so any library can write them.
    assert state["head.weight"] is state["embed.weight"]
    places = [
        v.data_ptr() for k, v in state.items() if isinstance(v, Tensor) and k != "head.weight" and v.numel()
    ]
    assert len(set(places)) == len(places)
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in state.values() if isinstance(v, Tensor))
    # Of a part, with a prefix, into a dict that is there.
    mine: dict[str, Any] = {"other": 1}
    assert model.blocks[0].state_dict(destination=mine, prefix="x.") is mine
    part = {key.removeprefix("blocks.0."): v for key, v in expected.items() if key.startswith("blocks.0.")}
    same({key: v for key, v in mine.items() if key != "other"}, part, "x.")
    same(
        model.blocks[0].up.state_dict(),
        {k.removeprefix("up."): v for k, v in part.items() if k.startswith("up.")},
    )
    # keep_vars gives parameters, but not those that train.
    kept = model.state_dict(keep_vars=True)
    assert isinstance(kept["blocks.0.up.weight"], nn.Parameter)
    assert kept["blocks.0.up.weight"].requires_grad
    assert not kept["blocks.1.up.weight"].requires_grad
    assert kept["blocks.0.up.weight"] is not model.blocks[0].up.weight
    assert torch.equal(kept["blocks.0.up.weight"], expected["blocks.0.up.weight"])
    # Copies: what is done to them, and what training does, does not reach the other.
    for value in state.values():
        if isinstance(value, Tensor) and value is not state["seen"]:
            value.zero_()
    again = model.state_dict()
    same(again, expected)
    engine.backward(engine(tokens(1, 0, rank)))
    engine.step()
    same(again, expected)
    plain_now = plain(pair)
    # Weights that are gathered already are saved by any rank alone, also in evaluation.
    model.eval()
    with engine.gathered(), torch.no_grad():
        if rank == 0:
            same(model.state_dict(), plain_now)
        free = copy.deepcopy(model)
    model.train()
    free.load_state_dict(dict(free.state_dict().items()))
    same(free.state_dict(), plain_now)
    # On one rank only, on the CPU.
    whole = engine.full_state_dict()
    same(whole, plain_now if rank == 0 else {})
    same(engine.full_state_dict(rank0_only=False), plain_now)
    names = set(engine.module_state_dict(exclude_frozen_parameters=True, prefix="p."))
    assert names == {f"p.{key}" for key in expected if not key.startswith("blocks.1.")}
    assert sharded_again(pair)
    engine.close()
    same(model.state_dict(), plain_now)  # as torch does it


@every_precision
@every_stage
def test_state_dict_is_that_of_a_plain_model(ranks2: RankPool, stage: int, precision: str) -> None:
    """D 46. Also after a step, of parts, with ties, a buffer, a frozen block and a saver of its own."""
    ranks2.run(saved, stage, precision)


def loaded(rank: int, world: int, stage: int, precision: str, how: str) -> None:
    """What is loaded is in the weights and to the last digit in the masters, and trains on."""
    pair = trained(rank, world, stage, precision)
    engine, model = pair.engine, pair.model
    torch.manual_seed(7 + rank)  # rank 0's values count
    other = Full()
    torch.manual_seed(7)
    expected = Full()
    given = other.state_dict()
    if how == "engine":
        result = engine.load_state_dict({f"module.{key}": value for key, value in given.items()})
    elif how == "parts":
        result = model.load_state_dict({k: v for k, v in given.items() if "blocks" not in k}, strict=False)
        assert all("blocks" in key for key in result.missing_keys)
        for index, block in enumerate(model.blocks):
            block.load_state_dict(other.blocks[index].state_dict())
    else:
        result = model.load_state_dict(given)
    assert not result.unexpected_keys
    assert sharded_again(pair)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        value = engine.full_fp32(ours)
        assert torch.equal(value, theirs.to(value.dtype)), name
        with engine.gathered(ours):
            assert torch.equal(ours, theirs.to(ours.dtype)), name
    engine.backward(engine(tokens(0, 0, rank)) * 0)
    engine.step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        if not ours.requires_grad:
            assert torch.equal(engine.full_fp32(ours), theirs.to(ours.dtype))
    assert model.head.weight is model.embed.weight
    engine.close()


@pytest.mark.parametrize("how", ["model", "engine", "parts"])
@every_precision
@every_stage
def test_what_is_loaded_trains(ranks2: RankPool, stage: int, precision: str, how: str) -> None:
    """D 46."""
    ranks2.run(loaded, stage, precision, how)


def digits(rank: int, world: int, stage: int) -> bool:
    """A parameter that the state dict does not have keeps its master's digits."""
    pair = trained(rank, world, stage, "bf16")
    before = {n: pair.engine.full_fp32(p) for n, p in pair.model.named_parameters()}
    pair.model.load_state_dict({"scale": torch.full((7,), 1 / 3)}, strict=False)
    after = {n: pair.engine.full_fp32(p) for n, p in pair.model.named_parameters()}
    pair.engine.close()
    return all(
        torch.equal(after[name], torch.full((7,), 1 / 3) if name == "scale" else value)
        for name, value in before.items()
    )


@every_stage
def test_what_is_not_loaded_keeps_its_digits(ranks2: RankPool, stage: int) -> None:
    assert all(ranks2.run(digits, stage))


def mistakes(rank: int, world: int, stage: int) -> list[tuple[str, str]]:
    pair = trained(rank, world, stage)
    model = pair.model
    whole = pair.reference.state_dict()
    bare = {key: value for key, value in whole.items() if key != "one.bias"}
    wrong = {**whole, "one.bias": torch.zeros(2)}
    found = [
        attempt(lambda: model.load_state_dict(bare)),
        attempt(lambda: model.load_state_dict({**whole, "surplus": torch.zeros(1)})),
        attempt(lambda: model.load_state_dict(wrong)),
        attempt(lambda: model.load_state_dict(whole, assign=True)),
        attempt(lambda: model.load_state_dict(bare if rank else whole, strict=False)),
    ]
    pair.engine.backward(pair.engine(tokens(2, 0, rank)))  # and all goes on
    pair.engine.step()
    assert sharded_again(pair)
    pair.engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_what_cannot_be_loaded_is_said_in_torchs_words_or_ours(ranks2: RankPool, stage: int) -> None:
    for found in ranks2.run(mistakes, stage):
        assert [kind for kind, _ in found] == ["RuntimeError"] * 3 + ["StateError", "RuntimeError"]
        missing, surplus, wrong, assigned, unequal = (message for _, message in found)
        assert 'Missing key(s) in state_dict: "one.bias"' in missing
        assert 'Unexpected key(s) in state_dict: "surplus"' in surplus
        assert "size mismatch for one.bias: copying a param with shape torch.Size([2])" in wrong
        assert "assign=True" in assigned
        assert "before `initialize`" in assigned
        assert "'one.bias' was loaded on 1 of 2 ranks" in unequal


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block(6, 5)
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.last = nn.Linear(6, 6)
        self.broken = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.broken:
            raise KeyError("no disk")

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.first(x)) @ self.weight).square().mean()


def interrupted(rank: int, world: int, stage: int) -> float:
    """A saver that raises leaves nothing behind that a later step or state dict could see."""
    pair = Pair.of(rank, world, stage, Fails, sgd)
    pair.model.broken = True
    assert attempt(pair.model.state_dict)[0] == "KeyError"
    pair.model.broken = False
    for step in range(2):
        x = [torch.full((2, 6), float(step + at)) for at in range(world)]
        pair.engine.backward(pair.engine(x[rank]))
        pair.everybody(lambda net, at, x=x: net(x[at]))
        pair.engine.step()
        pair.update()
        same_keys = list(pair.model.state_dict()) == list(pair.reference.state_dict())
        assert same_keys
        assert sharded_again(pair)
    return pair.finish()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_saver_that_raises(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(interrupted, stage)) <= 1e-6


def memory(rank: int, world: int) -> tuple[int, int, int]:
    """(most bytes gathered at once while saving, those of the largest bucket, gathers)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), *(Block(40, 20) for _ in range(4)), nn.Linear(40, 3))
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    )
    live: set[int] = set()
    sizes = {bucket.index: bucket.nbytes for bucket in engine.layout.buckets}
    most = gathers = 0

    def watch(action: Any) -> None:
        nonlocal most, gathers
        if str(action.kind) == "GATHER":
            gathers += 1
            live.add(action.bucket)
        elif str(action.kind) == "FREE":
            live.discard(action.bucket)
        most = max(most, sum(sizes[bucket] for bucket in live))

    engine.executor.on_action = watch
    model.state_dict()
    engine.close()
    return most, max(sizes.values()), gathers - len(sizes)


def test_one_bucket_at_a_time(ranks2: RankPool) -> None:
    for most, largest, surplus in ranks2.run(memory):
        assert most == largest
        assert surplus == 0


def hugging_face(rank: int, world: int, stage: int, folder: str) -> bool:
    """`save_pretrained` on all ranks; the model that `from_pretrained` makes of it is tied and equal."""
    from test_hugging_face import batch, llama
    from transformers import LlamaForCausalLM

    model: Any = llama()
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    engine.backward(engine(**batch(0, 0, rank)).loss)
    engine.step()
    model.save_pretrained(folder, is_main_process=rank == 0)
    torch.distributed.barrier()
    state = engine.full_state_dict(rank0_only=False)
    fresh = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert fresh.lm_head.weight is fresh.model.embed_tokens.weight
    found = fresh.state_dict()
    engine.close()
    return list(found) == list(state) and all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("stage", [2, 3])
def test_save_pretrained(ranks2: RankPool, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("transformers")
    assert ranks2.run(hugging_face, stage, str(tmp_path)) == [True, True]


def tied(rank: int, world: int, stage: int) -> float:
    """Still one weight after ten steps, in the state dict, and loaded; its gradient is the sum of both uses."""
    pair = Pair.of(rank, world, stage, Odd, sgd)
    for step in range(10):
        pair.engine.backward(pair.engine(tokens(step, 0, rank)))
        pair.everybody(lambda net, at, s=step: net(tokens(s, 0, at)))
        gradient = zeroshard.safe_get_full_grad(pair.model.embed.weight)
        assert float((gradient - pair.reference.embed.weight.grad).abs().max()) <= 1e-6
        pair.engine.step()
        pair.update()
    state = pair.model.state_dict()
    assert state["head.weight"] is state["embed.weight"]
    assert pair.model.head.weight is pair.model.embed.weight
    pair.model.load_state_dict(state)
    fresh = Odd()
    fresh.load_state_dict(state)
    assert torch.equal(fresh.head.weight, state["embed.weight"])
    return pair.finish()


@every_stage
def test_tied_weights_stay_tied(ranks2: RankPool, stage: int) -> None:
    """D 52."""
    assert max(ranks2.run(tied, stage)) <= 1e-6


def loaded_inside(rank: int, world: int, stage: int, modifier: int | None) -> float:
    """Loading inside of `gathered`: it reaches shards and masters by itself, and is no edit without a modifier."""
    pair = trained(rank, world, stage)
    state = pair.model.state_dict()
    halved = {key: value / 2 if isinstance(value, Tensor) else value for key, value in state.items()}
    with pair.engine.gathered(modifier_rank=modifier):
        pair.model.load_state_dict(halved)
        same(pair.model.state_dict(), halved)
        with pytest.raises(ShardedAccessError, match="without modifier_rank"), pair.engine.gathered():
            pair.model.scale.data.mul_(2)
        pair.model.scale.data.div_(2)
    pair.reference.load_state_dict(halved)
    return pair.distance()


@pytest.mark.parametrize("modifier", [None, 1])
@pytest.mark.parametrize("stage", [1, 3])
def test_loading_inside_of_gathered(ranks2: RankPool, stage: int, modifier: int | None) -> None:
    assert ranks2.run(loaded_inside, stage, modifier) == [0.0, 0.0]


def copied(rank: int, world: int, stage: int, precision: str) -> list[str]:
    """A deep copy (an average of weights, a teacher) is a model of its own, while the engine is open and after."""
    pair = Pair.of(rank, world, stage, Full, sgd, **PRECISIONS[precision])
    with pair.engine.gathered():
        twin = copy.deepcopy(pair.model)
    weights = copy.deepcopy(twin.state_dict())
    actions: list[Any] = []
    loss = pair.engine(tokens(0, 0, rank))
    pair.engine.executor.on_action = actions.append
    if rank == 0:  # it gathers nothing, so it may run on one rank
        twin(tokens(0, 0, 0)).backward()
        same(twin.state_dict(), weights)
        twin.zero_grad()
    pair.engine.executor.on_action = None
    pair.engine.backward(loss)
    pair.engine.step()
    other, *_ = zeroshard.initialize(model=twin, optimizer=sgd(twin), config=pair.engine.config)
    pair.engine.close()
    same(twin.state_dict(), weights)
    twin.load_state_dict(weights)
    other.backward(other(tokens(0, 0, rank)))
    other.step()
    if precision == "fp32":  # else its masters began with what 16 bits left of the weights
        same(twin.state_dict(), pair.model.state_dict())
    other.close()
    twin(tokens(0, 0, rank))
    return [str(action) for action in actions]


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_a_copy_has_left_the_engine(ranks2: RankPool, stage: int, precision: str) -> None:
    assert ranks2.run(copied, stage, precision) == [[], []]
