"""Architectures of transformers from small configs, dropout off, odd sizes where an architecture allows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 61
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(), num_key_value_heads=1))


def qwen2() -> nn.Module:
    """Biases in q, k, v; a tied head; a sliding window in its upper layer."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = Qwen2Config(
        **_decoder(),
        num_key_value_heads=1,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    return Qwen2ForCausalLM(shape)


def gpt2() -> nn.Module:
    """Transposed Conv1D weights, positions, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=20, n_layer=2, n_head=2, **dropout, **NO_TOKENS)
    )


def mixtral() -> nn.Module:
    """Two of four experts per token; most steps leave some expert of some layer without a token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = MixtralConfig(
        **_decoder(),
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
        experts_implementation="eager",
    )
    return MixtralForCausalLM(shape)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    shape = BertConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(shape)


def t5() -> nn.Module:
    """One embedding for encoder, decoder and head; the first layer's position bias is used by all others."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = T5Config(
        vocab_size=VOCAB,
        d_model=20,
        d_kv=6,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=None,
    )
    return T5ForConditionalGeneration(shape)


def vit() -> nn.Module:
    """Parameters of a module's own (class token, positions) beside children that have some."""
    from transformers import ViTConfig, ViTForImageClassification

    shape = ViTConfig(
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=3,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(shape)


def whisper() -> nn.Module:
    """Convolutions before the encoder, frozen positions, cross attention, a tied head."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    shape = WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=20,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=12,
        max_target_positions=16,
        dropout=0.0,
        decoder_start_token_id=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(shape)


def _decoder() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        **NO_TOKENS,
    }


# ---- batches ----------------------------------------------------------------------------------------


def tokens(generator: torch.Generator, rank: int) -> dict[str, Tensor]:
    """Rank 1 has shorter sequences."""
    ids = torch.randint(3, VOCAB, (2, 9 - 2 * rank), generator=generator)
    return {"input_ids": ids, "labels": ids}


def tokens_for_decoder(generator: torch.Generator, rank: int) -> dict[str, Tensor]:
    labels = torch.randint(3, VOCAB, (2, 5), generator=generator)
    return {**tokens(generator, rank), "labels": labels}


def images(generator: torch.Generator, rank: int) -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(3, (2,), generator=generator)}


def sounds(generator: torch.Generator, rank: int) -> dict[str, Tensor]:
    features = torch.randn(2, 8, 24, generator=generator)
    return {"input_features": features, "labels": torch.randint(3, VOCAB, (2, 5), generator=generator)}


Batches = Callable[[torch.Generator, int], dict[str, Tensor]]
ZOO: dict[str, tuple[Callable[[], nn.Module], Batches]] = {
    "llama": (llama, tokens),
    "qwen2": (qwen2, tokens),
    "gpt2": (gpt2, tokens),
    "mixtral": (mixtral, tokens),
    "bert": (bert, tokens),
    "t5": (t5, tokens_for_decoder),
    "vit": (vit, images),
    "whisper": (whisper, sounds),
}


def build(name: str) -> Any:
    """The same weights on every call. Scaled up, so that activations and routing differ from token to token."""
    torch.manual_seed(0)
    model = ZOO[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return model.train()


def batch(name: str, step: int, rank: int) -> dict[str, Tensor]:
    """Of one step on one rank; the same call gives the same data."""
    generator = torch.Generator().manual_seed(1 + 100 * step + rank)
    return ZOO[name][1](generator, rank)
