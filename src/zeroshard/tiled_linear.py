"""A linear layer as a grid of smaller ones, so that no more than one tile of its weight has to be whole at a time.

    layer = TiledLinear(8192, 32768, in_splits=2, out_splits=4)    # 8 weights of 4096 x 8192

The sum over input tiles and the order of output tiles make it equal to `nn.Linear` up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import ModelError

__all__ = ["TiledLinear", "TiledLinearReturnBias", "partition_uniform"]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where parts begin and end; the first ones are one larger where it does not divide."""
    each, rest = divmod(num_items, num_parts)
    return [part * each + min(part, rest) for part in range(num_parts + 1)]


class TiledLinear(nn.Module):
    """`nn.Linear(in_features, out_features, bias)` in `in_splits` x `out_splits` tiles.

    Args:
        input_is_already_split: forward gets a list of one input per input tile.
        combine_out_splits: return one tensor; else a list of one output per output tile.
        linear_cls: what a tile is; called with (in_features, out_features, bias=...) and `kwargs`.
        init_linear: a layer of the whole size to take the first values from.

    Only the last input tile has a bias. Raises ModelError for splits outside 1 to the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise ModelError(
                    f"TiledLinear({name}_splits={splits}): it must be from 1 to {name}_features, {features}"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(
                    self.in_parts[column + 1] - self.in_parts[column],
                    self.out_parts[row + 1] - self.out_parts[row],
                    bias=bias and column == in_splits - 1,
                    **kwargs,
                )
                for column in range(in_splits)
            )
            for row in range(out_splits)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        inputs = list(x) if self.input_is_already_split else self._split(x)
        if len(inputs) != self.in_splits:
            raise ModelError(f"TiledLinear got {len(inputs)} inputs for its {self.in_splits} input tiles")
        rows = [self._row(row, inputs) for row in self.linears]
        return self._joined(rows) if self.combine_out_splits else rows

    def _split(self, x: Any) -> list[Tensor]:
        sizes = [stop - start for start, stop in zip(self.in_parts, self.in_parts[1:], strict=False)]
        return list(torch.split(x, sizes, dim=-1))

    def _row(self, row: Any, inputs: Sequence[Tensor]) -> Any:
        total = row[0](inputs[0])
        for tile, part in zip(list(row)[1:], inputs[1:], strict=True):
            total = total + tile(part)
        return total

    def _joined(self, rows: list[Any]) -> Any:
        return torch.cat(rows, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Module) -> None:
        """Take the values of a layer of the whole size. Parameters are whole: before `initialize`, or gathered."""
        weight: Any = other.weight
        bias: Any = other.bias
        if (
            tuple(weight.shape) != (self.out_features, self.in_features)
            or (bias is not None) != self.use_bias
        ):
            raise ModelError(
                f"copy_params_from: the other layer's weight is {tuple(weight.shape)}, with"
                f"{'' if bias is not None else 'out'} a bias; this one is ({self.out_features}, "
                f"{self.in_features}), with{'' if self.use_bias else 'out'} one"
            )
        row: Any
        for index, row in enumerate(self.linears):
            rows = slice(*self.out_parts[index : index + 2])
            for column, tile in enumerate(row):
                tile.weight.copy_(weight[rows, slice(*self.in_parts[column : column + 2])])
            if bias is not None:
                row[-1].bias.copy_(bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """The same of layers that return (output, bias or None): so does it, the bias of all output tiles together."""

    def _row(self, row: Any, inputs: Sequence[Tensor]) -> Any:
        total, bias = row[0](inputs[0])
        for tile, part in zip(list(row)[1:], inputs[1:], strict=True):
            output, bias = tile(part)
            total = total + output
        return total, bias

    def _joined(self, rows: list[Any]) -> Any:
        outputs, biases = zip(*rows, strict=True)
        return torch.cat(outputs, dim=-1), None if biases[0] is None else torch.cat(biases, dim=-1)
