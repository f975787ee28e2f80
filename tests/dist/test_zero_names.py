"""`zeroshard.zero`: full weights in a block, leaves, and registrations that are not needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Block, features
from torch import Tensor, nn

import zeroshard
from zeroshard import zero
from zeroshard.errors import ModelError, ShardedAccessError
from zeroshard.testing import RankPool

STAGES = (0, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def engine_of(model: nn.Module, stage: int, **more: Any) -> Any:
    settings = {
        "gradient_clipping": 0,
        **more,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
    }
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=settings
    )
    return engine


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def read_and_edit(rank: int, world: int, stage: int, form: str) -> tuple[bool, bool, bool]:
    """(the values were right, the edit is there after a step of lr 0, in the masters too)."""
    model = net()
    expected = copy.deepcopy(model)
    engine = engine_of(model, stage, bf16={"enabled": True})
    head, bias = model.head.weight, model.head.bias
    forms: dict[str, Any] = {
        "one": head,
        "list": [head, bias],
        "generator": (p for p in (head, bias, head)),
        "module": model.head,
        "parameters": model.parameters(),
    }
    with zero.GatheredParameters(forms[form], modifier_rank=1):
        same = torch.equal(head.float(), expected.head.weight.bfloat16().float())
        with torch.no_grad():
            head.fill_(rank + 1.0)  # rank 1's counts
    engine.backward(engine(features(0, 0, rank)))
    engine.step()
    with zero.GatheredParameters(model):
        kept = bool((head == 2).all())
    master = bool((engine.full_fp32(head) == 2).all())
    engine.close()
    return same, kept, master


@pytest.mark.parametrize("form", ["one", "list", "generator", "module", "parameters"])
@pytest.mark.parametrize("stage", STAGES)
def test_read_and_edit(ranks2: RankPool, stage: int, form: str) -> None:
    assert ranks2.run(read_and_edit, stage, form) == [(True, True, True)] * 2


def nested(rank: int, world: int, stage: int) -> list[str]:
    """Overlapping blocks: what the inner one keeps is no edit of the outer one; the outer one's own is."""
    model = net()
    engine = engine_of(model, stage)
    seen = []
    with zero.GatheredParameters(model):
        with zero.GatheredParameters(model.head, modifier_rank=0), torch.no_grad():
            model.head.weight.zero_()
        seen.append(str(tuple(model.head.weight.shape)) + str(bool((model.head.weight == 0).all())))
        loss = engine(features(0, 0, rank))  # a forward inside does not take the weights away
        seen.append(str(tuple(model.blocks[0].up.weight.shape)) + str(bool(model.blocks[0].up.weight.any())))
        del loss
    try:
        with zero.GatheredParameters(model), torch.no_grad():
            model.head.weight.add_(1)
    except ShardedAccessError as error:
        seen.append(str(error))
    try:
        with zero.GatheredParameters(model):
            raise KeyError("mine")
    except KeyError as error:
        seen.append(str(error))
    engine.close()
    seen.append(str(bool((model.head.weight == 0).all())) if stage == 3 else "True")
    return seen


@pytest.mark.parametrize("stage", STAGES)
def test_nested_blocks(ranks2: RankPool, stage: int) -> None:
    for inner, after_forward, edited, raised, kept in ranks2.run(nested, stage):
        assert inner == "(3, 6)True"
        assert after_forward == "(5, 6)True"
        assert "without modifier_rank" in edited
        assert "mine" in raised
        assert kept == "True"


def before_initialize(rank: int, world: int) -> tuple[bool, bool]:
    """No engine yet: weights are plain, and the edit of the chosen rank is everybody's."""
    torch.manual_seed(rank)
    model = Net()
    with zero.GatheredParameters(model.head.weight, modifier_rank=1):
        nn.init.constant_(model.head.weight, rank + 1.0)
    same = bool((model.head.weight == 2).all())
    engine = engine_of(model, 3)
    with zero.GatheredParameters(model, enabled=False):  # nothing is gathered
        sharded = engine.status(model.head.weight).name == "NOT_AVAILABLE"
    engine.close()
    return same, sharded


def test_before_an_engine_and_switched_off(ranks2: RankPool) -> None:
    assert ranks2.run(before_initialize) == [(True, True)] * 2


