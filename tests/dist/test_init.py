"""`zeroshard.Init`: what any code builds under it is, bit for bit, what it builds in plain PyTorch with rank 0's
seed, and no rank has it whole at any time."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Odd, features, tokens
from pairs import attempt, config
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import zeroshard
from zeroshard import assembly, cut
from zeroshard.guard import ShardedParameter, home_of
from zeroshard.testing import RankPool
from zeroshard.zero import GatheredParameters

SMALL = 100  # bytes: next to nothing stays open


class Custom(nn.Module):
    """Everything that constructors do to weights of modules that are finished."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.first = nn.Linear(6, 5)
        self.copies = nn.ModuleList(copy.deepcopy(self.first) for _ in range(2))
        self.listed = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
        self.rows = nn.ParameterList([torch.rand(3, 2), torch.rand(1)])
        self.embed = nn.Embedding(7, 6, padding_idx=1)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.transposed = nn.Parameter(torch.rand(4, 6).t())
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.norm = nn.BatchNorm1d(5)
        self.apply(self._reset)
        with torch.no_grad():
            self.first.weight[2] += self.listed[0].weight[:, 0].sum()
            self.listed[1].weight.copy_(self.listed[0].weight.t() @ self.listed[2].weight)
            torch.cat([p.view(-1) for p in self.listed.parameters()])
        self.listed[2].bias.data = torch.full((6,), float(self.embed.weight.detach().norm()))
        self.register_buffer("table", torch.outer(self.scale.detach(), torch.randn(3)))

    def _reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and not nn.utils.parametrize.is_parametrized(module):
            nn.init.trunc_normal_(module.weight, std=0.02)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.5)
            nn.init.zeros_(module.weight[module.padding_idx])

    def forward(self, x: Tensor) -> Tensor:
        return self.listed(x).square().mean()


def built(fn: Callable[[], nn.Module], rank: int) -> tuple[nn.Module, nn.Module]:
    """(in plain PyTorch with rank 0's seed, under Init with a seed of each rank's own)."""
    torch.manual_seed(0)
    expected = fn()
    after = torch.get_rng_state()
    torch.manual_seed(rank)
    with zeroshard.Init():
        model = fn()
    if rank == 0:
        assert torch.equal(torch.get_rng_state(), after), "as many random numbers were drawn"
    return expected, model


def is_original(name: str) -> bool:
    """Of a parametrised weight: it stays whole."""
    return ".parametrizations." in name


def is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, ShardedParameter)


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """Names of what is not bit for bit the same, in either direction; metadata is compared while sharded."""
    mine, theirs = (list(net.named_parameters(remove_duplicate=False)) for net in (model, expected))
    wrong = [f"{name} is not sharded" for name, p in mine if not (is_original(name) or is_sharded(p))]
    for (name, p), (other, q) in zip(mine, theirs, strict=True):
        facts = [(t.shape, t.dtype, t.device, t.requires_grad, t.numel(), t.nbytes) for t in (p, q)]
        if facts[0] != facts[1] or name != other:
            wrong.append(f"{name} tells {facts[0]}, {other} is {facts[1]}")
    with GatheredParameters(model):
        wrong += [name for (name, p), (_, q) in zip(mine, theirs, strict=True) if not torch.equal(p, q)]
    buffers = zip(model.named_buffers(), expected.buffers(), strict=True)
    return wrong + [name for (name, b), q in buffers if not torch.equal(b, q)]


def construct(rank: int, world: int, fn: Callable[[], nn.Module], open_bytes: int) -> dict[str, Any]:
    cut.OPEN_BYTES = open_bytes
    expected, model = built(fn, rank)
    kept = sum(home_of(p).piece.numel() for name, p in model.named_parameters() if not is_original(name))
    dist.all_reduce(total := torch.tensor(kept))
    return {
        "differing": differing(model, expected) if rank == 0 else differing_parameters(model, expected),
        "kept": int(total)
        - sum(p.numel() for name, p in expected.named_parameters() if not is_original(name)),
        "tied": model.tied.weight is model.embed.weight if isinstance(model, Custom) else True,
    }


def differing_parameters(model: nn.Module, expected: nn.Module) -> list[str]:
    """Buffers are each rank's own until `initialize`, and so are originals of parametrised weights."""
    for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True):
        theirs.copy_(mine)
    both = zip(model.named_parameters(), expected.parameters(), strict=True)
    with torch.no_grad():
        for mine, theirs in ((p, q) for (name, p), q in both if is_original(name)):
            theirs.copy_(mine)
    return differing(model, expected)


