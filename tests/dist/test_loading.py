"""Weights from files: the same values as a plain load, wherever the model is on its way, or an error on all
ranks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Odd, tokens
from pairs import attempt, config
from safetensors.torch import save_file
from torch import nn

import zeroshard
from zeroshard import cut
from zeroshard.guard import ShardedParameter
from zeroshard.testing import RankPool
from zeroshard.weights import Weights
from zeroshard.zero import GatheredParameters


class Net(Odd):
    """With buffers, saved and not, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.blocks[1].requires_grad_(False)


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def stored(directory: Path, files: int = 3) -> nn.Module:
    """A model whose weights lie in several files with an index; of the tied pair one is there."""
    model = net(5)
    nn.init.uniform_(model.norm.running_mean)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    table = {}
    for number in range(files):
        part = names[number::files]
        save_file({name: state[name].contiguous() for name in part}, directory / f"{number}.safetensors")
        table |= dict.fromkeys(part, f"{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    return model


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    both = zip(model.state_dict().items(), expected.state_dict().items(), strict=True)
    return [name for (name, mine), (_, theirs) in both if not torch.equal(mine, theirs)]


def load_early(rank: int, world: int, path: str, expected: nn.Module) -> list[str]:
    """Before `initialize`: cut, cut and open, plain, on meta, converted."""
    cut.OPEN_BYTES = 100

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            model = net(0)
        model.scratch = torch.zeros(2)
        return model

    def under_init() -> nn.Module:
        with zeroshard.Init():
            model = net(rank)
            zeroshard.load_pretrained(model, path)
        return model

    def converted() -> nn.Module:
        zeroshard.Init(module=(model := net(rank)), dtype=torch.bfloat16)
        return model

    wrong = []
    makers: list[Callable[[], nn.Module]] = [on_meta, under_init, converted, lambda: net(rank)]
    for make in makers:
        model = make()
        loaded = zeroshard.load_pretrained(model, path)
        wrong += [str(loaded)] * bool(loaded.missing_keys or loaded.unexpected_keys)
        wrong += ["untied"] * (model.head.weight is not model.embed.weight)
        wrong += ["frozen"] * any(p.requires_grad for p in model.blocks[1].parameters())
        sharded = [isinstance(p, ShardedParameter) for p in model.parameters()]
        wrong += ["sharded"] * (any(sharded) if make is makers[-1] else not all(sharded))
        with GatheredParameters(model):
            named = zip(model.named_parameters(), expected.parameters(), strict=True)
            wrong += [
                f"{make.__name__}: {name}" for (name, p), q in named if not torch.equal(p, q.to(p.dtype))
            ]
        buffers = zip(model.named_buffers(), expected.buffers(), strict=True)
        wrong += [name for (name, p), q in buffers if not torch.equal(p, q)]
    return wrong


def test_models_before_initialize(ranks2: RankPool, tmp_path: Path) -> None:
    expected = stored(tmp_path)
    assert ranks2.run(load_early, str(tmp_path), expected) == [[], []]


def load_late(rank: int, world: int, path: str, expected: nn.Module, stage: int, bf16: bool) -> list[str]:
    """Into an engine that has trained: masters, the model's copy, and training from there on."""
    model, twin = net(0), copy.deepcopy(expected)
    settings = config(stage, bf16={"enabled": bf16}, zero={"stage3_param_persistence_threshold": 10})
    wrong = []
    for module in (model, twin):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine, *_ = zeroshard.initialize(model=module, optimizer=optimizer, config=settings)
        if module is model:
            engine.backward(engine(tokens(0, 0, rank)))
            engine.step()
            zeroshard.load_pretrained(engine, path)
            for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
                found = engine.full_fp32(p)  # of frozen parameters, which have no master, the model's copy
                assert found.dtype is torch.float32 or not p.requires_grad
                wrong += [name] * (not torch.equal(found, q.to(found.dtype)))
            with engine.gathered():
                wrong += [f"copy of {n}" for n in differing(model, cast(expected) if bf16 else expected)]
        for step in range(2):
            engine.backward(engine(tokens(step, 0, rank)))
            engine.step()
        engine.close()
    return wrong + differing(model, twin)


def cast(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16()
    return copied


@pytest.mark.parametrize(("stage", "bf16"), [(3, False), (3, True), (2, True), (0, False)])
def test_into_an_engine(ranks2: RankPool, tmp_path: Path, stage: int, bf16: bool) -> None:
    expected = stored(tmp_path)
    assert ranks2.run(load_late, str(tmp_path), expected, stage, bf16) == [[], []]


def test_on_one_rank_and_without_the_names_of_a_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = stored(tmp_path)
    model = net(0)
    monkeypatch.setattr("zeroshard.loading._LOG_EVERY", -1.0)
    with caplog.at_level("INFO", "zeroshard"):
        zeroshard.load_pretrained(model, tmp_path)
    assert f"loading {tmp_path}: 0.0 of 0.0 GB of this rank" in caplog.text
    assert differing(model, expected) == []
    engine, *_ = zeroshard.initialize(model=net(0), config=config(3))
    zeroshard.load_pretrained(engine, tmp_path)
    engine.close()
    assert differing(engine.module, expected) == []
    headed = nn.ModuleDict({"base": net(1), "head": nn.Linear(2, 2)})
    headed.base_model_prefix = "base"
    loaded = zeroshard.load_pretrained(headed, tmp_path, strict=False)
    assert loaded.missing_keys == ("head.weight", "head.bias")
    assert loaded.unexpected_keys == ()
    assert differing(headed["base"], expected) == []


MISFITS: dict[str, tuple[Any, str]] = {
    "missing": (lambda s: s.pop("scale"), "missing 'scale'; unexpected nothing. Pass strict=False"),
    "unexpected": (lambda s: s.update(other=torch.ones(1)), "missing nothing; unexpected 'other'"),
    "shape": (
        lambda s: s.update(scale=torch.ones(8)),
        "'scale' has shape (8,); 'scale' of the model has (7,)",
    ),
    "dtype": (lambda s: s.update(scale=torch.ones(7, dtype=torch.int32)), "'scale' has dtype torch.int32"),
    "tied": (
        lambda s: s.update({"head.weight": torch.ones(11, 7)}),
        "'embed.weight' and 'head.weight' differ",
    ),
    "one rank": (None, "does not exist"),
    "other files": (None, "ranks load different files or models"),
}


def misfit(rank: int, world: int, path: str, other: str | None) -> list[Any]:
    """The error in each place, and whether nothing was written."""
    if rank == 1 and other is not None:
        path = other
    found = []
    with zeroshard.Init():
        early = net(0)
    engine, *_ = zeroshard.initialize(model=net(0), config=config(3))
    for target in (early, net(0), engine):
        found.append(attempt(lambda target=target: zeroshard.load_pretrained(target, path)))
    with GatheredParameters(early):
        found.append(differing(early, net(0)))
    engine.close()
    return [*found, differing(engine.module, net(0))]


@pytest.mark.parametrize("kind", MISFITS)
def test_files_that_do_not_fit(ranks2: RankPool, tmp_path: Path, kind: str) -> None:
    change, message = MISFITS[kind]
    state = {name: value.clone() for name, value in net(5).state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "good.safetensors")
    if change is not None:
        change(state)
    else:
        state["scale"] = torch.ones(7, dtype=torch.float64)
    save_file(state, tmp_path / "bad.safetensors")
    bad = str(tmp_path / "bad.safetensors")
    other = {"one rank": str(tmp_path / "nowhere"), "other files": str(tmp_path / "good.safetensors")}.get(
        kind
    )
    for rank, (*errors, early, late) in enumerate(ranks2.run(misfit, bad, other)):
        assert (early, late) == ([], [])
        for error, text in errors:
            assert error == "CheckpointError"
            if kind == "one rank" and rank == 0:
                assert text == ("another rank could not load, and nothing was written; its message says why")
            else:
                assert message in text


def busy(rank: int, world: int, path: str) -> list[tuple[str, str]]:
    """Where new weights could not reach what is gathered."""
    model = net(0)
    with zeroshard.Init():
        early = net(0)
    engine, *_ = zeroshard.initialize(model=model, config=config(3))
    found = []
    with engine.gathered():
        found.append(attempt(lambda: zeroshard.load_pretrained(engine, path)))
    with GatheredParameters(early.scale):
        found.append(attempt(lambda: zeroshard.load_pretrained(early, path)))
    engine.close()
    return found


def test_not_while_weights_are_gathered(ranks2: RankPool, tmp_path: Path) -> None:
    stored(tmp_path)
    for late, early in ranks2.run(busy, str(tmp_path)):
        assert late[0] == early[0] == "StateError"
        assert "is gathered, inside `engine.gathered()`" in late[1]
        assert early[1] == "load_pretrained inside GatheredParameters of 'scale'; leave the block first"


def failing_disk(rank: int, world: int, path: str) -> list[tuple[str, str]]:
    """A read that fails on one rank, half-way."""
    with zeroshard.Init():
        early = net(0)
    engine, *_ = zeroshard.initialize(model=net(0), config=config(3))
    read, found = Weights.read, []

    def fails(self: Weights, name: str, start: int, stop: int) -> Any:
        if name == "blocks.1.up.bias" and rank == 1:
            raise OSError("mine")
        return read(self, name, start, stop)

    Weights.read = fails  # type: ignore[method-assign]
    try:
        for target in (early, engine):
            found.append(attempt(lambda target=target: zeroshard.load_pretrained(target, path)))
    finally:
        Weights.read = read  # type: ignore[method-assign]
    zeroshard.load_pretrained(engine, path)
    engine.close()
    return [*found, ("", str(differing(engine.module, net(5))))]


def test_a_read_that_fails_on_one_rank_is_an_error_on_all(ranks2: RankPool, tmp_path: Path) -> None:
    stored(tmp_path)
    for rank, (*errors, after) in enumerate(ranks2.run(failing_disk, str(tmp_path))):
        for kind, message in errors:
            assert kind == ("CheckpointError" if rank == 0 else "OSError")
            assert ("weights are written in part: load again" in message) == (rank == 0)
        assert after == ("", "['norm.running_mean']")  # which the file has of its own


def hugging_face(rank: int, world: int, path: str, name: str) -> list[str]:
    """`from_config` and `from_pretrained` under Init against the same calls without it."""
    import transformers

    cut.OPEN_BYTES = 1000
    wrong = []
    auto = transformers.AutoModelForCausalLM if name != "T5" else transformers.AutoModelForSeq2SeqLM
    shape = transformers.AutoConfig.from_pretrained(path)
    makers = [lambda: auto.from_config(shape), lambda: auto.from_pretrained(path)]
    if name == "Llama":  # with a head that the files do not have
        makers += [lambda: transformers.AutoModelForSequenceClassification.from_pretrained(path)]
        makers += [lambda: auto.from_pretrained(path, dtype=torch.bfloat16)]
    for make in makers:
        torch.manual_seed(3)
        expected = make()
        torch.manual_seed(3)
        with zeroshard.Init():
            model = make()
        wrong += [n for n, p in model.named_parameters() if not isinstance(p, ShardedParameter)]
        names = ([n for n, _ in net.named_parameters()] for net in (model, expected))
        wrong += ["names"] * (next(names) != next(names))
        with GatheredParameters(model):
            wrong += differing(model, expected)
        buffers = zip(model.named_buffers(), expected.buffers(), strict=True)
        wrong += [n for (n, b), q in buffers if not torch.equal(b, q)]
        wrong += ["mode"] * (model.training is not expected.training)
    return wrong


SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2},
    "GPT2": {"vocab_size": 61, "n_embd": 24, "n_head": 2, "n_layer": 2, "n_positions": 32},
    "T5": {"vocab_size": 61, "d_model": 24, "d_kv": 12, "d_ff": 40, "num_layers": 2, "num_heads": 2},
    "Mixtral": {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_hugging_face_models(ranks2: RankPool, tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = SHAPES[name] | ({"num_hidden_layers": 2} if name in ("Llama", "Mixtral") else {})
    if name == "Llama":
        shape["tie_word_embeddings"] = True
    made = getattr(transformers, f"{name}Config")(**shape)
    auto = transformers.AutoModelForCausalLM if name != "T5" else transformers.AutoModelForSeq2SeqLM
    auto.from_config(made).save_pretrained(tmp_path, max_shard_size="20KB")
    assert ranks2.run(hugging_face, str(tmp_path), name) == [[], []]
