"""Writes tests/checkpoint/data/deepspeed: checkpoints that DeepSpeed itself saved, and the true values beside them.

    pip install deepspeed==0.19.8
    DS_ACCELERATOR=cpu python tests/checkpoint/make_deepspeed_fixtures.py tests/checkpoint/data/deepspeed [CASE ...]

Each case is a run of three Adam steps on CPU ranks. `truth.safetensors` in its directory holds the whole fp32
masters and moments under the keys that `DeepSpeedReader` gives, read through DeepSpeed's own functions in the
run that saved; the step of each parameter too. The scripts that DeepSpeed copies into a checkpoint are removed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

Config = dict[str, Any]

FP16: Config = {"fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2, "hysteresis": 3}}
BF16: Config = {"bf16": {"enabled": True}}


def zero(stage: int, **keys: Any) -> Config:
    return {"zero_optimization": {"stage": stage, **keys}}


FUSED: Config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
"""DeepSpeed's own Adam, compiled on first use. It counts its steps as Python numbers."""

CASES: dict[str, tuple[int, Config]] = {
    "stage0_fp32": (1, {}),
    "stage0_fp16": (2, FP16 | FUSED),
    "stage0_bf16": (1, BF16 | {"data_types": {"grad_accum_dtype": "bf16"}}),
    "stage1_bf16": (2, BF16 | {"data_types": {"grad_accum_dtype": "fp32"}} | zero(1)),
    "stage1_elastic": (2, FP16 | FUSED | zero(1, elastic_checkpoint=True)),
    "stage2_bf16": (2, BF16 | zero(2, round_robin_gradients=True)),
    "stage2_fp16": (3, FP16 | zero(2, parameter_alignment=True)),
    "stage3_fp32": (1, zero(3)),
    "stage3_bf16": (3, BF16 | zero(3, sub_group_size=10, stage3_param_persistence_threshold=0)),
    "stage3_fp16": (2, FP16 | FUSED | zero(3)),
}
UNIVERSAL = {"universal2": "stage2_fp16", "universal3": "stage3_bf16"}


class Tiny(nn.Module):
    """A tied embedding, a norm, a frozen layer, a buffer of each kind, and sizes no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("offset", torch.linspace(0, 1, 5))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.offset.to(x.dtype)
        logits = self.head(self.frozen(torch.tanh(self.up(x))) + x)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def config_of(case: str, ranks: int) -> Config:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * ranks,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    } | CASES[case][1]


def train(rank: int, ranks: int, port: int, case: str, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from safetensors.torch import save_file

    get_accelerator().is_fp16_supported = lambda: True  # slow on most CPUs, which is no matter here
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = Tiny()
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    config = config_of(case, ranks)
    own = (
        {"model_parameters": groups}
        if "optimizer" in config
        else {"optimizer": torch.optim.AdamW(groups, lr=0.01)}
    )
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False, **own)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        engine.backward(engine(torch.randint(0, 11, (2, 4))))
        engine.step()
        model.seen += 1
    truth = {f"model/{name}": value.clone() for name, value in model.named_buffers() if name != "scratch"}
    for name, parameter in model.named_parameters():
        truth |= true_values(engine, name, parameter)
    engine.save_checkpoint(str(out), tag="step3", client_state={"epoch": 2, "note": {"seed": 0}})
    if rank == 0:
        save_file({key: value.contiguous() for key, value in truth.items()}, out / "truth.safetensors")


def true_values(engine: Any, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The master and the state of one parameter, whole. Called by all ranks."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not parameter.requires_grad:
        with deepspeed.zero.GatheredParameters([parameter]):
            return {f"model/{name}": parameter.detach().clone()}
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    if engine.zero_optimization_stage():
        relink(optimizer)
        master = safe_get_full_fp32_param(parameter)
        state = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
        steps = {float(entry["step"]) for entry in inner.state.values() if "step" in entry}
    else:
        master, state = of_stage_0(optimizer, parameter)
        steps = {float(state.pop("step"))} if "step" in state else set()
    (state["step"],) = map(torch.tensor, steps or {float(group["step"]) for group in inner.param_groups})
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return {f"model/{name}": master.detach().float().clone().view(shape)} | {
        f"optimizer/{key}/{name}": value.clone().view(shape if value.dim() else ())
        for key, value in state.items()
    }


def relink(optimizer: Any) -> None:
    """DeepSpeed's way from a parameter to its partition is wrong in round-robin order, where parameters are not
    aligned (it looks at their offsets only if there is padding), and after the first step it knows the state of one
    group only."""
    if not hasattr(optimizer, "round_robin_bit16_padding"):
        return
    padding = optimizer.round_robin_bit16_padding
    optimizer.round_robin_bit16_padding = [[1] for _ in padding]
    optimizer._link_all_hp_params()
    optimizer.round_robin_bit16_padding = padding
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def of_stage_0(optimizer: Any, parameter: nn.Parameter) -> tuple[Tensor, dict[str, Tensor]]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return parameter, dict(optimizer.state[parameter])
    for index, members in enumerate(optimizer.fp16_groups):
        at = 0
        for place, member in enumerate(members):
            part = slice(at, at + parameter.numel())
            if member is parameter and hasattr(optimizer, "fp32_groups"):
                master = optimizer.fp32_groups[index][place]
                return master, dict(optimizer.optimizer.state[master])
            if member is parameter:
                flat = optimizer.fp32_groups_flat[index]
                return flat[part], {
                    key: value[part] if isinstance(value, Tensor) and value.dim() else value
                    for key, value in optimizer.optimizer.state[flat].items()
                }
            at += member.numel()
    raise KeyError("a trained parameter in no group")


def write(case: str, out: Path) -> None:
    ranks, _ = CASES[case]
    shutil.rmtree(out / case, ignore_errors=True)
    (out / case).mkdir(parents=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(train, (ranks, port, case, out / case), nprocs=ranks)
    for script in (out / case).glob("zero_to_*.py"):
        script.unlink()


def write_universal(case: str, out: Path) -> None:
    source = out / UNIVERSAL[case]
    shutil.rmtree(out / case, ignore_errors=True)
    (out / case).mkdir()
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    convert += [
        "--input_folder",
        str(source / "step3"),
        "--output_folder",
        str(out / case / "step3_universal"),
    ]
    subprocess.run(convert, check=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for chosen in sys.argv[2:] or [*CASES, *UNIVERSAL]:
        (write if chosen in CASES else write_universal)(chosen, target)
