from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from zeroshard.optimizers import Lion
from zeroshard.tiles import Tiles, cut


@pytest.mark.parametrize(
    ("sizes", "limit", "runs"),
    [
        ([4, 8, 3, 20], 10, [[0, 1], [2, 3]]),
        ([4, 8, 3, 20], 0, [[0], [1], [2], [3]]),
        ([0, 5, 0, 0, 5, 0], 5, [[0, 1], [2, 3, 4], [5]]),
        ([4, 8], 100, [[0, 1]]),
        ([], 5, []),
    ],
)
def test_a_tile_ends_with_the_slice_that_reaches_the_limit(
    sizes: list[int], limit: int, runs: list[list[int]]
) -> None:
    assert [list(run) for run in cut(sizes, limit)] == runs


class Own(AdamW):
    pass


def test_only_optimizers_that_are_known_and_alone_are_cut() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    assert Tiles.suit(AdamW(params))
    assert Tiles.suit(Lion(params))
    assert not Tiles.suit(Own(params))
    hooked = AdamW(params)
    hooked.register_step_pre_hook(lambda *_: None)  # the engine's own
    assert Tiles.suit(hooked)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not Tiles.suit(hooked)
