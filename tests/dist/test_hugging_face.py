"""Models of transformers: tied head, gradient checkpointing, generation, as their users run them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.testing import FP32_TOLERANCE, RankPool, assert_parity

pytest.importorskip("transformers")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(shape)


def checkpointed() -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def checkpointed_reentrant() -> nn.Module:
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1 + step * 100 + micro * 10 + rank)
    ids = torch.randint(0, 61, (2, 12), generator=generator)
    return {"input_ids": ids, "labels": ids}


def config(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "zero_optimization": zero}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("model_fn", [llama, checkpointed, checkpointed_reentrant])
@pytest.mark.parametrize("stage", [2, 3])
def test_training_equals_plain_pytorch(ranks2: RankPool, stage: int, model_fn: Any) -> None:
    assert_parity(model_fn, batch, config(stage), optimizer_fn=sgd, pool=ranks2)


PRECISIONS = {
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 3])
def test_16_bit_training_equals_plain_pytorch(ranks2: RankPool, stage: int, precision: str) -> None:
    """Two steps: masters that differ in their last bit round to 16-bit weights that differ by 2^-9, and the
    more steps, the likelier that one lies on such an edge."""
    settings = {**config(stage), **PRECISIONS[precision], "communication_data_type": "fp32"}
    assert_parity(
        checkpointed, batch, settings, optimizer_fn=sgd, pool=ranks2, steps=2, tolerance=FP32_TOLERANCE
    )


def scaled_by_hand(rank: int, world: int, stage: int) -> float:
    """A plain backward of `output.loss` under fp16 moves weights as engine.backward does."""
    results = []
    for plain in (True, False):
        model: Any = llama()
        settings = {**config(stage), **PRECISIONS["fp16"], "gradient_accumulation_steps": 1}
        engine, optimizer, _, _ = zeroshard.initialize(model=model, optimizer=sgd(model), config=settings)
        for step in range(2):
            output = engine(**batch(step, 0, rank))
            assert type(output).__name__ == "CausalLMOutputWithPast"
            if plain:
                output.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(output["loss"])
                engine.step()
        results.append([engine.full_fp32(p) for p in model.parameters()])
        engine.close()
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plain_backward_is_scaled(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(scaled_by_hand, stage)) <= 1e-6


def generation(rank: int, world: int, stage: int) -> bool:
    """Greedy generation between steps, sharded: weights come and go with every forward."""
    reference: Any = llama()
    model: Any = copy.deepcopy(reference)
    engine, _, _, _ = zeroshard.initialize(model=model, optimizer=sgd(model), config=config(stage))
    prompt = batch(0, 0, 0)["input_ids"]
    expected = reference.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    same = [torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)]
    with engine.gathered():
        again = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        same.append(torch.equal(again, expected))
    for micro in range(2):
        engine.backward(engine(**batch(1, micro, rank)).loss)
        engine.step()
    model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not any(b.is_live for b in engine._states.buffers if not b.layout.resident)
    engine.close()
    return all(same)


@pytest.mark.parametrize("stage", [2, 3])
def test_generation(ranks2: RankPool, stage: int) -> None:
    assert all(ranks2.run(generation, stage))
