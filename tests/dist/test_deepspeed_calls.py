"""Scripts written for DeepSpeed, through the stand-in: its calls, the members of its engine, `ds_` attributes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard.compat
from zeroshard.errors import CommError, ConfigError, NotYetError, StateError
from zeroshard.testing import FP32_TOLERANCE, RankPool

STAGES = (0, 1, 2, 3)


def standin() -> Any:
    """The module `deepspeed`, in a worker."""
    zeroshard.compat.activate()
    import deepspeed

    return deepspeed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh())
        self.head = nn.Linear(10, 2)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x)) * self.scale
        return out


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.7,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": float("inf"),
        **more,
    }


def reference(steps: int) -> list[Tensor]:
    """The same training in plain PyTorch, on one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    from zeroshard.lr_schedules import WarmupLR

    schedule = WarmupLR(optimizer, warmup_max_lr=0.01, warmup_num_steps=3)
    for step in range(steps):
        for micro in range(2):
            for rank in range(2):
                x, y = batch(2 * step + micro, rank)
                (nn.functional.mse_loss(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [value.detach().clone() for value in model.state_dict().values()]


def classic(rank: int, world: int, stage: int, directory: str) -> dict[str, Any]:
    """The loop of DeepSpeed's examples, from the command line on."""
    deepspeed = standin()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    path = Path(directory) / f"ds_{rank}.json"
    path.write_text(json.dumps({**config(stage), "steps_per_print": 1000}))
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), "--local_rank", str(rank)])
    deepspeed.init_distributed(dist_backend="gloo")
    model = build()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=filter(lambda p: p.requires_grad, model.parameters())
    )
    assert loader is None
    assert optimizer is engine.optimizer
    assert scheduler is engine.lr_scheduler
    before = []
    for step in range(4):
        for micro in range(2):
            before.append(engine.is_gradient_accumulation_boundary())
            x, y = batch(2 * step + micro, rank)
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        if step == 1:
            engine.save_checkpoint(directory, tag="two", client_state={"step": step, "name": "x"})
    state = engine._zero3_consolidated_16bit_state_dict()
    path_, client = engine.load_checkpoint(directory, "two", load_optimizer_states=True)
    nowhere = engine.load_checkpoint(str(Path(directory) / "nowhere"))
    steps = engine.global_steps
    engine.destroy()
    return {
        "boundaries": before,
        "state": list(state.values()),
        "client": client,
        "found": path_ is not None,
        "nowhere": nowhere,
        "steps": steps,
    }


@pytest.mark.parametrize("stage", STAGES)
def test_the_loop_of_the_examples(ranks2: RankPool, stage: int, tmp_path: Path) -> None:
    first, second = ranks2.run(classic, stage, str(tmp_path))
    for expected, got in zip(reference(4), first["state"], strict=True):
        assert (expected - got).abs().max() <= FP32_TOLERANCE * max(1.0, float(expected.abs().max()))
    assert second["state"] == [], "only rank 0 gets it"
    assert first["boundaries"] == [False, True] * 4
    assert first["client"]["step"] == 1
    assert first["client"]["name"] == "x"
    assert first["found"]
    assert first["steps"] == 2
    assert first["nowhere"] == (None, None)


