"""What scripts for DeepSpeed do around its calls: averages of weights, parts of a state dict, mpu objects."""

from __future__ import annotations

import io
import types
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard.compat
from zeroshard.compat import comm
from zeroshard.errors import NotYetError, ShardedAccessError, StateError
from zeroshard.testing import RankPool


def standin() -> Any:
    """The module `deepspeed`, in a worker."""
    zeroshard.compat.activate()
    import deepspeed

    return deepspeed


class Net(nn.Module):
    """Its second output is a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh())
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(x)), self.head.weight.t()


def make(stage: int, **more: Any) -> Any:
    torch.manual_seed(3)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    config = {"optimizer": adam, "zero_optimization": zero, "steps_per_print": None, **more}
    return standin().initialize(model=Net(), config=config)[0]


def step(engine: Any, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x)[0].square().mean())
    engine.step()


# ---- state dicts ----------------------------------------------------------------------------------------


def saved(rank: int, world: int) -> list[list[int]]:
    """Of the engine, of what wraps the model, with a prefix: all are of the whole model; then of a part."""
    engine = make(3)
    if rank == 0:
        engine.module.head.state_dict()  # one rank alone, for names: nothing is gathered
    whole = engine.state_dict()
    if rank == 1:
        engine.module.body.state_dict()
    wrapped = nn.ModuleDict({"net": engine.module}).state_dict()
    prefixed = engine.module_state_dict(prefix="x.")
    if rank == 0:
        part = engine.module.head.state_dict(prefix="y.")
        with pytest.raises(ShardedAccessError, match="is a name without elements") as raised:
            part["y.weight"].sum()
        assert "head.weight" in str(raised.value)
    engine.close()
    return [[value.clone().numel() for value in state.values()] for state in (whole, wrapped, prefixed)]


def test_the_state_dict_of_the_whole_model_has_elements_whoever_asks(ranks2: RankPool) -> None:
    for rank in ranks2.run(saved):
        assert rank == [[60, 10, 20, 2]] * 3


# ---- parameters -----------------------------------------------------------------------------------------


def averaged(rank: int, world: int, stage: int) -> list[float]:
    """An average of weights in a second engine, whose values are exchanged and not written into."""
    deepspeed = standin()
    engine, average = make(stage), make(stage)
    step(engine, rank)
    for ours, theirs in zip(engine.module.parameters(), average.module.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([ours, theirs], modifier_rank=0, enabled=stage == 3):
            if stage == 3:
                theirs.data = 0.75 * theirs.data + 0.25 * ours.data
    worst = []
    for ours, theirs in zip(engine.module.parameters(), average.module.parameters(), strict=True):
        torch.manual_seed(3)
        with deepspeed.zero.GatheredParameters([ours, theirs]):
            name = next(n for n, p in average.module.named_parameters() if p is theirs)
            before = dict(Net().named_parameters())[name]
            worst.append(float((theirs - 0.75 * before - 0.25 * ours).abs().max()))
    engine.close()
    average.close()
    return worst


def test_an_average_of_weights_is_kept(ranks2: RankPool) -> None:
    for rank in ranks2.run(averaged, 3):
        assert max(rank) < 1e-6


def clamped(rank: int, world: int, stage: int) -> float:
    """Each rank edits all that it has, in the block that a script has for stage 3."""
    engine = make(stage)
    weight = engine.module.head.weight
    with standin().zero.GatheredParameters(weight):
        weight.data.clamp_(-0.01, 0.01)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    step(engine, rank)
    largest = float(engine.full_fp32(weight).abs().max())
    engine.close()
    return largest


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_all_ranks_may_edit(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(clamped, stage) == pytest.approx([0.01, 0.01])


def written(rank: int, world: int, when: str) -> bool:
    """A loop over parameters that gathers those which say that they are not there."""
    deepspeed = standin()
    engine = make(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    step(engine, rank)
    if when == "after a forward":  # whose weights are kept for a backward
        engine(torch.ones(2, 6))
    absent = deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE
    found = {}
    for name, parameter in engine.module.named_parameters():
        away = [p for p in [parameter] if p.ds_status == absent]
        with deepspeed.zero.GatheredParameters(away, enabled=len(away) > 0):
            found[name] = parameter.data.cpu().clone()
    same = [torch.equal(found[name], engine.full_fp32(p)) for name, p in engine.module.named_parameters()]
    engine.close()
    return all(same)


@pytest.mark.parametrize("when", ["after a step", "after a forward"])
def test_parameters_say_whether_they_can_be_read(ranks2: RankPool, when: str) -> None:
    assert ranks2.run(written, when) == [True, True]


def emptied(rank: int, world: int, stage: int) -> bool:
    """The cache is emptied between forward and backward, which still reads a weight."""
    engine, plain = make(stage), make(0)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    for net in (engine, plain):
        out, view = net(x)
        net.empty_partition_cache()
        net.backward((out.square().mean() + (out @ view.t()[:, :2]).sum() + view.square().sum()) / 10)
        net.step()
    pairs = zip(engine.module.parameters(), plain.module.parameters(), strict=True)
    found = [torch.allclose(engine.full_fp32(a), plain.full_fp32(b), atol=1e-6) for a, b in pairs]
    engine.close()
    plain.close()
    return all(found)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_cache_is_emptied_between_forward_and_backward(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(emptied, stage) == [True, True]


def kept_apart(rank: int, world: int) -> str:
    """Gathered parameters are pickled; a module gets a second engine, and the first one says so when it is used."""
    deepspeed = standin()
    engine = make(3)
    file = io.BytesIO()
    with deepspeed.zero.GatheredParameters(engine.module):
        torch.save(dict(engine.module.named_parameters()), file)
        whole = engine.module.head.weight.detach().clone()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)["head.weight"], whole)
    other = deepspeed.initialize(model=engine.module, config=dict(engine.config))[0]
    with pytest.raises(StateError) as raised:
        engine(torch.ones(1, 6))
    engine.destroy()
    with deepspeed.zero.GatheredParameters(other.module.head.weight):
        assert other.module.head.weight.ds_numel == 20
    step(other, rank)
    other.close()
    return str(raised.value)


def test_a_second_engine_of_a_module(ranks2: RankPool) -> None:
    for told in ranks2.run(kept_apart):
        assert "made another engine of the same module" in told


# ---- the engine -----------------------------------------------------------------------------------------


def asked(rank: int, world: int) -> dict[str, Any]:
    deepspeed = standin()
    engine = make(2, fp16={"enabled": True, "initial_scale_power": 4})
    optimizer = engine.optimizer
    seen: dict[str, Any] = {"inner": optimizer.optimizer is optimizer, "scale": optimizer.cur_scale}
    engine.monitor.write_events([("Train/loss", 1.0, 1)])
    for name in ("timers", "train_batch", "tput_timer"):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"engine.{name} of DeepSpeed is not here: "):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing_of_the_kind'"):
        getattr(engine, "nothing_of_the_kind")  # noqa: B009
    with pytest.raises(StateError, match="nothing would be clipped"):
        deepspeed.runtime.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    seen["clipped"] = float(deepspeed.runtime.utils.clip_grad_norm_(plain.parameters(), 1.0))
    # A module that Lightning trained before: it is not what runs this engine.
    engine.module._trainer = types.SimpleNamespace(
        accumulate_grad_batches=2, strategy=None, is_last_batch=True
    )
    engine.set_train_micro_batch_size(1)
    engine.set_train_batch_size(4)
    out = engine(torch.ones(1, 6))[0].float().square().mean()
    seen["divided"] = float(engine.backward(out)) == float(out) / 2
    seen["boundary"] = engine.is_gradient_accumulation_boundary()
    engine.close()
    return seen


def test_what_scripts_ask_of_the_engine(ranks2: RankPool) -> None:
    for rank in ranks2.run(asked):
        assert rank == {
            "inner": True,
            "scale": 16.0,
            "clipped": pytest.approx(6**0.5),
            "divided": True,
            "boundary": False,
        }


class Megatron:
    """What Megatron-LM calls an mpu, of given sizes."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes

    def __getattr__(self, name: str) -> Any:
        size = self.sizes.get(name.removeprefix("get_").removesuffix("_world_size"))
        if size is None:
            raise AttributeError(name)
        return lambda: size


