"""DeepSpeed's formulas against figures worked out by hand, and the shape of what is printed."""

from __future__ import annotations

import pytest
from torch import nn

from zeroshard.planner.estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)


@pytest.mark.parametrize(
    ("arguments", "host", "device"),
    [
        # 1000 parameters on 2 nodes of 4: 8 devices. 1000 * max(4 * 8, 16) * 1.5.
        ((1000, 4, 2, True, 1.5), 48_000, 2000),
        # 2 devices: 16 is more than 4 * 2.
        ((1000, 2, 1, True, 1.5), 24_000, 2000),
        # 2000 + 18000 / 8; the host holds 4 bytes for each of 4 processes.
        ((1000, 4, 2, False, 1.5), 24_000, 4250),
        ((1000, 4, 2, False, 1.0), 16_000, 4250),
        ((1001, 1, 3, False, 1.5), 6006, 2002 + 6006),
    ],
)
def test_zero2(arguments: tuple[int, int, int, bool, float], host: int, device: int) -> None:
    assert estimate_zero2_model_states_mem_needs(*arguments) == (host, device)


def test_zero2_defaults_are_one_device_with_offload() -> None:
    assert estimate_zero2_model_states_mem_needs(1000) == (24_000, 2000)


@pytest.mark.parametrize(
    ("optimizer", "parameters", "zero_init", "host", "device"),
    [
        # P = 1000, L = 100, 2 nodes of 4. The largest layer takes 400 on the device.
        (True, True, True, 13_500, 400),  # 18 * 1000 / 2 * 1.5
        (True, True, False, 24_000, 400),  # 1000 * max(16, 9) * 1.5
        (True, False, True, 12_000, 650),  # 16 * 1000 / 2 * 1.5; 400 + 2000 / 8
        (True, False, False, 24_000, 650),
        (False, False, True, 2_400, 2650),  # 4 * 100 * 4 * 1.5; 400 + 18000 / 8
        (False, False, False, 24_000, 2650),
        (False, True, True, 2_400, 2650),  # parameters alone are not offloaded
    ],
)
def test_zero3(optimizer: bool, parameters: bool, zero_init: bool, host: int, device: int) -> None:
    found = estimate_zero3_model_states_mem_needs(1000, 100, 4, 2, optimizer, parameters, zero_init)
    assert found == (host, device, 400)


def test_without_zero_init_one_process_needs_what_one_node_keeps() -> None:
    assert estimate_zero3_model_states_mem_needs(1000, 100, zero_init=False)[0] == 27_000
    assert estimate_zero3_model_states_mem_needs(1000, 100, zero_init=False, cpu_offload_params=False) == (
        24_000,
        2400,
        400,
    )


ZERO3 = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
    71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
    71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
    63.72GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
    63.72GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
     0.18GB |  47.91GB | offload_param=none, offload_optimizer=none, zero_init=1
    15.93GB |  47.91GB | offload_param=none, offload_optimizer=none, zero_init=0
"""


def test_the_table_of_zero3(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero3_model_states_mem_needs_all_cold(2_851_000_000, 32_000_000)
    assert capsys.readouterr().out == ZERO3


def test_the_table_of_zero2(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(2_851_000_000, num_gpus_per_node=4, num_nodes=2)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "HW: Setup with 2 nodes, 4 GPUs per node.",
        "SW: Model with 2851M total params.",
        "  per CPU  |  per GPU |   Options",
        "   127.45GB |   5.31GB | offload_optimizer=cpu ",
        "    63.72GB |  11.28GB | offload_optimizer=none",
    ]


def test_live_counts_a_shared_parameter_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1000, 2000, bias=False), nn.Linear(2000, 1000), nn.Linear(1000, 2000))
    model[2].weight = model[0].weight
    estimate_zero3_model_states_mem_needs_all_live(model)
    live = capsys.readouterr().out
    # 2 M + 2 M + 1000 + 2000; the largest is the last, with its own bias and the shared weight.
    estimate_zero3_model_states_mem_needs_all_cold(4_003_000, 2_002_000)
    assert live == capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_live(model, 2, 2)
    live = capsys.readouterr().out
    estimate_zero2_model_states_mem_needs_all_cold(4_003_000, 2, 2)
    assert live == capsys.readouterr().out