def members(rank: int, world: int, stage: int) -> dict[str, Any]:
    deepspeed = standin()
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    given = config(stage, fp16={"enabled": True, "initial_scale_power": 8})
    model = build()
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=given)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.module is model
    assert engine.config == given
    assert engine.config.get("zero_optimization", {}).get("stage") == stage
    engine.anything_at_all = 3
    asked = {
        name: getattr(engine, name)()
        for name in [
            "amp_enabled", "autotp_size", "bfloat16_enabled", "dataloader_drop_last", "dump_state",
            "dynamic_loss_scale", "dynamic_loss_scale_args", "elasticity_enabled", "fp16_enabled",
            "get_batch_info", "get_data_parallel_rank", "get_lr", "get_model_parallel_rank", "get_mom",
            "get_type", "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor",
            "initial_dynamic_scale", "load_universal_checkpoint", "loss_scale", "memory_breakdown",
            "optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params", "steps_per_print",
            "torch_autocast_enabled", "train_batch_size", "train_micro_batch_size_per_gpu",
            "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_cpu_offload",
            "zero_gather_16bit_weights_on_model_save", "zero_max_live_parameters", "zero_optimization",
            "zero_optimization_partition_gradients", "zero_optimization_partition_weights",
            "zero_optimization_stage", "zero_overlap_comm", "zero_reduce_bucket_size", "zero_use_cpu_optimizer",
        ]
    }  # fmt: skip
    numbers = (
        engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size, engine.mp_world_size,
        engine.global_samples, engine.micro_steps, engine.skipped_steps, str(engine.device),
        str(engine.communication_data_type),
    )  # fmt: skip
    overflow = [optimizer.overflow]
    for value in (1.0, float("inf")):
        for micro in range(2):
            x, _ = batch(micro, rank)
            engine.backward(engine(x).float().sum() * value)
            engine.step()
        overflow.append(optimizer.overflow)
    kinds = [
        isinstance(optimizer, cls)
        for cls in (DeepSpeedOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    ]
    others = [isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters()), DeepSpeedOptimizer)]
    engine.zero_grad()
    engine.empty_partition_cache()
    with pytest.raises(NotYetError, match="offload"):
        engine.offload_states()
    engine.close()
    return {
        "asked": asked,
        "numbers": numbers,
        "overflow": overflow,
        "kinds": kinds + others,
        "norm": engine.get_global_grad_norm(),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_members_of_the_engine(ranks2: RankPool, stage: int) -> None:
    for rank, got in enumerate(ranks2.run(members, stage)):
        asked = got["asked"]
        assert asked["get_batch_info"] == (16, 4, 2)
        assert asked["zero_optimization_stage"] == stage
        assert asked["zero_optimization_partition_weights"] is (stage == 3)
        assert asked["optimizer_params"] == {"lr": 0.01, "weight_decay": 0.1}
        assert asked["scheduler_params"]["warmup_num_steps"] == 3
        assert asked["zero_max_live_parameters"] == 10**9
        assert asked["loss_scale"] == asked["initial_dynamic_scale"] == 256
        assert asked["dynamic_loss_scale_args"]["init_scale"] == 256
        assert asked["get_data_parallel_rank"] == rank
        assert asked["get_mom"] == [(0.9, 0.999)]
        assert got["numbers"][:8] == (rank, rank, 2, 2, 1, 0, 0, 0)
        assert got["numbers"][8:] == ("cpu", "torch.float16")
        assert got["overflow"] == [False, False, True]
        assert got["kinds"] == [True, stage in (1, 2), stage == 3, False]


def attributes(rank: int, world: int) -> dict[str, Any]:
    deepspeed = standin()
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param

    with deepspeed.zero.Init(config_dict_or_path=config(3)):
        model = build()
    weight = model.body[0].weight
    cut = (
        is_zero_param(weight),
        weight.ds_numel,
        tuple(weight.ds_shape),
        weight.ds_status.name,
        weight.ds_tensor.numel(),
        weight.partition_numel(),
    )
    weight.mine = "kept"
    engine, *_ = deepspeed.initialize(model=model, config=config(3))
    sharded = (weight.ds_numel, tuple(weight.ds_shape), weight.ds_status is ZeroParamStatus.NOT_AVAILABLE)
    ids = [parameter.ds_id for parameter in model.parameters()]
    pieces = [parameter.ds_tensor.numel() for parameter in model.parameters()]
    parts = [parameter.partition_numel() for parameter in model.parameters()]
    with deepspeed.zero.GatheredParameters(
        list(set(model.parameters())) + list(model.buffers()), modifier_rank=0
    ):
        inside = (
            weight.ds_status is ZeroParamStatus.AVAILABLE,
            weight.ds_numel,
            weight.partition_numel(),
            tuple(weight.shape),
        )
        if rank == 0:
            weight.data.fill_(2.0)
            model.scale.fill_(rank + 7.0)  # a buffer is not anybody's business
    with deepspeed.zero.GatheredParameters(weight):
        edited = bool((weight == 2.0).all())
    scale = float(model.scale)
    with (
        deepspeed.zero.GatheredParameters([]),
        deepspeed.zero.GatheredParameters([model.scale], modifier_rank=0),
    ):
        pass
    with deepspeed.runtime.zero.stage3.unwrap_model_for_generation(engine) as whole:
        generated = whole(batch(0, rank)[0]).shape
    engine.close()
    return {
        "cut": cut, "sharded": sharded, "ids": ids, "pieces": pieces, "parts": parts, "inside": inside,
        "edited": edited, "mine": weight.mine, "scale": scale, "generated": tuple(generated),
        "after": is_zero_param(weight), "whole": tuple(weight.shape),
    }  # fmt: skip


def test_attributes_of_parameters(ranks2: RankPool) -> None:
    first, second = ranks2.run(attributes)
    for got in (first, second):
        assert got["cut"] == (True, 60, (10, 6), "NOT_AVAILABLE", 30, 30)
        assert got["sharded"] == (60, (10, 6), True)
        assert got["inside"] == (True, 60, 30, (10, 6))
        assert got["edited"]
        assert got["mine"] == "kept"
        assert got["generated"] == (4, 2)
        assert not got["after"]
        assert got["whole"] == (10, 6)
        assert len(set(got["ids"])) == len(got["ids"])
    assert first["ids"] == second["ids"], "the same on all ranks"
    numels = [60, 10, 100, 10, 20, 2]
    assert [a + b for a, b in zip(first["pieces"], second["pieces"], strict=True)] == numels
    assert first["parts"] == [30, 5, 50, 5, 10, 1]
    assert (first["scale"], second["scale"]) == (7.0, 0.5)


def states(rank: int, world: int, stage: int) -> list[float]:
    deepspeed = standin()
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_update_full_grad_vectorized,
    )

    model = build()
    engine, *_ = deepspeed.initialize(model=model, config={**config(stage), "gradient_clipping": 0.0})
    for micro in range(2):
        x, y = batch(micro, rank)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        if micro == 0:
            engine.step()
    safe_update_full_grad_vectorized(
        model.parameters(), lambda gradient, parameter: torch.ones_like(gradient)
    )
    gradient = safe_get_full_grad(model.head.weight)
    engine.step()
    moment = safe_get_full_optimizer_state(model.head.weight, "exp_avg")
    safe_set_full_fp32_param(model.head.weight, torch.zeros(2, 10))
    weight = safe_get_full_fp32_param(model.head.weight)
    engine.destroy()
    return [float(gradient.mean()), float(moment.mean()), float(weight.abs().max())]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_by_parameter(ranks2: RankPool, stage: int) -> None:
    for gradient, moment, weight in ranks2.run(states, stage):
        assert gradient == 1.0
        assert moment == pytest.approx(0.1)
        assert weight == 0.0


