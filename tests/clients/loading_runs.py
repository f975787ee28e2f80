"""Models built and loaded under ZeRO-3, as transformers does it; runs in workers (`trainer_runs.client`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainer_runs import (
    arguments,
    ds_config,
    history,
    llama,
    llama_config,
    samples,
    saved_weights,
    trainer_of,
)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full state of a model that no engine has yet, by name, tied names included."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_everywhere(state: dict[str, Tensor]) -> bool:
    """All ranks have equal values."""
    sums = torch.tensor([float(tensor.double().sum()) for tensor in state.values()], dtype=torch.float64)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, sums.tolist())
    return all(one == others[0] for one in others)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return {
        name: float((found[name].double() - value.double()).abs().max() if value.numel() else 0.0)
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    }


def save_plain(directory: str, **changes: Any) -> Any:
    model: Any = llama(**changes)
    if dist.get_rank() == 0:
        model.save_pretrained(directory)
    dist.barrier()
    return model


def loaded(rank: int, world: int, out: str, tied: bool) -> dict[str, Any]:
    """`from_pretrained` after TrainingArguments: sharded, and what was saved."""
    from transformers import LlamaForCausalLM

    plain = save_plain(f"{out}/saved", tie_word_embeddings=tied)
    args = arguments(out, ds_config(3))
    model: Any = LlamaForCausalLM.from_pretrained(f"{out}/saved")
    facts: dict[str, Any] = {
        "sharded": all(
            hasattr(p, "ds_id") and p.ds_status.name == "NOT_AVAILABLE" for p in model.parameters()
        ),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "differences": differences(whole(model), plain.state_dict()),
        "buffers": differences(dict(model.named_buffers()), dict(plain.named_buffers())),
        "count": model.num_parameters() == plain.num_parameters(),
    }
    trainer = trainer_of(args, model)
    trainer.train()
    facts["history"] = history(trainer)
    trainer.save_model(f"{out}/final")
    return facts


def resized(rank: int, world: int, out: str, size: int, tied: bool) -> dict[str, Any]:
    from transformers import LlamaForCausalLM

    plain = save_plain(f"{out}/saved", tie_word_embeddings=tied)
    args = arguments(out, ds_config(3))
    model: Any = LlamaForCausalLM.from_pretrained(f"{out}/saved")
    model.resize_token_embeddings(size)
    found = whole(model)
    kept = min(size, 61)
    rows = {name: value[:kept] for name, value in found.items() if "embed" in name or "lm_head" in name}
    facts = {
        "shapes": {tuple(found[name].shape) for name in rows},
        "rows": differences(rows, {name: plain.state_dict()[name][:kept] for name in rows}),
        "same": same_everywhere(found),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "config": model.config.vocab_size,
    }
    data = [{name: ids.clamp(max=kept - 1) for name, ids in entry.items()} for entry in samples(40)]
    trainer = trainer_of(args, model, train_dataset=data)
    trainer.train()
    trainer.save_model(f"{out}/final")
    dist.barrier()
    again = LlamaForCausalLM.from_pretrained(f"{out}/final")
    facts["saved"] = tuple(again.get_input_embeddings().weight.shape)
    return facts


def new_head(rank: int, world: int, out: str) -> dict[str, Any]:
    """A head that is not in the checkpoint is initialised once, the same on all ranks."""
    from transformers import LlamaForSequenceClassification

    plain = save_plain(f"{out}/saved")
    args = arguments(out, ds_config(3))
    torch.manual_seed(rank)  # ranks that draw on their own
    model: Any = LlamaForSequenceClassification.from_pretrained(f"{out}/saved", num_labels=3)
    found = whole(model)
    base = {name: value for name, value in found.items() if name.startswith("model.")}
    expected = {name: value for name, value in plain.state_dict().items() if name.startswith("model.")}
    data = [
        {"input_ids": entry["input_ids"], "labels": torch.tensor(i % 3)}
        for i, entry in enumerate(samples(40))
    ]
    trainer = trainer_of(args, model, train_dataset=data, eval_dataset=data[:6])
    trainer.train()
    return {
        "differences": differences(base, expected),
        "same": same_everywhere(found),
        "spread": float(found["score.weight"].std()),
        "predictions": trainer.predict(data[:6]).predictions.shape,
    }


def built(rank: int, world: int, out: str) -> dict[str, Any]:
    """`from_config` is under zero.Init as well; a plain constructor before the arguments is not."""
    from transformers import AutoModelForCausalLM

    args = arguments(out, ds_config(3))
    torch.manual_seed(7 + rank)
    model = AutoModelForCausalLM.from_config(llama_config())
    found = whole(model)
    facts = {
        "sharded": all(hasattr(p, "ds_id") for p in model.parameters()),
        "same": same_everywhere(found),
        "spread": float(found["model.layers.0.mlp.up_proj.weight"].std()),
    }
    trainer = trainer_of(args, model)
    trainer.train()
    return facts


def convolutional(rank: int, world: int, out: str) -> dict[str, Any]:
    """Persistent buffers that are saved and loaded: batch norm's."""
    from transformers import ResNetConfig, ResNetForImageClassification

    shape = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    torch.manual_seed(0)
    plain = ResNetForImageClassification(shape)
    for name, buffer in plain.named_buffers():
        with torch.no_grad():
            buffer.add_(3 if "tracked" in name else 0.5)
    if rank == 0:
        plain.save_pretrained(f"{out}/saved")
    dist.barrier()
    args = arguments(out, ds_config(3), remove_unused_columns=False)
    model: Any = ResNetForImageClassification.from_pretrained(f"{out}/saved")
    facts: dict[str, Any] = {"differences": differences(whole(model), plain.state_dict())}
    torch.manual_seed(0)
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(i % 3)} for i in range(40)]
    trainer = trainer_of(args, model, train_dataset=data, eval_dataset=data[:6])
    trainer.train()
    trainer.save_model(f"{out}/final")
    dist.barrier()
    facts["tracked"] = {
        int(value) for name, value in saved_weights(f"{out}/final").items() if "tracked" in name
    }
    return facts