@pytest.mark.parametrize("open_bytes", [SMALL, 64 << 20])
@pytest.mark.parametrize("fn", [Custom, Odd])
def test_weights_are_those_of_plain_construction(
    ranks2: RankPool, fn: Callable[[], nn.Module], open_bytes: int
) -> None:
    for result in ranks2.run(construct, fn, open_bytes):
        assert result == {"differing": [], "kept": 0, "tied": True}


def train(rank: int, world: int, stage: int, section: dict[str, Any], optimizer: str) -> list[str]:
    """Names of the weights that differ after training: built under Init or not."""
    cut.OPEN_BYTES = SMALL
    expected, model = built(Odd, rank)
    for net in (expected, model):
        net.blocks[0].requires_grad_(False)
        settings = config(stage, **section, train_micro_batch_size_per_gpu=4)
        made = getattr(torch.optim, optimizer)(net.parameters(), lr=1e-2)
        engine, *_ = zeroshard.initialize(model=net, optimizer=made, config=settings)
        for step in range(2):
            engine.backward(engine(tokens(step, 0, rank)))
            engine.step()
        if net is model:
            assert all(home_of(p).buffer is not None for p in net.parameters())
        engine.close()
    both = zip(model.named_parameters(), expected.parameters(), strict=True)
    assert model.head.weight is model.embed.weight
    return [name for (name, p), q in both if type(p) is not nn.Parameter or not torch.equal(p, q)]


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "section", "optimizer"),
    [(3, {}, "AdamW"), (3, BF16, "AdamW"), (2, BF16, "SGD"), (0, {}, "Adagrad")],
)
def test_training_is_that_of_a_model_built_whole(
    ranks2: RankPool, stage: int, section: dict[str, Any], optimizer: str
) -> None:
    assert ranks2.run(train, stage, section, optimizer) == [[], []]