def communication(rank: int, world: int) -> dict[str, Any]:
    deepspeed = standin()
    comm = deepspeed.comm
    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=None)
    one = torch.full((2,), float(rank + 1))
    comm.all_reduce(one, op=comm.ReduceOp.SUM, prof=False, log_name="mine", debug="here")
    gathered = torch.empty(4)
    comm.allgather_fn(gathered, torch.full((2,), float(rank)))
    parts = [torch.empty(4), torch.empty(6)]
    comm.all_gather_coalesced(parts, [torch.full((2,), float(rank)), torch.full((3,), float(rank))])
    many = [torch.ones(2), torch.ones(3)]
    comm.all_reduce_coalesced(many)
    scattered = torch.empty(1)
    comm.reduce_scatter_fn(scattered, torch.tensor([1.0, 2.0]))
    word = ["a" if rank == 0 else None]
    comm.broadcast_object_list(word, src=0)
    mesh = comm.initialize_mesh_device((2,), ("data_parallel",))
    group = comm.new_group([0, 1])
    comm.barrier()
    groups = deepspeed.utils.groups
    try:
        groups._get_sequence_parallel_group()
    except StateError as error:
        refused = str(error)
    try:
        comm.init_distributed(dist_init_required=False)
    except CommError:
        raise AssertionError("it is initialised") from None
    return {
        "values": [one.tolist(), gathered.tolist(), parts[1].tolist(), many[1].tolist(), scattered.tolist()],
        "who": (comm.get_rank(), comm.get_world_size(), comm.is_initialized(), comm.get_global_rank(group, rank)),
        "ranks": comm.get_all_ranks_from_group(group),
        "word": word,
        "mesh": mesh.size(),
        "groups": (
            groups._get_data_parallel_rank(),
            groups.get_data_parallel_world_size(),
            groups.get_model_parallel_world_size(),
        ),
        "refused": refused,
    }  # fmt: skip


