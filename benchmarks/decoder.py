"""The decoder that every contestant trains: pre-norm, GELU, learned positions, tied embedding and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Default: 29.5 M parameters, 25.2 M of them in the blocks."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    """0: the blocks are one small Linear each."""
    vocab: int = 8192
    seq: int = 128


# So little arithmetic that a step is what the engine does around it.
OVERHEAD = Shape(layers=24, width=32, heads=2, vocab=64, seq=8)


# So many modules that a step is what hooks and collectives cost.
MANY = Shape(layers=200, width=16, heads=0, vocab=64, seq=8)


class Small(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width, bias=False)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Decoder(nn.Module):
    """`decoder(ids)` with ids (batch, seq + 1) is the mean loss of predicting each next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.position = nn.Embedding(shape.seq, shape.width)
        block = Block if shape.heads else Small
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids[:, :-1])
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def build(shape: Shape) -> Decoder:
    """The same weights on every rank and for every contestant."""
    torch.manual_seed(0)
    return Decoder(shape)