def generation(rank: int, world: int) -> int:
    """Ranks that run forwards of different number, which stage 3 alone could not."""
    model = net()
    engine = engine_of(model, 3)
    with torch.no_grad(), engine.unwrap_for_generation() as whole:
        for _ in range(3 if rank == 0 else 6):
            whole(features(0, 0, rank))
    for step in range(2):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
    steps = engine.global_steps
    engine.close()
    return steps


def test_generation_of_different_length(ranks2: RankPool) -> None:
    assert ranks2.run(generation, timeout=20) == [2, 2]


def experts(rank: int, world: int, how: str) -> tuple[int, float]:
    """Each rank runs another block: one unit by its mark. (buckets that are gathered, difference)."""
    model = net()
    reference = copy.deepcopy(model)
    if how == "class":
        assert zero.set_z3_leaf_modules(model, [nn.ModuleList]) == [model.blocks]
    elif how == "name":
        assert zero.set_z3_leaf_modules_by_name(model, ["blocks"]) == ([model.blocks], [])
    elif how == "suffix":
        assert zero.set_z3_leaf_modules_by_suffix(model, ["ocks"]) == ([model.blocks], [])
    else:
        zero.set_z3_leaf_modules(model, ["torch.nn.modules.container.ModuleList"])
    assert zero.get_z3_leaf_modules(model) == [model.blocks]
    engine = engine_of(model, 3)
    units = [unit.path for unit in engine.layout.units]
    assert "blocks" in units
    assert not any(path.startswith("blocks.") for path in units)
    x = features(0, 0, rank)
    model.blocks.forward = lambda y: model.blocks[rank](y)  # a leaf is entered as one module
    loss = model.head(model.blocks(x)).square().mean()
    loss.backward()
    gradients = [zeroshard.safe_get_full_grad(p) for p in model.parameters()]
    for other in range(world):
        (reference.head(reference.blocks[other](features(0, 0, other))).square().mean() / world).backward()
    pairs = zip(gradients, reference.parameters(), strict=True)
    worst = max(float((g - p.grad).abs().max()) for g, p in pairs)
    engine.close()
    return len(units), worst


@pytest.mark.parametrize("how", ["class", "name", "suffix", "class name"])
def test_a_leaf_is_one_unit(ranks2: RankPool, how: str) -> None:
    for _, worst in ranks2.run(experts, how, timeout=20):
        assert worst <= 1e-6


def test_leaves_can_be_taken_back() -> None:
    model = net()
    zero.set_z3_leaf_modules(model, [Block])
    assert len(zero.get_z3_leaf_modules(model)) == 2
    zero.set_z3_leaf_module(model.blocks[0], False)
    assert zero.get_z3_leaf_modules(model) == [model.blocks[1]]
    zero.unset_z3_leaf_modules(model, ["Block"])
    assert zero.get_z3_leaf_modules(model) == []
    assert zero.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda m: zero.set_z3_leaf_modules(m, ["Blok"]), ModelError, ("Blok", "Block")),
        (lambda m: zero.set_z3_leaf_modules(m, [3]), ModelError, ("3",)),
        (lambda m: zero.set_z3_leaf_modules_by_name(m, ["block"]), ModelError, ("'block'",)),
        (lambda m: zero.GatheredParameters(m.named_parameters()), ShardedAccessError, ("named_parameters",)),
        (lambda m: zero.GatheredParameters(3), ShardedAccessError, ("3 (int)",)),
        (lambda m: zero.register_external_parameter(m, "w"), ShardedAccessError, ("str",)),
    ],
)
def test_mistakes(call: Any, kind: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        call(net())
    for word in words:
        assert word in str(caught.value)


def test_a_registration_is_accepted_and_marks_after_initialize_are_refused() -> None:
    model = net()
    zero.register_external_parameter(model, model.head.weight)
    zero.register_external_parameter(model, model.head.weight)
    zero.unregister_external_parameter(model, model.head.weight)
    engine = engine_of(model, 3)
    with pytest.raises(ModelError, match="before `initialize`"):
        zero.set_z3_leaf_modules(model, [Block])
    engine.close()