def test_communication(ranks2: RankPool) -> None:
    for rank, got in enumerate(ranks2.run(communication)):
        assert got["values"] == [
            [3.0, 3.0],
            [0.0, 0.0, 1.0, 1.0],
            [0.0] * 3 + [1.0] * 3,
            [2.0] * 3,
            [[2.0], [4.0]][rank],
        ]
        assert got["who"] == (rank, 2, True, rank)
        assert got["ranks"] == [0, 1]
        assert got["word"] == ["a"]
        assert got["mesh"] == 2
        assert got["groups"] == (rank, 2, 1)
        assert "data parallel" in got["refused"]


def odds_and_ends(rank: int, world: int) -> list[str]:
    deepspeed = standin()
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.utils import partition_balanced, partition_uniform, see_memory_usage

    seen = []
    for cls in (FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, FusedLion, DeepSpeedCPULion, FusedLamb):
        model = build()
        optimizer = cls(model.parameters(), lr=0.01)
        engine, same, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 2}}
        )
        assert same is optimizer
        x, y = batch(0, rank)
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        rows = {name: (predicted, measured) for name, predicted, measured in engine.memory()}
        predicted, measured = rows["optimizer state"]
        seen.append(f"{cls.__name__} {predicted == measured}")
        engine.destroy()
    device = deepspeed.accelerator.get_accelerator()
    seen.append(
        f"{device.device_name()} {device.current_device_name()} {device.communication_backend_name()}"
    )
    see_memory_usage("now", force=True)
    seen.append(str(partition_uniform(10, 3)))
    seen.append(str(partition_balanced([1, 1, 1, 7, 1, 1], 3)))
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        lazily = nn.Linear(3, 3)
    seen.append(f"{lazily.weight.device} {lazily.weight.dtype}")
    parsed = deepspeed.DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 2}})
    seen.append(f"{parsed.train_micro_batch_size_per_gpu} {parsed.zero_enabled} {parsed.bf16.enabled}")
    try:
        deepspeed.DeepSpeedConfig({"zero_optimisation": {}})
    except deepspeed.DeepSpeedConfigError as error:
        seen.append(str("zero_optimization" in str(error)))
    return seen


def test_odds_and_ends(ranks2: RankPool) -> None:
    for got in ranks2.run(odds_and_ends):
        assert got == [
            "FusedAdam True",
            "DeepSpeedCPUAdam True",
            "DeepSpeedCPUAdagrad True",
            "FusedLion True",
            "FusedLion True",
            "FusedLamb True",
            "cpu cpu gloo",
            "[0, 4, 7, 10]",
            "[0, 3, 4, 6]",
            "meta torch.bfloat16",
            "4 True False",
            "True",
        ]


def test_alone(tmp_path: Path) -> None:
    """CASES 113: no launcher and no MPI package: a run of one rank."""
    # In this process torch.distributed is not started, and is left as it was.
    deepspeed = standin()
    assert not dist.is_initialized()
    deepspeed.init_distributed(dist_backend="gloo")
    try:
        assert (dist.get_world_size(), deepspeed.comm.get_rank(), deepspeed.comm.get_local_rank()) == (
            1,
            0,
            0,
        )
        engine, *_ = deepspeed.initialize(model=build(), config=config(3))
        x, y = batch(0, 0)
        for _ in range(2):
            engine.backward(nn.functional.mse_loss(engine(x), y))
            engine.step()
        assert engine.global_steps == 1
        engine.destroy()
    finally:
        dist.destroy_process_group()
    with pytest.raises(CommError, match="dist_init_required=False"):
        deepspeed.init_distributed(dist_init_required=False)
    with pytest.raises(ConfigError, match="exactly one config"):
        deepspeed.initialize(model=build())
    dist.destroy_process_group()
