"""What `zeroshard export`, `inspect` and `verify` make of a checkpoint, and what other programs make of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import zeroshard
from zeroshard.checkpoint.export import export, parse_size
from zeroshard.checkpoint.opening import open_checkpoint
from zeroshard.checkpoint.storage import Reader
from zeroshard.errors import CheckpointError
from zeroshard.launch.cli import main
from zeroshard.testing.ranks import RankPool


class Tied(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.body = nn.Sequential(nn.Linear(8, 40), norm(40), nn.Linear(40, 8))
        self.body[0].bias.requires_grad_(False)
        self.head = nn.Linear(8, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.embed(words)))


def save(rank: int, world: int, where: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Tied()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    engine = zeroshard.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.arange(8)).square().mean())
        engine.step()
    engine.save_checkpoint(where, client_state={"epoch": 1})
    engine.close()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def saved(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    where = tmp_path_factory.mktemp("saves")
    return where, ranks2.run(save, str(where))[0]


Saved = tuple[Path, dict[str, Tensor]]


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype is value.dtype, name


def test_one_file_that_safetensors_loads_into_a_plain_model(saved: Saved, tmp_path: Path) -> None:
    where, weights = saved
    assert main(["export", str(where), str(tmp_path)]) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert "head.weight" not in found  # stored once
    model = Tied()
    load_model(model, tmp_path / "model.safetensors")  # strict: both names resolve
    assert_weights(dict(model.state_dict()), weights)


def test_many_files_of_torch_save_in_bf16(saved: Saved, tmp_path: Path) -> None:
    where, weights = saved
    for size in ("600", "1KB"):  # the second run has fewer files, and leaves none of the first
        arguments = ["--dtype", "bf16", "--format", "pt", "--max-shard-size", size]
        assert main(["export", str(where), str(tmp_path), *arguments]) == 0
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        assert (tmp_path / file).stat().st_size < 5000
        found.update(torch.load(tmp_path / file, weights_only=True))
    assert found.keys() == index["weight_map"].keys()
    assert len(list(tmp_path.iterdir())) == len(set(index["weight_map"].values())) + 1
    parameters = {name for name, _ in Tied().named_parameters(remove_duplicate=False)}
    assert_weights(
        found, {n: v.bfloat16() if n in parameters else v for n, v in weights.items()}
    )  # buffers keep their dtype
    model = Tied().bfloat16()
    model.load_state_dict(found)


class Shared(nn.Module):
    """One module under two names, and buffers that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.again = self.norm
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("conjugate", torch.randn(2, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.norm(x))


def save_shared(rank: int, world: int, where: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = zeroshard.initialize(model=Shared(), config={"train_micro_batch_size_per_gpu": 4})[0]
    engine.save_checkpoint(where)
    engine.save_16bit_model(where, "one.safetensors")
    weights = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    with torch.no_grad():
        engine.module.conjugate.zero_()
    engine.load_checkpoint(where)
    assert rank or torch.equal(engine.module.conjugate, weights["conjugate"])
    engine.close()
    return weights


def test_shared_buffers_and_views(ranks2: RankPool, tmp_path: Path) -> None:
    weights = ranks2.run(save_shared, str(tmp_path))[0]
    reader = open_checkpoint(tmp_path)
    assert_weights(torch.load(export(reader, tmp_path, format="pt").files[0], weights_only=True), weights)
    for file in (*export(reader, tmp_path).files, tmp_path / "one.safetensors"):
        found = load_file(file)
        assert_weights(found, {name: weights[name] for name in found})
        assert weights.keys() - found.keys() == {name for name in weights if name.startswith("again")}


def test_inspect_tells_the_run_and_every_tensor(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    where, weights = saved
    assert main(["inspect", str(where), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["global_steps"], told["world_size"], told["zero_stage"]) == (2, 2, 3)
    assert told["config"]["optimizer"]["type"] == "Adam"
    assert told["tied"] == {"head.weight": "embed.weight"}
    shapes = {row["name"]: row["shape"] for row in told["tensors"]}
    for name, value in weights.items():
        if name != "head.weight":
            assert shapes[f"model/{name}"] == list(value.shape)
    assert shapes["optimizer/exp_avg/embed.weight"] == [29, 8]
    assert shapes["optimizer/step/embed.weight"] == []
    assert main(["inspect", str(where / "global_step2")]) == 0
    assert "model/embed.weight\tfloat32\t(29, 8)\t928" in capsys.readouterr().out


def test_torchs_own_loader_reads_it_by_a_path_as_text(saved: Saved) -> None:
    where, weights = saved
    for reader in (open_checkpoint(str(where)), Reader(str(where / "global_step2"))):
        found = {"model/embed.weight": torch.zeros(29, 8), "optimizer/step/embed.weight": torch.zeros(())}
        dcp.load(found, storage_reader=reader, no_dist=True)
        torch.testing.assert_close(found["model/embed.weight"], weights["embed.weight"], rtol=0, atol=0)
        assert found["optimizer/step/embed.weight"] == 2


def test_verify_reads_everything(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, _ = saved
    assert main(["verify", str(where)]) == 0
    assert "all as they were written" in capsys.readouterr().out
    damaged = tmp_path / "copy"
    damaged.mkdir()
    for entry in (where / "global_step2").iterdir():
        data = bytearray(entry.read_bytes())
        if entry.name == "rank_00001.safetensors":
            data[-1] ^= 1
        (damaged / entry.name).write_bytes(data)
    assert main(["verify", str(damaged)]) == 1
    assert "rank_00001.safetensors is damaged" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="cannot be read"):
        export(open_checkpoint(damaged), tmp_path / "out")


def save_llama(rank: int, world: int, where: str) -> Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(shape)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    engine = zeroshard.initialize(model=model, config=config)[0]
    words = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=words, labels=words).loss)
    engine.step()
    engine.save_checkpoint(where)
    engine.close()
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(words).logits
    return logits


def test_a_hugging_face_directory(ranks2: RankPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    logits = ranks2.run(save_llama, str(tmp_path / "saves"))[0]
    base = tmp_path / "base"
    base.mkdir()
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_text("not copied")
    out = str(tmp_path / "out")
    arguments = ["--max-shard-size", "20KB", "--tokenizer", str(base)]
    assert main(["export", str(tmp_path / "saves"), out, *arguments]) == 0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(model(torch.arange(8).view(1, 8)).logits, logits)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def save_16bit(rank: int, world: int, where: str) -> tuple[dict[str, Tensor], str]:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 50},
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
    }
    engine = zeroshard.initialize(model=Tied(nn.LayerNorm), config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.arange(8)).float().square().mean())
        engine.step()
    assert engine.save_16bit_model(where)
    assert engine.save_16bit_model(where, "model.safetensors", exclude_frozen_parameters=True)
    expected = {name: engine.full_fp32(p).bfloat16() for name, p in engine.module.named_parameters()}
    try:
        engine.save_16bit_model(where + "/model.safetensors/below")
        told = ""
    except CheckpointError as error:
        told = str(error)
    engine.close()
    return expected, told