def of_megatron(rank: int, world: int) -> list[str]:
    deepspeed = standin()
    refused = []
    for sizes in (
        {"tensor_model_parallel": 2, "data_parallel": 1},
        {"model_parallel": 1, "data_parallel": 1},
        {"model_parallel": 1, "pipe_parallel": 2},
    ):
        with pytest.raises(NotYetError, match=r"mpu has .* of 2 ranks") as raised:
            deepspeed.initialize(
                model=Net(), mpu=Megatron(**sizes), config={"zero_optimization": {"stage": 1}}
            )
        refused.append(str(raised.value))
    mpu = Megatron(tensor_model_parallel=1, data_parallel=2)
    config = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_optimization": {"stage": 1}}
    engine = deepspeed.initialize(model=Net(), mpu=mpu, config=config)[0]
    assert engine.mpu is mpu
    engine.close()
    return refused


def test_an_mpu_whose_ranks_are_not_all_data_parallel_is_refused(ranks2: RankPool) -> None:
    for rank in ranks2.run(of_megatron):
        assert "tensor_model_parallel 2, data_parallel 1" in rank[0]
        assert "data_parallel 1" in rank[1]
        assert "pipe_parallel 2" in rank[2]


# ---- communication --------------------------------------------------------------------------------------


def test_coalesced_collectives_are_waited_for_one_and_all() -> None:
    class Work:
        done = False

        def wait(self, *timeout: timedelta) -> bool:
            self.done = True
            return True

        def is_completed(self) -> bool:
            return self.done

    works = [Work(), Work()]
    together = comm._each([lambda: works[0], lambda: works[1]])
    works[1].done = True
    assert not together.is_completed()
    assert together.wait(timedelta(seconds=1))
    assert works[0].done
    assert together.is_completed()
    assert comm._each([lambda: None]) is None


def test_a_batch_script_of_slurm_is_one_process() -> None:

    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    comm._adopt_mpi(batch, 29500)
    assert "RANK" not in batch
    step = {**batch, "SLURM_STEP_NUM_TASKS": "8"}
    comm._adopt_mpi(step, 29500)
    assert (step["RANK"], step["WORLD_SIZE"], step["MASTER_PORT"]) == ("0", "8", "29500")