def speech(rank: int, world: int, out: str) -> dict[str, Any]:
    """wav2vec2, whose position embedding is parametrised by weight norm while it is built, and trained."""
    import deepspeed
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification
    from transformers.integrations import HfDeepSpeedConfig

    shape = Wav2Vec2Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_labels=3,
        classifier_proj_size=8,
        apply_spec_augment=False,
        layerdrop=0.0,
        **dict.fromkeys(("hidden_dropout", "attention_dropout", "feat_proj_dropout"), 0.0),
    )
    torch.manual_seed(0)
    plain: Any = Wav2Vec2ForSequenceClassification(shape)
    if rank == 0:
        plain.save_pretrained(f"{out}/saved")
    dist.barrier()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    kept = HfDeepSpeedConfig(config)  # lives as long as models are to be born sharded
    torch.manual_seed(1 + rank)
    model: Any = Wav2Vec2ForSequenceClassification.from_pretrained(f"{out}/saved")
    found = whole(model)
    if rank != 0:  # the originals are not sharded yet, and were loaded on rank 0
        found |= {name: value for name, value in plain.state_dict().items() if "original" in name}
    facts: dict[str, Any] = {"differences": differences(found, plain.state_dict())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=kept.config)
    facts["sharded"] = {parameter.ds_status.name for parameter in model.parameters()}
    alone = torch.optim.SGD(plain.train().parameters(), lr=0.05)
    torch.manual_seed(2)
    sounds, labels = torch.randn(4 * world, 400), torch.arange(4 * world) % 3
    losses: list[list[float]] = []
    for _ in range(3):
        loss = engine(sounds[rank::world], labels=labels[rank::world]).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        whole_loss = plain(sounds, labels=labels).loss
        whole_loss.backward()
        alone.step()
        alone.zero_grad()
        losses.append([mean.item() / world, whole_loss.item()])
    facts["losses"] = losses
    expected, found = plain.state_dict(), engine.full_state_dict()  # on rank 0
    facts["trained"] = max((float((found[name] - expected[name]).abs().max()) for name in found), default=0.0)
    return facts