class Watched(nn.Module):
    """Layers in a plain list, as in `Sequential(*layers)`; `most` is the bytes this rank had of them at once."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        self.most = 0
        for _ in range(20):
            layers.append(nn.Linear(16, 16, bias=False))
            self.most = max(self.most, held_bytes(layers))
        self.layers = nn.Sequential(*layers)
        self.apply(self._reset)

    def _reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            self.most = max(self.most, held_bytes(list(self.layers)))


def held_bytes(layers: list[nn.Module]) -> int:
    total = 0
    with torch._C.DisableTorchFunctionSubclass():
        for layer in layers:
            weight, home = layer.weight, home_of(layer.weight)
            total += weight.untyped_storage().nbytes() + (0 if home is None else home.piece.nbytes)
    return total


def most_bytes(rank: int, world: int) -> tuple[int, int]:
    cut.OPEN_BYTES = 2 * LAYER
    with zeroshard.Init():
        model = Watched()
    return model.most, held_bytes(list(model.layers))


LAYER = 16 * 16 * 4


def test_no_rank_has_more_than_its_part_and_what_is_open(ranks2: RankPool, ranks4: RankPool) -> None:
    for pool in (ranks2, ranks4):
        shard = 20 * LAYER // pool.size
        for most, after in pool.run(most_bytes):
            # A layer that is open keeps its piece; one more is in use.
            assert shard < most <= shard + 3 * LAYER
            assert after == shard


def handed_over(rank: int, world: int, stage: int) -> tuple[int, int, int]:
    """Most bytes of pieces and shards together while buckets are built; of shards at the end; of pieces then."""
    with zeroshard.Init():
        model = Watched()
    weights = [layer.weight for layer in model.layers]
    homes = [home_of(weight) for weight in weights]
    found, most = [], 0
    build = assembly.build_buffer

    def watched(*args: Any) -> Any:
        nonlocal most
        buffer = build(*args)
        found.append(buffer.shard.nbytes)
        most = max(most, sum(found) + sum(home.piece.nbytes for home in homes))
        return buffer

    assembly.build_buffer = watched
    try:
        engine, *_ = zeroshard.initialize(model=model, config=config(stage))
    finally:
        assembly.build_buffer = build
    engine.close()
    return most, sum(found), sum(home.piece.nbytes for home in homes)


def test_initialize_takes_the_pieces_bucket_by_bucket(ranks2: RankPool) -> None:
    for most, shards, pieces in ranks2.run(handed_over, 3):
        assert most == shards == 20 * LAYER // 2  # 20 buckets of one layer each, without padding
        assert pieces == 0


def outside(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """What raises between construction and `initialize`."""
    with zeroshard.Init():
        model = Odd()
    full = {name: torch.zeros(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    acts: dict[str, Callable[[], Any]] = {
        "read": lambda: model.blocks[1].up.weight.sum(),
        "edit": lambda: nn.init.ones_(model.blocks[1].up.weight),
        "forward": lambda: model(tokens(0, 0, rank)),
        "pickle": lambda: torch.save(model, io.BytesIO()),
        "state_dict": lambda: model.state_dict()["blocks.1.up.weight"].sum(),
        "state_dict, saved": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "parameter": lambda: nn.Parameter(model.blocks[1].up.weight),
        "load_state_dict": lambda: model.load_state_dict(full),
        "discard": lambda: model.to("meta"),
    }
    found = {what: attempt(act) for what, act in acts.items()}
    found["describe"] = "", repr(model.scale)
    return found


def test_elements_are_not_to_be_had_outside(ranks2: RankPool) -> None:
    for found in ranks2.run(outside):
        text = found.pop("describe")[1]
        assert "ShardedParameter('scale', shape=(7,), dtype=torch.float32" in text
        assert "sharded over 2 ranks" in text
        for what, (kind, message) in found.items():
            assert kind == ("RuntimeError" if what == "load_state_dict" else "ShardedAccessError"), what
            assert "zeroshard.zero.GatheredParameters(param, modifier_rank=0)" in message
            assert "under `with zeroshard.Init(): ...` again" in message
        assert "parameter 'blocks.1.up.weight' (shape (5, 7))" in found["edit"][1]
        assert "'fill_' needs its elements" in found["edit"][1]


def put_together(rank: int, world: int) -> list[str]:
    """What loaders and adapters do with a model that has no engine yet: names and shapes, and copies of parts."""
    expected, model = built(Odd, rank)
    wrong = []
    for keep_vars in (False, True):
        state = model.state_dict(keep_vars=keep_vars)
        wrong += ["keys"] * (list(state) != list(expected.state_dict()))
        wrong += [
            n
            for n, v in expected.state_dict().items()
            if (v.shape, v.dtype) != (state[n].shape, state[n].dtype)
        ]
    addresses = {p.data_ptr() for p in model.parameters()}
    wrong += ["addresses"] * (0 in addresses or len(addresses) != len(list(model.parameters())))
    twin = copy.deepcopy(model.blocks[1])
    wrong += ["still sharded"] * (not isinstance(model.blocks[1].up.weight, ShardedParameter))
    wrong += ["whole"] * any(isinstance(p, ShardedParameter) for p in twin.parameters())
    same = zip(twin.parameters(), expected.blocks[1].parameters(), strict=True)
    return wrong + ["copy"] * any(not torch.equal(p, q) for p, q in same)


def test_names_shapes_and_copies_before_there_is_an_engine(ranks2: RankPool) -> None:
    assert ranks2.run(put_together) == [[], []]


def converted(rank: int, world: int) -> list[str]:
    """`module.to` needs no elements: what each rank keeps is converted, before an engine and with one."""
    expected, model = built(Odd, rank)
    kept = model.scale
    wrong = ["cpu"] * (model.cpu().float().scale is not kept or not isinstance(kept, ShardedParameter))
    expected.to(torch.bfloat16).double()
    model.to(torch.bfloat16).double()
    wrong += ["dtype"] * (kept.dtype is not torch.float64 or not isinstance(kept, ShardedParameter))
    with GatheredParameters(model):
        named = zip(model.named_parameters(), expected.parameters(), strict=True)
        wrong += [name for (name, p), q in named if not torch.equal(p, q)]
    expected.float()
    engine, *_ = zeroshard.initialize(model=model.float(), config=config(3))
    model.cpu().to("cpu", torch.float32)
    wrong += ["bfloat16"] * (attempt(model.bfloat16)[0] != "ShardedAccessError")
    state = model.state_dict()
    wrong += [name for name, value in expected.state_dict().items() if not torch.equal(value, state[name])]
    engine.close()
    return wrong


def test_a_sharded_model_is_converted_where_it_is(ranks2: RankPool) -> None:
    assert ranks2.run(converted) == [[], []]


def handed_on(rank: int, world: int) -> list[str]:
    """An engine ends, and the next one takes what each rank has; no rank has the model whole in between."""
    torch.manual_seed(0)
    model = Odd()
    engine, *_ = zeroshard.initialize(model=model, optimizer=momentum, config=config(3))
    engine.backward(engine(tokens(0, 0, rank)))
    engine.step()
    state = engine.full_state_dict(rank0_only=False)
    cut.Cuts.of(dist.group.WORLD, engine.device)._open_one = None  # type: ignore[assignment, method-assign]
    try:
        engine.close(whole=False)
        sharded = next(p for p in model.parameters() if isinstance(p, ShardedParameter))
        assert "since its engine was destroyed (engine.close()" in attempt(sharded.sum)[1]
        kept = sum(home_of(p).piece.numel() for p in model.parameters() if p.numel())
        dist.all_reduce(total := torch.tensor(kept))
        wrong = ["more than once"] * (int(total) != sum(p.numel() for p in model.parameters()))
        named = dict(model.named_parameters())
        wrong += [name for name, p in named.items() if p.numel() and not isinstance(p, ShardedParameter)]
        second, *_ = zeroshard.initialize(model=model, optimizer=momentum, config=config(3))
    finally:
        del cut.Cuts.of(dist.group.WORLD, engine.device)._open_one
    found = second.full_state_dict(rank0_only=False)
    wrong += [name for name, value in state.items() if not torch.equal(value, found[name])]
    second.close(whole=False)
    with GatheredParameters(model):
        wrong += [name for name, p in model.named_parameters() if not torch.equal(p, state[name])]
    return wrong


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_an_engine_hands_the_next_one_what_each_rank_has(ranks2: RankPool, ranks4: RankPool) -> None:
    assert ranks2.run(handed_on) == [[], []]
    assert ranks4.run(handed_on) == [[]] * 4


def inside_again(rank: int, world: int) -> list[str]:
    """Init entered again: initialisers, state dicts both ways, a copy, a forward without gradients."""
    cut.OPEN_BYTES = SMALL
    expected, model = built(Odd, rank)
    wrong = []
    torch.manual_seed(1)
    other = Odd()
    with zeroshard.Init():
        state = {name: value.clone() for name, value in model.state_dict().items()}
        wrong += [
            name for name, value in expected.state_dict().items() if not torch.equal(value, state[name])
        ]
        twin = copy.deepcopy(model)
        model.load_state_dict(other.state_dict())
        with torch.no_grad():
            output = model(tokens(0, 0, 0))
        fresh = Odd()
        fresh.load_state_dict(other.state_dict(), assign=True)
    if not torch.equal(output, other(tokens(0, 0, 0))):
        wrong.append("forward")
    if any(0 in value.shape and name != "nothing" for name, value in state.items()):
        wrong.append("an entry of 0 elements")
    named = zip(twin.parameters(), expected.parameters(), strict=True)
    wrong += ["copy"] * any(not torch.equal(p, q) for p, q in named)  # made by no constructor: it stays whole
    return wrong + differing(model, other) + differing(fresh, other)


def test_code_under_init_again_sees_whole_weights(ranks2: RankPool) -> None:
    assert ranks2.run(inside_again) == [[], []]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 5, 3, padding=1), dim=2)
        self.turn = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.turn(self.conv(x[:, None]))).square().mean()


def parametrised(rank: int, world: int) -> list[str]:
    """Models ask for such a weight where no rank waits for another; its originals are there, or show that nobody
    gave them values."""
    expected, model = built(Normalised, rank)
    wrong = [name for name, p in model.head.named_parameters() if not isinstance(p, ShardedParameter)]
    if rank == 0:
        wrong += ["weight"] * (not torch.equal(model.conv.weight, expected.conv.weight))
    converted = copy.deepcopy(expected)
    zeroshard.Init(converted)
    wrong += ["converted"] * (not torch.equal(converted.conv.weight, expected.conv.weight))
    nets = {}
    for name, net in (("init", model), ("plain", expected)):
        engine, *_ = zeroshard.initialize(
            model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config(3)
        )
        for step in range(2):
            engine.backward(engine(features(step, 0, rank)))
            engine.step()
        engine.close()
        nets[name] = net.state_dict()
    wrong += [name for name, value in nets["plain"].items() if not torch.equal(nets["init"][name], value)]
    constant, nn.init.constant_ = nn.init.constant_, lambda tensor, value: tensor  # as loaders switch it off
    try:
        with zeroshard.Init():
            empty = Normalised()
            loaded = Normalised()
            first, second = (originals := loaded.conv.parametrizations.weight).parameters()
            with torch.no_grad():
                first.fill_(1.0)
            originals.original1 = nn.Parameter(torch.ones_like(second))
            moved = nn.Sequential(loaded)
        zeroshard.Init(moved)
    finally:
        nn.init.constant_ = constant
    wrong += ["has values"] * (not empty.conv.parametrizations.weight.original1.isnan().all())
    wrong += ["loaded"] * any(not p.eq(1.0).all() for p in moved[0].conv.parametrizations.weight.parameters())
    return wrong


def test_parametrised_weights_can_be_asked_for(ranks2: RankPool) -> None:
    assert ranks2.run(parametrised) == [[], []]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(6, 5)
        self.late = nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.early(x)).square().mean()


def born_late(rank: int, world: int) -> list[str]:
    """Parameters that have no values when they are registered: on meta, `skip_init`, lazy."""
    wrong = []
    with zeroshard.Init():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        wrong += ["meta is left"] * (not all(type(p) is nn.Parameter for p in model.parameters()))
        model[0].weight = nn.Parameter(torch.full((3, 4), rank + 1.0))  # as loaders do
        skipped = nn.Sequential(nn.utils.skip_init(nn.Linear, 3, 3, bias=False))
        nn.init.constant_(skipped[0].weight, rank + 1.0)
        lazy = Lazy()
        with torch.no_grad():
            lazy(torch.ones(2, 6))
        made = nn.Sequential(lazy)
    wrong += ["meta"] * (not model[1].weight.is_meta)
    for parameter in (model[0].weight, skipped[0].weight):
        wrong += ["is whole"] * (home_of(parameter) is None)
        with GatheredParameters(parameter):
            wrong += ["rank 0's values"] * (not torch.equal(parameter, torch.ones(parameter.shape)))
    wrong += [name for name, p in made.named_parameters() if not isinstance(p, ShardedParameter)]
    engine, *_ = zeroshard.initialize(
        model=made, optimizer=torch.optim.SGD(made.parameters()), config=config(3)
    )
    engine.backward(engine(features(0, 0, rank)))
    engine.step()
    engine.close()
    return wrong


def test_parameters_without_values_are_cut_when_they_get_them(ranks2: RankPool) -> None:
    assert ranks2.run(born_late) == [[], []]


def gathered_blocks(rank: int, world: int, under_init: bool) -> dict[str, Any]:
    """GatheredParameters on cut parameters, one entry for each row of its rules."""
    cut.OPEN_BYTES = SMALL
    found: dict[str, Any] = {}
    context = zeroshard.Init(enabled=under_init)
    with zeroshard.Init():
        model = Odd()
    with context:
        one, two = model.one.weight, model.blocks[0].up.weight
        with GatheredParameters((p for p in [one, two, one]), modifier_rank=1):
            if rank == 1:
                one.data.fill_(5.0)
                nn.init.constant_(two, 7.0)
        with GatheredParameters([one, two]):
            found["modifier"] = bool((one == 5).all() and (two == 7).all())
            with GatheredParameters(model, modifier_rank=0):  # overlaps
                if rank == 0:
                    one.data[0, 0] = 8.0
            found["still there"] = one.shape == (1, 7) and float(one[0, 0]) == 8.0
        for way in ("in place", "data"):

            def edit(way: str = way) -> None:
                with GatheredParameters(model.blocks[0]):
                    if rank == 0:
                        (two.detach() if way == "in place" else two.data)[4, 6] = 9.0

            found[way] = attempt(edit)

        def fails() -> None:
            with GatheredParameters(one, modifier_rank=0):
                one.data.zero_()
                raise KeyError("mine")

        found["exception"] = attempt(fails)
        found["rank"] = attempt(lambda: GatheredParameters(one, modifier_rank=9).__enter__())
    found["sharded"] = all(isinstance(p, ShardedParameter) for p in model.parameters())
    with GatheredParameters(one):
        found["dropped"] = float(one[0, 0])
    found["shape"] = attempt(lambda: reshaped(model.scale))
    with GatheredParameters(one):
        found["engine"] = attempt(lambda: zeroshard.initialize(model=model, config=config(3)))
    return found


def reshaped(parameter: nn.Parameter) -> None:
    with GatheredParameters(parameter, modifier_rank=0):
        parameter.data = torch.zeros(3)


@pytest.mark.parametrize("under_init", [False, True])
def test_gathered_parameters_before_initialize(ranks2: RankPool, under_init: bool) -> None:
    for found in ranks2.run(gathered_blocks, under_init):
        assert found["modifier"]
        assert found["still there"]
        for way in ("in place", "data"):
            kind, message = found[way]
            assert kind == "ShardedAccessError"
            assert (
                "edited inside GatheredParameters without modifier_rank. Likely: the edit is meant" in message
            )
            assert "writes to a parameter in place" in message
        assert found["exception"] == ("KeyError", "'mine'")
        assert found["rank"] == ("StateError", "modifier_rank is 9; the group has ranks 0 to 1")
        assert found["sharded"]
        assert found["dropped"] == (0.0 if under_init else 8.0)  # under Init the code's own values count
        assert "'scale' was given another shape inside GatheredParameters: (3,) here" in found["shape"][1]
        assert "gathered by GatheredParameters; leave that block before `initialize`" in found["engine"][1]


def nested(rank: int, world: int) -> dict[str, Any]:
    """A teacher built while the student is being built; bytes of live tensors over the steps."""
    torch.manual_seed(0)
    with zeroshard.Init():
        student = Custom()
        with zeroshard.Init():
            teacher = Custom()
        with zeroshard.Init(enabled=False):
            plain = nn.Linear(2, 2)
        assert type(plain.weight) is nn.Parameter
        engine, *_ = zeroshard.initialize(
            model=student, optimizer=torch.optim.Adam(student.parameters()), config=config(3)
        )
    other, *_ = zeroshard.initialize(model=teacher.requires_grad_(False), config=config(3))
    bytes_at = {}
    for step in range(21):
        x = features(step, 0, rank)
        with torch.no_grad():
            target = other(x)
        engine.backward((engine(x) - target).square())
        engine.step()
        del target
        if step in (3, 20):
            bytes_at[step] = live_bytes()
    engine.close()
    other.close()
    hooks = torch.nn.modules.module
    return {
        "bytes": [bytes_at[3], bytes_at[20]],
        "hooks": len(hooks._global_parameter_registration_hooks)
        + len(hooks._global_module_registration_hooks),
    }


def live_bytes() -> int:
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        storages = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if issubclass(type(t), Tensor) and not isinstance(t, FakeTensor)  # left by a compilation before
        }
    return sum(storages.values())


def test_nested_construction_of_teacher_and_student(ranks2: RankPool) -> None:
    for found in ranks2.run(nested):
        assert found["bytes"][1] <= found["bytes"][0]
        assert found["hooks"] == 0


def late_writes(rank: int, world: int) -> tuple[bool, int, int]:
    """(writes through views that were taken long before are there, bytes open before and after the views go)."""
    cut.OPEN_BYTES = SMALL
    with zeroshard.Init():
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(12)])
        views = [parameter.data for parameter in model.parameters()]
        for view in views:
            view.fill_(2.0)
        most = held_bytes(list(model))
        del view
        views.clear()
        for _ in range(20):  # each a moment to put some away
            nn.Linear(1, 1)
        least = held_bytes(list(model))
    with GatheredParameters(model):
        return all(bool((parameter == 2).all()) for parameter in model.parameters()), most, least


def test_writes_through_views_that_were_taken_earlier_count(ranks2: RankPool) -> None:
    for filled, most, least in ranks2.run(late_writes):
        assert filled
        layer = 6 * 6 * 4
        assert most == 12 * layer * 3 // 2  # whole, and this rank's piece
        assert least <= 12 * layer // 2 + layer + SMALL


def breaks(rank: int, world: int) -> dict[str, Any]:
    """An exception in the block leaves parameters as they are, and nothing behind; ranks that differ are told."""
    cut.OPEN_BYTES = 64 << 20
    kept: list[nn.Module] = []

    def build() -> None:
        with zeroshard.Init():
            kept.append(nn.Sequential(nn.Linear(2, 2)))
            raise KeyError("mine")

    found: dict[str, Any] = {"error": attempt(build)}
    found["whole"] = type(kept[0][0].weight) is nn.Parameter and home_of(kept[0][0].weight) is None
    found["bytes"] = float(kept[0][0].weight.sum()) is not None
    engine, *_ = zeroshard.initialize(model=kept[0], config=config(3))
    engine.close()
    with zeroshard.Init():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def differ() -> None:
        with zeroshard.Init():
            if rank == 1:
                model[0].weight.sum()

    found["differ"] = attempt(differ)
    return found


def test_what_goes_wrong_in_the_block(ranks2: RankPool) -> None:
    results = ranks2.run(breaks)
    for found in results:
        assert found["error"] == ("KeyError", "'mine'")
        assert found["whole"]
        kind, message = found["differ"]
        assert kind == "ShardedAccessError"
        assert "ranks ran different code under zeroshard.Init" in message
        assert "GatheredParameters(params, modifier_rank=0)`, which all enter" in message
    assert "rank 0 of 2 leaves the block" in results[0]["differ"][1]
    assert "rank 1 of 2 gathers '0.weight'" in results[1]["differ"][1]


def convert(rank: int, world: int) -> list[str]:
    """A model that exists, dtypes, and the arguments that choose whether anything is cut."""
    torch.manual_seed(rank)
    wrong = []
    model = Odd()
    torch.manual_seed(0)
    expected = Odd()
    zeroshard.Init(module=model, remote_device="cpu", config_dict_or_path={"zero_optimization": {"stage": 3}})
    wrong += differing(model, expected)
    narrow = Odd()
    zeroshard.Init(narrow, dtype=torch.bfloat16)
    wrong += ["dtype"] * any(p.dtype is not torch.bfloat16 for p in narrow.parameters())
    auto = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    with zeroshard.Init(config_dict_or_path=auto, dtype=torch.bfloat16):
        whole = nn.Sequential(nn.Linear(2, 2))
    wrong += ["stage 2 is not cut"] * any(type(p) is not nn.Parameter for p in whole.parameters())
    wrong += ["dtype of what is not cut"] * any(p.dtype is not torch.bfloat16 for p in whole.parameters())
    alone = [dist.new_group([member]) for member in range(world)][rank]
    with zeroshard.Init(data_parallel_group=alone):
        mine = nn.Linear(2, 2)
    wrong += ["a group of one"] * (type(mine.weight) is not nn.Parameter)
    engine, *_ = zeroshard.initialize(model=model, config=config(3))
    refused = attempt(lambda: zeroshard.Init(module=model))
    wrong += [refused[1]] * ("belongs to an engine already" not in refused[1])
    engine.close()
    return wrong + [name for (name, p), q in _named(model, expected) if not torch.equal(p, q)]


def _named(model: nn.Module, expected: nn.Module) -> list[Any]:
    return list(zip(model.named_parameters(), expected.parameters(), strict=True))


def test_conversion_of_a_model_that_exists(ranks2: RankPool) -> None:
    assert ranks2.run(convert) == [[], []]


def in_groups(rank: int, world: int, zero: dict[str, Any], path: str, stored: nn.Module) -> list[str]:
    """Spread over pairs of ranks; the engine is over all four, or over pairs of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    expected = Block(6, 5)
    torch.manual_seed(rank // 2)
    with zeroshard.Init(data_parallel_group=groups[rank // 2]):
        model = Block(6, 5)
    shards = {home_of(p).shards for p in model.parameters()}
    engine, *_ = zeroshard.initialize(model=model, config=config(3, zero=zero))
    with engine.gathered():
        wrong = [name for (name, p), q in _named(model, expected) if not torch.equal(p, q)]
    zeroshard.load_pretrained(engine, path)
    engine.close()
    wrong += [f"loaded {name}" for (name, p), q in _named(model, stored) if not torch.equal(p, q)]
    return [f"shards {shards}"] * (shards != {2}) + wrong


@pytest.mark.parametrize("zero", [{}, {"mics_shard_size": 2}])
def test_groups_smaller_than_the_world(ranks4: RankPool, tmp_path: Path, zero: dict[str, Any]) -> None:
    stored = Block(6, 5)
    save_file(stored.state_dict(), tmp_path / "model.safetensors")
    assert ranks4.run(in_groups, zero, str(tmp_path), stored) == [[]] * 4
