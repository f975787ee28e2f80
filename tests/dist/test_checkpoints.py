"""Any number of ranks and any stage opens what any other wrote, exactly; what does not fit is told on all ranks."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import zeroshard
from zeroshard import errors
from zeroshard.engine import Engine
from zeroshard.testing.ranks import RankPool, RunFailedError

WORDS, WIDTH = 23, 12


class Net(nn.Module):
    """An embedding tied with the head, blocks with dropout, a norm, a buffer that trains along, an empty weight, a
    frozen layer, a parameter of no dims."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 31), nn.GELU(), nn.Dropout(0.2), nn.Linear(31, WIDTH))
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        self.seen += x.detach().mean(0).to(self.seen.dtype)
        x = self.frozen(self.norm(x))
        return self.head(x) / self.temperature + self.empty.sum()


def config(stage: int, dtype: str = "fp32", **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,  # its norm is summed in an order that depends on the layout
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 30, "warmup_num_steps": 4}},
        # A small scale: a sum over more ranks must not be the one that overflows.
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
        "bf16": {"enabled": dtype == "bf16"},
        **more,
    }


def build(stage: int, dtype: str, seed: int = 0, **more: Any) -> Engine:
    return zeroshard.initialize(model=Net(seed), config=config(stage, dtype, **more))[0]