def test_weights_in_16_bits_in_one_file(ranks2: RankPool, tmp_path: Path) -> None:
    (expected, first), (_, second) = ranks2.run(save_16bit, str(tmp_path))
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    trained = load_file(tmp_path / "model.safetensors")
    assert "body.0.bias" not in trained
    assert torch.equal(trained["embed.weight"], expected["embed.weight"])
    assert "below cannot be made: Not a directory" in first
    assert "rank 0 could not go on" in second
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]


def test_bad_input(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, _ = saved
    out = str(tmp_path / "out")
    cases = {
        ("export", str(tmp_path), out): (1, "is no checkpoint (it has no index.json)"),
        ("export", str(where), out, "--tag", "best"): (1, "has no checkpoint 'best'; it has global_step2"),
        ("export", str(where), out, "--dtype", "fp8"): (2, "'fp8' is none of fp32, bf16, fp16, saved"),
        ("export", str(where), out, "--format", "onnx"): (2, "'onnx' is none of safetensors, pt"),
        ("export", str(where), out, "--max-shard-size", "5 apples"): (2, "'5 apples' is no size"),
        ("inspect", str(tmp_path / "nowhere")): (1, "nowhere is no checkpoint"),
        ("verify",): (2, "Missing argument"),
    }
    for arguments, (status, text) in cases.items():
        assert main(list(arguments)) == status, arguments
        assert text in capsys.readouterr().err, arguments


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1 MiB", "12", "2.5kb")] == [5 * 10**9, 2**20, 12, 2500]
    for text in ("", "GB", "-1GB", "5XB", "0"):
        with pytest.raises(ValueError, match="is no size"):
            parse_size(text)
