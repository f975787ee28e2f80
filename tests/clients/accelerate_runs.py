"""One rank's part of the tests of plain accelerate. Nothing of accelerate is imported at the top: it looks for
deepspeed when it is imported, and only workers have the stand-in."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning_runs
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SHARDED = lightning_runs.SHARDED


def client(rank: int, world: int, case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`lightning_runs.client`, without what accelerate keeps from one run to the next in a process."""
    return lightning_runs.client(rank, world, _fresh, case, args, kwargs)


def _fresh(case: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    forget_singletons()
    torch.manual_seed(0)
    try:
        return case(*args, **kwargs)
    finally:
        forget_singletons()


def forget_singletons() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


class Net(nn.Module):
    """With the width where accelerate looks for it, a buffer, two tied weights, and a parameter of no dimension."""

    def __init__(self, width: int = 24, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(hidden_size=width)
        self.up, self.first, self.second = (
            nn.Linear(10, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.second.weight = self.first.weight
        self.down = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        hidden = self.second(self.first(self.up(x).tanh() * self.gain).tanh()).tanh()
        return self.down(hidden).squeeze(-1)


def data(samples: int, batch: int = 4, seed: int = 0, **settings: Any) -> DataLoader[Any]:
    x = torch.randn(samples, 10, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(-1).sin()), batch_size=batch, **settings)


AUTO_OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
}
AUTO_SCHEDULE = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


def config(stage: int, **more: Any) -> dict[str, Any]:
    """A file as people have it, with everything left to accelerate."""
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero | (SHARDED if stage == 3 else {}),
        **more,
    }


def accelerator_of(stage: int | None, plugin: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An Accelerator on the CPU; stage None is accelerate's own DDP."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    if stage is None:
        return Accelerator(cpu=True, **settings)
    PartialState(cpu=True)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(**plugin or {}), **settings)


KINDS = "own", "plugin", "dummies", "callable", "own and dummy", "own and theirs", "carried"
"""Who makes optimizer and schedule; "carried": windows go on across epochs."""


def linear(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def warmup(optimizer: Any) -> Any:
    """DeepSpeed's, over the 10 steps of each rank's 20."""
    from deepspeed.runtime.lr_schedules import WarmupDecayLR

    return WarmupDecayLR(optimizer, 10, 0.0, 1e-2, 3, "linear")


def built(kind: str, stage: int | None, window: int, clip: float) -> tuple[Any, ...]:
    """(model, optimizer, schedule, batches, accelerator)"""
    from accelerate.utils import DummyOptim, DummyScheduler, GradientAccumulationPlugin

    net, batches = Net(), data(52)
    plugin: dict[str, Any] = {"hf_ds_config": config(stage or 0, gradient_clipping=clip)}
    if kind == "plugin":
        plugin = {"zero_stage": stage, "gradient_clipping": clip, "gradient_accumulation_steps": window}
        plugin |= {"zero3_init_flag": False, "zero3_save_16bit_model": True}
    if kind in ("dummies", "callable"):
        plugin["hf_ds_config"] |= AUTO_OPTIMIZER
    if kind in ("dummies", "own and dummy"):
        plugin["hf_ds_config"] |= AUTO_SCHEDULE
    windows: dict[str, Any] = {"gradient_accumulation_steps": window}
    if kind == "carried":
        sync = GradientAccumulationPlugin(num_steps=window, sync_with_dataloader=False)
        windows = {"gradient_accumulation_plugin": sync}
    accelerator = accelerator_of(stage, plugin, **windows)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    stepped = warmup if kind in ("dummies", "own and dummy", "own and theirs") else linear
    schedule: Any = stepped(optimizer)
    if kind in ("own", "plugin", "carried"):
        return *accelerator.prepare(net, optimizer, schedule, batches), accelerator
    if stage is None:  # the engine steps the others, once for each update
        return *accelerator.prepare(net, optimizer), schedule, accelerator.prepare(batches), accelerator
    if kind in ("dummies", "callable"):
        optimizer = DummyOptim(net.parameters(), lr=1e-2, weight_decay=0.1)
    if kind != "own and theirs":
        made = linear if kind == "callable" else None
        schedule = DummyScheduler(
            optimizer, total_num_steps=20, warmup_num_steps=3, lr_scheduler_callable=made
        )
    return *accelerator.prepare(net, optimizer, schedule, batches), accelerator


def train(
    stage: int | None,
    directory: str,
    *,
    kind: str = "own",
    window: int = 3,
    clip: float = 0.5,
    save: bool = False,
    resume: bool = False,
) -> dict[str, Any]:
    """A loop as accelerate's guide has it, two epochs of 7 batches, and what it computed."""
    model, optimizer, schedule, batches, accelerator = built(kind, stage, window, clip)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    if resume:
        accelerator.load_state(f"{directory}/state")
    for epoch in range(1 if resume else 0, 2):
        model.train()
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    found["norms"].append(float(norm))
                optimizer.step()
                if kind in ("own", "plugin", "carried") or accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
            found["losses"].append(loss.item())
            found["rates"].append(optimizer.param_groups[0]["lr"])
        if save and epoch == 0:
            accelerator.save_state(f"{directory}/state")
    model.eval()
    answers = []
    with torch.no_grad():
        for x, y in accelerator.prepare(data(13, seed=1)):
            answers.append(torch.stack(accelerator.gather_for_metrics((model(x), y))))
    found["evaluated"] = torch.cat(answers, dim=1)
    state = accelerator.get_state_dict(model)
    found["weights"] = None if state is None else dict(state)
    found["inner"] = type(accelerator.unwrap_model(model)).__name__
    accelerator.save_model(model, f"{directory}/model", safe_serialization=True)
    accelerator.wait_for_everyone()
    model, optimizer, schedule = accelerator.free_memory(model, optimizer, schedule)
    return found


# ---- several models -------------------------------------------------------------------------------------


def distil(stage: int | None, teacher_stage: int = 3) -> dict[str, Any]:
    """A student learns from a teacher, each with a plugin of its own; then two are trained, by two Accelerators."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    student, teacher, batches = Net(), Net(16, seed=6), data(24)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "both": []}
    if stage is None:
        accelerator = Accelerator(cpu=True)
    else:
        PartialState(cpu=True)
        plugins = {
            name: DeepSpeedPlugin(hf_ds_config=config(which, gradient_clipping=0.0))
            for name, which in (("student", stage), ("teacher", teacher_stage))
        }
        plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = 4
        accelerator = Accelerator(deepspeed_plugins=plugins)
    student, optimizer, batches = accelerator.prepare(student, optimizer, batches)
    if stage is not None:
        accelerator.state.select_deepspeed_plugin("teacher")
    frozen = accelerator.prepare(teacher).eval()
    for x, _ in batches:
        with torch.no_grad():
            wanted = frozen(x)
        loss = nn.functional.mse_loss(student(x), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())

    other = Accelerator(cpu=True) if stage is None else Accelerator()
    net = Net(12, seed=7)
    net, second = other.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in batches:
        for model, mine, way in ((student, optimizer, accelerator), (net, second, other)):
            loss = nn.functional.mse_loss(model(x), y)
            way.backward(loss)
            mine.step()
            mine.zero_grad()
            found["both"].append(loss.item())
    accelerator.free_memory()
    other.free_memory()
    return found


def halves(stage: int, precision: str) -> dict[str, Any]:
    """Mixed precision: a step that overflows is skipped, and the schedule waits."""
    given = config(stage, fp16={"enabled": "auto", "initial_scale_power": 8}, bf16={"enabled": "auto"})
    accelerator = accelerator_of(stage, {"hf_ds_config": given}, mixed_precision=precision)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule, batches = accelerator.prepare(net, optimizer, schedule, data(24))
    found: dict[str, Any] = {"losses": [], "skipped": [], "rates": []}
    for index, (x, y) in enumerate(batches):
        loss = nn.functional.mse_loss(model(x).float(), y)
        accelerator.backward(loss * (1e9 if index == 1 and precision == "fp16" else 1))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["skipped"].append(accelerator.optimizer_step_was_skipped)
        found["rates"].append(schedule.get_last_lr()[0])
    found["dtype"] = str(next(accelerator.unwrap_model(model).parameters()).dtype)
    accelerator.free_memory()
    return found


def compiled(stage: int | None) -> list[float]:
    """With a dynamo backend, which accelerate has the engine compile with."""
    settings: dict[str, Any] = {"dynamo_backend": "eager"} if stage is not None else {}
    accelerator = accelerator_of(stage, {"hf_ds_config": config(stage or 0)}, **settings)
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), data(24))
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if stage is not None:
        assert model.is_compiled
    accelerator.free_memory()
    return losses


def language_model(stage: int | None, directory: str) -> dict[str, Any]:
    """Hugging Face's model without its Trainer, saved as accelerate's guide has it, on every rank; at stage 3 it is
    born sharded, since the plugin says so."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = accelerator_of(stage, {"hf_ds_config": config(stage or 0), "zero3_init_flag": stage == 3})
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    net = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=61, **sizes))
    torch.manual_seed(1)
    with deepspeed.zero.GatheredParameters(list(net.parameters()), modifier_rank=0):
        for parameter in net.parameters() if accelerator.is_main_process else ():
            nn.init.normal_(parameter, std=0.1)
    born = type(net.lm_head.weight).__name__
    tokens = torch.randint(0, 61, (16, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer, batches = accelerator.prepare(net, optimizer, DataLoader(tokens, batch_size=4))
    losses = []
    for batch in batches:
        output = model(input_ids=batch, labels=batch)
        accelerator.backward(output.loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    accelerator.unwrap_model(model).save_pretrained(
        directory,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    return {"losses": losses, "born": born}
