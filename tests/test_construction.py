"""The arguments of `zeroshard.Init`, and what it does where there is nothing to cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.errors import CommError, ConfigError, NotYetError, ZeroShardError
from zeroshard.guard import home_of

GROUP: Any = object()  # never used: the arguments are refused first


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"dtype": torch.int8},
            ConfigError,
            "Init(dtype=torch.int8): it must be one of torch.float16, torch.b",
        ),
        ({"remote_device": "nvme"}, NotYetError, 'use "cpu", or leave it out'),
        ({"remote_device": "disk"}, ConfigError, "Init(remote_device='disk'): it must be None"),
        (
            {"data_parallel_group": GROUP, "sequence_data_parallel_group": GROUP},
            ConfigError,
            "parameters are spread over one group: pass one of them",
        ),
        ({"config": {}, "config_dict_or_path": {}}, ConfigError, "config=, which is its old name"),
        (
            {"config": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}},
            ConfigError,
            "bf16",
        ),
        ({"config": {"zero_optimization": {"stgae": 3}}}, ConfigError, "stage"),
        (
            {"zero_quantized_weights": True},
            NotYetError,
            "Init(zero_quantized_weights=True) is not implemented",
        ),
        ({"param_swapper": GROUP}, NotYetError, "leave it out"),
    ],
)
def test_arguments_that_contradict(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        zeroshard.Init(**arguments)
    assert isinstance(caught.value, ZeroShardError)
    assert message in str(caught.value)


def test_a_group_of_one_where_the_launcher_started_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    try:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(CommError, match="group has 1 rank, so each process would"):
            zeroshard.Init()
        zeroshard.Init(data_parallel_group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


def test_one_rank_keeps_its_model_whole() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    torch.manual_seed(0)
    with zeroshard.Init(None, None, True, "cpu", True, mpu=None):
        model = nn.Linear(3, 2)
    assert type(model.weight) is nn.Parameter
    assert home_of(model.weight) is None
    assert torch.equal(model.weight, expected.weight)


def test_dtype_is_a_cast_of_what_was_made() -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.manual_seed(0)
    with zeroshard.Init(dtype=torch.bfloat16):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model.counts = nn.Parameter(torch.arange(3), requires_grad=False)
    assert torch.equal(model[0].weight, expected[0].weight.bfloat16())
    assert model.counts.dtype is torch.int64
    assert model[1].running_mean.dtype is torch.float32
    with zeroshard.Init(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype is torch.float32
    assert nn.Linear(2, 2).weight.dtype is torch.float32
