"""DeepSpeed's own estimates of the memory for parameters, optimizer state and gradients, under its names.

They are formulas in two or three numbers, for training in 16 bit with Adam. They leave out activations, module
buffers, padding and fragmentation, and they describe DeepSpeed: what zeroshard takes is counted from the layout, by
`zeroshard estimate` before the run and `engine.memory()` in it.

In bytes, for P parameters, of which L in the largest layer, on n nodes with k devices each, G = n*k, and f the
additional_buffer_factor:

    ZeRO-2                        device               host
    optimizer offloaded           2P                   f * P * max(4G, 16)
    no offload                    2P + 18P/G           f * P * 4k

    ZeRO-3                        device               host, with zero_init    host, without it
    both offloaded                4L                   f * 18P/n               f * P * max(4k, 18/n)
    optimizer offloaded           4L + 2P/G            f * 16P/n               f * P * max(4k, 16/n)
    no offload                    4L + 18P/G           f * 4Lk                 f * P * 4k

Source: the functions of the same names in deepspeed.runtime.zero.stage_1_and_2 and deepspeed.runtime.zero.stage3
(0.19.6).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "sizes_of",
]

_OPTIMIZER_AND_PARAMETERS = ((True, True), (True, False), (False, False))
"""What can be offloaded, in the order of the printed table."""


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """DeepSpeed's estimate for ZeRO-2, in bytes: (host memory of a node, memory of a device).

    `cpu_offload`: of the optimizer. The module's docstring has the formula.
    """
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        device = 2 * total_params
        host = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        device = 2 * total_params + int(18 * total_params / total_gpus)
        host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """DeepSpeed's estimate for ZeRO-3, in bytes: (host memory of a node, memory of a device, of that the largest
    layer).

    `cpu_offload`: of the optimizer; without it `cpu_offload_params` has no effect. `zero_init`: the model is built
    in pieces (`zero.Init`). The module's docstring has the formula.
    """
    total_gpus = num_nodes * num_gpus_per_node
    largest = 4 * largest_layer_params
    if cpu_offload:
        kept = 0 if cpu_offload_params else int(2 * total_params / total_gpus)
        per_parameter = (18 if cpu_offload_params else 16) / num_nodes
        if not zero_init:
            per_parameter = max(4 * num_gpus_per_node, per_parameter)
        host = total_params * per_parameter * additional_buffer_factor
    else:
        kept = int(18 * total_params / total_gpus)
        built = largest_layer_params if zero_init else total_params
        host = built * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(largest + kept), largest


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print DeepSpeed's ZeRO-2 estimates for a `torch.nn.Module`."""
    total, _ = sizes_of(model)
    estimate_zero2_model_states_mem_needs_all_cold(
        total, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print DeepSpeed's ZeRO-2 estimates for a number of parameters, with and without offload."""
    rows = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        rows.append((host, device, f"offload_optimizer={_place(offload)}"))
    _print_estimates(f"{_millions(total_params)} total params", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print DeepSpeed's ZeRO-3 estimates for a `torch.nn.Module`."""
    total, largest = sizes_of(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print DeepSpeed's ZeRO-3 estimates for a number of parameters: what is offloaded, and how it is built."""
    rows = []
    for optimizer, parameters in _OPTIMIZER_AND_PARAMETERS:
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                parameters,
                zero_init,
                additional_buffer_factor,
            )
            options = f"offload_param={_place(parameters)}, offload_optimizer={_place(optimizer)}"
            rows.append((host, device, f"{options}, zero_init={int(zero_init)}"))
    what = f"{_millions(total_params)} total params, {_millions(largest_layer_params)} largest layer params"
    _print_estimates(what, num_gpus_per_node, num_nodes, rows)


def sizes_of(model: Any) -> tuple[int, int]:
    """(all parameters, those of the largest module without its children); shared ones count once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def _print_estimates(
    what: str, num_gpus_per_node: int, num_nodes: int, rows: Iterable[tuple[int, int, str]]
) -> None:
    nodes = f"{num_nodes} node" + ("s" if num_nodes > 1 else "")
    devices = f"{num_gpus_per_node} GPU" + ("s" if num_gpus_per_node > 1 else "")
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes}, {devices} per node.")
    print(f"SW: Model with {what}.")
    print("  per CPU  |  per GPU |   Options")
    for host, device, options in rows:
        print(f"  {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {options}")


def _place(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _millions(count: int) -> str:
    return f"{int(count / 1e6)}M"
