"""A linear layer in tiles is the linear layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zeroshard.errors import ModelError
from zeroshard.tiled_linear import TiledLinear, TiledLinearReturnBias


class ReturnsBias(nn.Linear):
    """As Megatron's layers."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x, self.weight), self.bias


@given(
    features=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    splits=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    bias=st.booleans(),
    already=st.booleans(),
    combine=st.booleans(),
)
def test_equals_linear(
    features: tuple[int, int], splits: tuple[int, int], bias: bool, already: bool, combine: bool
) -> None:
    tiles = [min(split, size) for split, size in zip(splits, features, strict=True)]
    whole = nn.Linear(*features, bias=bias).double()
    tiled = TiledLinear(
        *features, bias, *tiles, input_is_already_split=already, combine_out_splits=combine
    ).double()
    tiled.copy_params_from(whole)
    x = torch.randn(3, features[0], dtype=torch.float64)
    given_input = list(x.tensor_split(tiles[0], dim=-1)) if already else x
    got = tiled(given_input)
    assert torch.allclose(torch.cat(got, -1) if not combine else got, whole(x))
    assert sum(p.numel() for p in tiled.parameters()) == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_return_their_bias(bias: bool) -> None:
    whole = ReturnsBias(5, 7, bias=bias)
    tiled = TiledLinearReturnBias(5, 7, bias, 2, 3, linear_cls=ReturnsBias, init_linear=whole)
    x = torch.randn(2, 5)
    output, own = tiled(x)
    assert torch.allclose(output, whole(x)[0], atol=1e-6)
    assert own is None if not bias else torch.equal(own, whole.bias)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match=r"in_splits=0.*from 1 to in_features, 4"):
        TiledLinear(4, 4, in_splits=0)
    with pytest.raises(ModelError, match=r"out_splits=5.*from 1 to out_features, 4"):
        TiledLinear(4, 4, out_splits=5)
    with pytest.raises(ModelError, match=r"weight is \(4, 3\).*this one is \(4, 4\)"):
        TiledLinear(4, 4).copy_params_from(nn.Linear(3, 4))
    with pytest.raises(ModelError, match="without a bias"):
        TiledLinear(4, 4).copy_params_from(nn.Linear(4, 4, bias=False))
    with pytest.raises(ModelError, match="got 1 inputs for its 2"):
        TiledLinear(4, 4, in_splits=2, input_is_already_split=True)([torch.ones(2)])