def train(engine: Engine, steps: range, samples: int = 6) -> list[float]:
    """All ranks see the same samples, so that the number of ranks changes nothing."""
    losses = []
    for step in steps:
        words = torch.randint(0, WORDS, (samples,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(engine(words).float(), (words + 1) % WORDS)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def everything(engine: Engine) -> dict[str, Any]:
    """Weights, moments, buffers and counters, whole."""
    found: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        found[name] = engine.full_fp32(parameter)
        if parameter.requires_grad and parameter.numel():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{name}:{key}"] = zeroshard.safe_get_full_optimizer_state(parameter, key)
    found.update({f"buffer:{name}": buffer.clone() for name, buffer in engine.module.named_buffers()})
    found["counters"] = (engine.global_steps, engine.skipped_steps, engine.global_samples, engine.get_lr())
    found["scale"] = engine.loss_scale()
    return found


def save(rank: int, world: int, stage: int, dtype: str, where: str) -> tuple[dict[str, Any], list[float]]:
    engine = build(stage, dtype)
    train(engine, range(5))
    torch.manual_seed(123)  # the same on all ranks: dropout is to be the same on any number of them
    engine.save_checkpoint(
        where, client_state={"epoch": 3, "best": torch.arange(3), "name": ["a", ("b", None)]}
    )
    saved = everything(engine)
    losses = train(engine, range(5, 8))
    engine.close()
    return saved, losses


def load(rank: int, world: int, stage: int, dtype: str, where: str, steps: int = 3) -> tuple[Any, ...]:
    engine = build(stage, dtype, seed=1)
    path, client_state = engine.load_checkpoint(where)
    assert path is not None
    assert client_state is not None
    best = client_state.pop("best")
    assert torch.equal(best, torch.arange(3))
    assert client_state == {"epoch": 3, "name": ["a", ("b", None)]}
    if rank >= 2:  # the saved run had two ranks, and no random state for more
        torch.manual_seed(123)
    loaded = everything(engine)
    losses = train(engine, range(5, 5 + steps))
    assert engine.module.head.weight is engine.module.embed.weight
    engine.close()
    return loaded, losses


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize(("stage", "dtype"), [(3, "fp32"), (1, "bf16"), (0, "fp16")])
def test_every_stage_and_number_of_ranks_opens_it(
    stage: int,
    dtype: str,
    tmp_path: Path,
    alone: RankPool,
    ranks2: RankPool,
    ranks3: RankPool,
    ranks4: RankPool,
) -> None:
    """Weights, moments and counters are the same bits; what follows is the same within reduction order."""
    saved, losses = ranks2.run(save, stage, dtype, str(tmp_path))[0]
    pools = {1: alone, 2: ranks2, 3: ranks3, 4: ranks4}
    others = {3: [(2, 3), (2, 0), (3, 3), (4, 2), (1, 1)], 1: [(3, 3), (2, 1)], 0: [(2, 0), (1, 3)]}[stage]
    for ranks, other in others:
        for loaded, onward in pools[ranks].run(load, other, dtype, str(tmp_path)):
            assert_same(saved, loaded)
            if ranks == 2 and dtype == "fp32":
                assert onward == losses  # bit for bit, at any stage
            else:
                assert onward == pytest.approx(losses, rel=2e-2 if dtype != "fp32" else 1e-5)


def across_layouts(rank: int, world: int, where: str) -> list[bool]:
    """Saved from shard groups of two (MiCS); opened there, with second shards, under Init, in other buckets."""

    def make(seed: int = 3, init: bool = False, **zero: Any) -> Engine:
        with zeroshard.Init(enabled=init):
            model = Net(seed)
        settings = config(3)
        settings["zero_optimization"].update(zero)
        return zeroshard.initialize(model=model, config=settings)[0]

    engine = make(0, mics_shard_size=2)
    train(engine, range(3))
    engine.save_checkpoint(where)
    saved = everything(engine)
    torch.manual_seed(5)
    losses = train(engine, range(3, 6))
    engine.close()
    found = []
    variants: list[dict[str, Any]] = [
        {"mics_shard_size": 2},
        {"zero_hpz_partition_size": 2},
        {"init": True},
        {"stage3_param_persistence_threshold": 0, "sub_group_size": 50, "stage3_max_live_parameters": 1000},
    ]
    for variant in variants:
        engine = make(**variant)
        train(engine, range(1))
        engine.load_checkpoint(where)
        loaded = everything(engine)
        torch.manual_seed(5)
        if rank == 0:  # its buffers are everybody's after a load
            assert_same(saved, loaded)
        found.append(train(engine, range(3, 6)) == losses)
        engine.close()
    return found


def test_shard_groups_init_and_other_buckets_open_it(ranks4: RankPool, tmp_path: Path) -> None:
    assert ranks4.run(across_layouts, str(tmp_path)) == [[True] * 4] * 4


def resume(rank: int, world: int, where: str) -> tuple[list[float], list[float]]:
    """Ten more steps with dropout, each rank its own samples and random numbers."""
    torch.manual_seed(rank)
    random.seed(rank)
    engine = build(3, "fp32", gradient_clipping=0.5)
    train(engine, range(rank, 9, 3))
    engine.save_checkpoint(where)
    straight = [random.random(), *train(engine, range(100 + rank, 110 + rank))]
    engine.close()
    torch.manual_seed(77)
    random.seed(77)
    engine = build(3, "fp32", seed=5, gradient_clipping=0.5)
    train(engine, range(2))
    engine.load_checkpoint(where)
    again = [random.random(), *train(engine, range(100 + rank, 110 + rank))]
    engine.close()
    return straight, again


def test_ten_steps_after_a_resume_are_those_of_the_run_that_went_on(ranks2: RankPool, tmp_path: Path) -> None:
    for straight, again in ranks2.run(resume, str(tmp_path)):
        assert straight == again


def factored(rank: int, world: int, where: str, first: int, second: int) -> bool:
    """State of a shape of its own (Adafactor's rows and columns), on whole parameters."""

    def make(stage: int) -> Engine:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 14), nn.Tanh(), nn.Linear(14, 5))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
        return zeroshard.initialize(model=model, optimizer=optimizer, config=config(stage, scheduler={}))[0]

    def step(engine: Engine, seed: int) -> float:
        x = torch.randn(8, 9, generator=torch.Generator().manual_seed(seed))
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    engine = make(first)
    for seed in range(3):
        step(engine, seed)
    engine.save_checkpoint(where)
    straight = [step(engine, seed) for seed in range(3, 6)]
    engine.close()
    engine = make(second)
    engine.load_checkpoint(where)
    again = [step(engine, seed) for seed in range(3, 6)]
    engine.close()
    return straight == again


def test_optimizers_of_whole_parameters(ranks2: RankPool, tmp_path: Path) -> None:
    assert all(ranks2.run(factored, str(tmp_path / "a"), 3, 1))
    assert all(ranks2.run(factored, str(tmp_path / "b"), 0, 2))


def in_background(rank: int, world: int, where: str) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Training goes on while the checkpoint is written, and does not change it."""
    engine = build(3, "fp32", checkpoint={"async": True})
    train(engine, range(3))
    saved = everything(engine)
    engine.save_checkpoint(where)
    train(engine, range(3, 6))
    engine.save_checkpoint(where)  # waits for the first
    engine.close()  # waits for the second
    fresh = build(3, "fp32", seed=2)
    fresh.load_checkpoint(where, tag="global_step3")
    loaded = everything(fresh)
    path, _ = fresh.load_checkpoint(where)
    # An error of the writer comes with the next call that waits for it.
    message = None
    engine = build(3, "fp32", checkpoint={"writer": {"decoupled": True}})
    train(engine, range(1))
    engine.save_checkpoint(os.path.join(where, "latest"))  # a file, not a directory
    try:
        engine.close()
    except errors.CheckpointError as error:
        message = str(error)
    fresh.close()
    assert path is not None
    assert path.endswith("global_step6")
    return saved, loaded, message


def test_asynchronous_saves(ranks2: RankPool, tmp_path: Path) -> None:
    for saved, loaded, message in ranks2.run(in_background, str(tmp_path)):
        assert_same(saved, loaded)
        assert message is not None
        assert "could not be saved" in message
        assert "rank 0" in message


def in_the_middle(rank: int, world: int, where: str) -> dict[str, Any]:
    """At moments that are not right after a step."""
    found: dict[str, Any] = {}
    # Between two micro-batches: a load drops the first, and its place in the window.
    engine = build(1, "fp32", gradient_accumulation_steps=2, scheduler={})
    engine.save_checkpoint(where, tag="here")
    torch.manual_seed(1)
    straight = train(engine, range(3))
    train(engine, range(2))  # the window's second, and another's first
    path, _ = engine.load_checkpoint(os.path.join(where, "here"))  # the checkpoint itself, not what holds it
    torch.manual_seed(1)
    found["window"] = train(engine, range(3)) == straight and path is not None
    for what in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(errors.StateError, match=r"inside engine.gathered\(\)"), engine.gathered():
            what(where)
    engine.close()
    for what in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(errors.StateError, match=r"after engine.close\(\)"):
            what(where)
    # After weights were edited in place, which the masters learn at the next step.
    engine = build(1, "bf16")
    with torch.no_grad():
        engine.module.norm.weight.fill_(3)
    engine.save_checkpoint(where, tag="edited")
    engine.close()
    engine = build(3, "bf16", seed=1)
    engine.load_checkpoint(where, tag="edited")
    found["edited"] = bool((engine.full_fp32(engine.module.norm.weight) == 3).all())
    engine.close()
    # With another loss scale than the one the loading engine began with.
    scaled = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": {}}
    engine = build(0, "fp16", **scaled, fp16={"enabled": True, "initial_scale_power": 4})
    engine.save_checkpoint(where, tag="scaled")
    torch.manual_seed(1)
    train(engine, range(1))
    straight_weights = engine.full_fp32(engine.module.norm.weight)
    engine.close()
    engine = build(0, "fp16", seed=1, **scaled)
    engine.load_checkpoint(where, tag="scaled")
    torch.manual_seed(1)
    train(engine, range(1))
    found["scaled"] = torch.equal(engine.full_fp32(engine.module.norm.weight), straight_weights)
    engine.close()
    return found


def test_saves_and_loads_at_any_moment(ranks2: RankPool, tmp_path: Path) -> None:
    for found in ranks2.run(in_the_middle, str(tmp_path)):
        assert found == {"window": True, "edited": True, "scaled": True}


def behind_the_back(rank: int, world: int, where: str) -> tuple[str | None, Any]:
    """What was given changes, and a load comes, before the writer has begun."""
    from zeroshard.checkpoint.directory import Saves

    begin = Saves.begin

    def later(self: Saves, tag: str) -> None:
        time.sleep(0.2)
        begin(self, tag)

    engine = build(3, "fp32", checkpoint={"async": True})
    history, average = [1], torch.zeros(2)
    Saves.begin = later  # type: ignore[method-assign]
    try:
        engine.save_checkpoint(where, client_state={"history": history, "average": average})
        history.append(2)
        average += 1
        path, client_state = engine.load_checkpoint(where)
    finally:
        Saves.begin = begin  # type: ignore[method-assign]
    engine.close()
    assert client_state is not None
    return path, (client_state["history"], client_state["average"].tolist())


def test_an_asynchronous_save_is_of_its_moment_and_a_load_waits_for_it(
    ranks2: RankPool, tmp_path: Path
) -> None:
    for path, client_state in ranks2.run(behind_the_back, str(tmp_path)):
        assert path is not None
        assert client_state == ([1], [0.0, 0.0])


# ---- what does not fit ----------------------------------------------------------------------------------


def try_load(rank: int, world: int, where: str, tag: str | None = None, **options: Any) -> str:
    engine = build(3, "fp32", seed=1)
    try:
        path, _ = engine.load_checkpoint(where, tag, **options)
        return f"loaded {path}"
    except errors.CheckpointError as error:
        return str(error)
    finally:
        engine.close()


def damaged(directory: Path, name: str, how: str) -> None:
    path = directory / name
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[:-7])
        return
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_stops_all_ranks(ranks2: RankPool, ranks3: RankPool, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    ranks2.run(save, 3, "fp32", str(whole))
    expected = {
        ("rank_00001.safetensors", "missing"): "rank_00001.safetensors is missing: it should have",
        ("rank_00001.safetensors", "cut"): "was cut off or replaced",
        ("rank_00000.safetensors", "flipped"): "rank_00000.safetensors is damaged: bytes 0 to",
        ("index.json", "missing"): "it has no index.json",
        ("index.json", "cut"): "index.json is damaged",
        ("index.json", "flipped"): "index.json is damaged",
    }
    for (name, how), text in expected.items():
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        damaged(copy / "global_step5", name, how)
        pool = ranks3 if how == "missing" else ranks2
        for message in pool.run(try_load, str(copy)):
            assert text in message, (name, how, message)
        shutil.rmtree(copy)


def test_what_is_looked_for_and_what_is_there(ranks2: RankPool, tmp_path: Path) -> None:
    assert ranks2.run(try_load, str(tmp_path)) == ["loaded None"] * 2
    assert ranks2.run(try_load, str(tmp_path / "nowhere")) == ["loaded None"] * 2
    ranks2.run(save, 3, "fp32", str(tmp_path))
    for message in ranks2.run(try_load, str(tmp_path), "best"):
        assert "has no checkpoint 'best'; it has global_step5" in message
    for message in ranks2.run(try_load, str(tmp_path), load_optimizer_states=False):
        assert message.endswith("global_step5")
    (tmp_path / "latest").write_text("global_step9")
    for message in ranks2.run(try_load, str(tmp_path)):
        assert "has no checkpoint 'global_step9'" in message
    for message in ranks2.run(try_load, str(tmp_path), "global_step5"):
        assert message.endswith("global_step5")


def other_model(rank: int, world: int, where: str) -> dict[str, str]:
    """Errors by what differs; and what `load_module_strict=False` makes of it."""
    told = {}

    def attempt(what: str, model: nn.Module, **options: Any) -> Engine:
        engine = zeroshard.initialize(model=model, config=config(3, scheduler={}))[0]
        try:
            engine.load_checkpoint(where, **options)
            told[what] = "loaded"
        except errors.CheckpointError as error:
            told[what] = str(error)
        return engine

    wider = Net(1)
    wider.frozen = nn.Linear(WIDTH, WIDTH + 1).requires_grad_(False)
    attempt("shape", wider).close()
    renamed = Net(1)
    renamed.norms = renamed.norm
    del renamed.norm
    attempt("name", renamed).close()
    more = Net(1)
    more.adapter = nn.Linear(3, 3)
    attempt("more", more).close()
    more = Net(1)
    more.adapter = nn.Linear(3, 3)
    engine = attempt("not strict", more, load_module_strict=False)
    adapter = engine.full_fp32(more.adapter.weight)
    torch.manual_seed(1)
    assert adapter.abs().sum() > 0
    engine.close()
    return told


def test_a_checkpoint_of_another_model(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(save, 3, "fp32", str(tmp_path))
    for told in ranks2.run(other_model, str(tmp_path)):
        assert (
            "'frozen.weight' has shape (12, 12) in the checkpoint and (13, 12) in the model" in told["shape"]
        )
        assert "It lacks 'norms." in told["name"]
        assert re.search(r"Was 'norm.(\w+)' renamed to 'norms.\1'\?", told["name"])
        assert "It lacks 'adapter.bias', 'adapter.weight' of this model" in told["more"]
        assert told["not strict"] == "loaded"


def trainable_only(rank: int, world: int, where: str) -> tuple[bool, list[str], str]:
    engine = build(3, "fp32")
    train(engine, range(2))
    engine.save_checkpoint(where, exclude_frozen_parameters=True)
    saved = everything(engine)
    engine.close()
    index = json.loads((Path(where) / "global_step2" / "index.json").read_text())["checkpoint"]
    engine = build(1, "fp32", seed=0)  # the base: the same frozen weights
    engine.load_checkpoint(where)
    loaded = everything(engine)
    engine.close()
    same = all(torch.equal(saved[n], loaded[n]) for n in saved if isinstance(saved[n], Tensor))
    return same, [*index["tensors"]], try_load(rank, world, where)  # a base of another seed


def test_frozen_parameters_may_be_left_out(ranks2: RankPool, tmp_path: Path) -> None:
    for same, names, told in ranks2.run(trainable_only, str(tmp_path)):
        assert same
        assert "'frozen.weight', 'frozen.bias' have other values. Load the base model first" in told
        assert "model/embed.weight" in names
        assert "model/seen" in names
        assert not [name for name in names if "frozen" in name]


def by_hand(rank: int, world: int, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The user's function renames on the way in."""
    engine = build(3, "fp32")
    train(engine, range(2))
    engine.save_checkpoint(where)
    saved = everything(engine)
    engine.close()
    renamed = Net(1)
    renamed.norms = renamed.norm
    del renamed.norm

    def rename(weights: Any, module: nn.Module) -> None:
        module.load_state_dict({name.replace("norm.", "norms."): value for name, value in weights.items()})

    engine = zeroshard.initialize(model=renamed, config=config(1))[0]
    engine.load_checkpoint(where, load_optimizer_states=False, custom_load_fn=rename)
    loaded = everything_but_state(engine)
    engine.close()
    return {n: v for n, v in saved.items() if n in loaded}, loaded


def everything_but_state(engine: Engine) -> dict[str, Any]:
    return {
        name.replace("norms.", "norm."): engine.full_fp32(p) for name, p in engine.module.named_parameters()
    }


def test_a_load_function_of_the_users(ranks2: RankPool, tmp_path: Path) -> None:
    for saved, loaded in ranks2.run(by_hand, str(tmp_path)):
        assert_same(saved, loaded)


def at_once(rank: int, world: int, where: str) -> list[str]:
    """Load an older tag, and save at once what was loaded; then go by tag without `latest`."""
    engine = build(3, "fp32")
    train(engine, range(1))
    engine.save_checkpoint(where, tag="older")
    train(engine, range(1, 2))
    engine.save_checkpoint(where, tag="newer")
    engine.load_checkpoint(where, tag="older")
    engine.save_checkpoint(where, tag="again", save_latest=False)
    path, _ = engine.load_checkpoint(where)
    engine.close()
    assert path is not None
    os.sync()
    if rank == 0:
        os.unlink(os.path.join(where, "latest"))
    return [path, try_load(rank, world, where, "older", load_optimizer_states=False)]


def test_tags_and_a_save_right_after_a_load(ranks2: RankPool, tmp_path: Path) -> None:
    for path, older in ranks2.run(at_once, str(tmp_path)):
        assert path.endswith("newer")
        assert older.endswith("older")
    for file in (tmp_path / "older").glob("*.safetensors"):
        left, right = (load_file(where / file.name) for where in (tmp_path / "older", tmp_path / "again"))
        assert left.keys() == right.keys()
        for name, value in left.items():
            if not name.startswith("extras"):  # has the time
                assert torch.equal(value, right[name]), name


def test_nothing_needs_a_pickle(ranks2: RankPool, tmp_path: Path) -> None:
    """Tensors open with safetensors, the rest with torch's weights-only loader."""
    ranks2.run(save, 3, "fp32", str(tmp_path))
    (tag,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    blobs = 0
    for file in tag.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
            continue
        for name, value in load_file(file).items():
            if name.startswith(("extras", "rng")):
                torch.load(io.BytesIO(value.numpy().tobytes()), weights_only=True)
                blobs += 1
    assert blobs == 3


def read_on(rank: int, world: int, where: str, first: bool) -> list[list[int]]:
    """The samples of each step: two of 24, then, resumed, the rest of the epoch."""
    model = nn.Linear(1, 1)
    settings = config(2, scheduler={}, train_micro_batch_size_per_gpu=2 if world == 2 else 4)
    data = [torch.tensor([float(n)]) for n in range(24)]
    engine, _, loader, _ = zeroshard.initialize(model=model, config=settings, training_data=data)
    if not first:
        engine.load_checkpoint(where)
    seen = []
    for batch in loader:
        seen.append(sorted(int(sample) for sample in batch))
        engine.backward(engine(batch).square().mean())
        engine.step()
        if first and len(seen) == 2:
            engine.save_checkpoint(where)
            break
    engine.close()
    return seen


def test_the_loader_goes_on_where_it_was(ranks2: RankPool, alone: RankPool, tmp_path: Path) -> None:
    first = ranks2.run(read_on, str(tmp_path), True)
    (rest,) = alone.run(read_on, str(tmp_path), False)
    samples = [sample for rank in first for step in rank for sample in step]
    samples += [sample for step in rest for sample in step]
    assert sorted(samples) == list(range(24))


class Unsaveable:
    """A class of the user's."""


def bad_saves(rank: int, world: int, where: str) -> dict[str, str]:
    engine = build(3, "fp32")
    train(engine, range(1))
    told = {}

    def attempt(what: str, *args: Any, **options: Any) -> None:
        try:
            engine.save_checkpoint(*args, **options)
            told[what] = "saved"
        except errors.CheckpointError as error:
            told[what] = str(error)

    attempt("object", where, client_state={"epoch": 1, "net": Unsaveable()})
    attempt("tag", where, tag="a/b")
    attempt("place", os.path.join(where, "file"))
    told["left"] = ",".join(sorted(os.listdir(where)))
    attempt("tags", where, tag=f"mine{rank}")
    engine.close()
    engine = build(3, "fp32", checkpoint={"tag_validation": "Fail"})
    attempt("tags refused", where, tag=f"other{rank}")
    engine.close()
    return told


def test_saves_that_cannot_be(ranks2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    first, second = ranks2.run(bad_saves, str(tmp_path))
    assert "entry 'net' (Unsaveable) of client_state cannot be saved" in first["object"]
    assert "rank 0 could not go on: entry 'net'" in second["object"]
    for told in (first, second):
        assert "tag 'a/b' cannot name a checkpoint" in told["tag"]
        assert "could not be saved" in told["place"]
        assert "rank 0: File exists" in told["place"]
        assert told["left"] == "file"
        assert told["tags"] == "saved"
        assert "different tags: 'other0', 'other1'" in told["tags refused"]
    assert (tmp_path / "mine0").is_dir()
    assert not (tmp_path / "mine1").exists()


def die_writing(rank: int, world: int, where: str, room: list[int]) -> list[str]:
    """Rank 1's disk has room for so many bytes of another checkpoint, each time."""
    from zeroshard.checkpoint import files

    engine = build(3, "fp32")
    train(engine, range(1))
    engine.save_checkpoint(where, tag="first")
    train(engine, range(1, 2))
    write = files.CheckedWriter.write
    told = []
    for left in room:

        def limited(self: files.CheckedWriter, data: Any) -> None:
            nonlocal left
            view = memoryview(data).cast("B")
            write(self, view[:left])
            left -= len(view)
            if left < 0:
                raise OSError(28, "No space left on device", str(self.path))

        if rank == 1:
            files.CheckedWriter.write = limited  # type: ignore[method-assign]
        try:
            engine.save_checkpoint(where, tag="second")
            told.append("saved")
        except errors.CheckpointError as error:
            told.append(str(error))
        finally:
            files.CheckedWriter.write = write  # type: ignore[method-assign]
        assert (Path(where) / "latest").read_text() == "first"
    engine.save_checkpoint(where, tag="third", save_latest=False)
    engine.close()
    return told


def test_a_disk_that_is_full_at_any_byte_leaves_the_previous_checkpoint(
    ranks2: RankPool, tmp_path: Path
) -> None:
    room = [0, 1, 7, 8, *range(100, 36_000, 1_500)]
    for told in ranks2.run(die_writing, str(tmp_path), room):
        assert len(told) == len(room)
        for message in told:
            assert "checkpoint 'second' could not be saved" in message
            assert "rank 1: No space left on device" in message
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "latest", "third"]
    assert (tmp_path / "latest").read_text() == "first"


def die(rank: int, world: int, where: str) -> str:
    """Rank 1 is killed while it writes; rank 0 is told."""
    from zeroshard.checkpoint import files

    engine = build(3, "fp32")
    train(engine, range(1))
    engine.save_checkpoint(where, tag="first")
    if rank == 1:
        files.CheckedWriter.write = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[method-assign,assignment]
    try:
        engine.save_checkpoint(where, tag="second")
        return "saved"
    except errors.ZeroShardError as error:
        return str(error)


def test_a_rank_lost_in_a_save(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        with pytest.raises(RunFailedError) as caught:
            pool.run(die, str(tmp_path))
        assert "rank was lost" in str(caught.value.outcomes[0].value)
        assert (tmp_path / "latest").read_text() == "first"
        # The next run cleans up, and goes on.
        for message in pool.run(try_load, str(tmp_path)):
            assert message.endswith("first")
        pool.run(save, 3, "fp32", str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "global_step5", "latest"]


def alone_in_a_save(rank: int, world: int, where: str, stage: int) -> str:
    """Rank 0 saves, the other goes on training."""
    engine = build(stage, "fp32")
    train(engine, range(1))
    began = time.monotonic()
    try:
        if rank == 0:
            engine.save_checkpoint(where)
        else:
            train(engine, range(1, 2))
        return "went on"
    except errors.CommError as error:
        assert time.monotonic() - began < 20
        return str(error)


@pytest.mark.parametrize("stage", [3, 1])
def test_a_save_on_one_rank_only_is_an_error_on_both(stage: int, tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for told in pool.run(alone_in_a_save, str(tmp_path), stage):
            assert "save_checkpoint" in told
            assert "rank 0" in told
