"""What Trainer saves and evaluates beside a plain run; runs in workers (`trainer_runs.client`)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_runs import (
    DS_OPTIMIZER,
    DS_SCHEDULER,
    arguments,
    ds_config,
    history,
    llama,
    samples,
    saved_weights,
    trainer_of,
)


def best(rank: int, world: int, out: str, stage: int | None) -> dict[str, Any]:
    """`load_best_model_at_end`, where the first evaluation is the best one: the rate then explodes."""
    how = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
    }
    args = arguments(out, None if stage is None else ds_config(stage), load_best_model_at_end=True, **how)
    trainer = trainer_of(args, rates=(1.0, 50.0, 100.0, 100.0, 100.0))
    trainer.train()
    facts = {"best": Path(trainer.state.best_model_checkpoint).name, "loss": trainer.evaluate()["eval_loss"]}
    trainer.save_model(f"{out}/final")
    dist.barrier()
    facts["left"] = sorted(path.name for path in Path(out).glob("checkpoint-*"))
    return facts


def weights_only(rank: int, world: int, out: str, stage: int) -> dict[str, Any]:
    """`save_only_model`: no optimizer, and transformers opens what is there."""
    from accelerate.state import AcceleratorState
    from transformers import LlamaForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    args = arguments(out, ds_config(stage), save_strategy="steps", save_steps=4, save_only_model=True)
    trainer = trainer_of(args)
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    dist.barrier()
    files = sorted(path.name for path in Path(f"{out}/checkpoint-4").iterdir())
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    again = LlamaForCausalLM.from_pretrained(f"{out}/checkpoint-4")
    plain = trainer_of(arguments(f"{out}/again", None), again)
    return {"files": files, "loss": loss, "again": plain.evaluate()["eval_loss"]}


def without_gathering(rank: int, world: int, out: str) -> dict[str, Any]:
    """`stage3_gather_16bit_weights_on_model_save` off: a checkpoint, of which zero_to_fp32 makes weights."""
    config = ds_config(3, zero_optimization={"stage3_gather_16bit_weights_on_model_save": False})
    trainer = trainer_of(arguments(out, config))
    trainer.train()
    trainer.save_model(f"{out}/final")
    dist.barrier()
    if rank == 0:  # as the page of transformers says
        words = [sys.executable, "zero_to_fp32.py", ".", f"{out}/whole", "--safe_serialization"]
        subprocess.run(words, cwd=f"{out}/final", check=True, timeout=100)
    dist.barrier()
    state = trainer.deepspeed._zero3_consolidated_16bit_state_dict()
    facts: dict[str, Any] = {"files": sorted(path.name for path in Path(f"{out}/final").iterdir())}
    if rank == 0:
        found = saved_weights(f"{out}/whole")
        facts["wrong"] = [name for name, value in found.items() if not torch.equal(value, state[name])]
        facts["missing"] = sorted(set(state) - set(found))
    return facts


def evaluated(rank: int, world: int, out: str, scheduler: bool) -> dict[str, Any]:
    """`evaluate`, `predict` and `generate` at stage 3 without training."""
    config = ds_config(3, **{**DS_OPTIMIZER, **(DS_SCHEDULER if scheduler else {})})
    trainer = trainer_of(arguments(out, config))
    trainer.evaluate()
    predictions = trainer.predict(samples(6)).predictions
    trainer.model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
    plain = llama().eval()
    with torch.no_grad():
        expected = torch.cat([plain(input_ids=x["input_ids"][None]).logits for x in samples(6)])
    return {
        "difference": float((torch.as_tensor(predictions) - expected).abs().max()),
        "engine": {name: getattr(trainer.deepspeed, name) for name in ("optimizer", "lr_scheduler")},
    }


def attributes(rank: int, world: int, out: str, stage: int) -> dict[str, Any]:
    """What HF and its users ask of a trainer that trained."""
    from accelerate.utils import extract_model_from_parallel
    from deepspeed import DeepSpeedEngine
    from deepspeed.utils import safe_get_full_fp32_param
    from transformers.trainer_pt_utils import get_model_param_count

    trainer = trainer_of(arguments(out, ds_config(stage, **DS_OPTIMIZER)))
    model = trainer.model
    trainer.train()
    wrapped = trainer.model_wrapped
    masters = [safe_get_full_fp32_param(p) for p in model.parameters()]
    return {
        "wrapped": type(wrapped) is DeepSpeedEngine
        and wrapped.module is model
        and trainer.deepspeed is wrapped,
        "unwrapped": trainer.accelerator.unwrap_model(wrapped)
        is model
        is extract_model_from_parallel(wrapped),
        "count": get_model_param_count(wrapped, trainable_only=True)
        == sum(p.numel() for p in llama().parameters()),
        "stage": wrapped.zero_optimization_stage(),
        "config": wrapped.config["zero_optimization"]["stage"],
        "steps": wrapped.global_steps,
        "window": (wrapped.gradient_accumulation_steps(), wrapped.train_micro_batch_size_per_gpu()),
        "batch": wrapped.train_batch_size(),
        "norm": isinstance(float(wrapped.get_global_grad_norm()), float),
        "masters": all(m.shape == p.shape for m, p in zip(masters, llama().parameters(), strict=True)),
        "overflow": trainer.optimizer.step_was_skipped,
    }


def one_after_the_other(rank: int, world: int, out: str, stage: int) -> dict[str, Any]:
    """Trainers in one process: engines go with their trainers, and the process does not grow."""
    from accelerate.state import AcceleratorState

    alive: list[weakref.ref[Any]] = []
    losses, groups = [], []
    for number in range(4):
        trainer = trainer_of(arguments(f"{out}/{number}", ds_config(stage, **DS_OPTIMIZER)))
        trainer.train()
        losses.append([entry.get("loss") for entry in history(trainer)])
        alive += [weakref.ref(trainer.deepspeed), weakref.ref(trainer.model)]
        trainer.accelerator.free_memory()
        del trainer
        AcceleratorState._reset_state()
        gc.collect()
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return {
        "alive": [ref() is not None for ref in alive],
        "same": all(entry == losses[0] for entry in losses),
        "groups": groups,
    }


def searched(rank: int, world: int, out: str) -> dict[str, Any]:
    """As `hyperparameter_search` does it: one trainer, several trials, a new model in each."""
    from transformers.trainer_utils import HPSearchBackend

    trainer = trainer_of(arguments(out, ds_config(3, **DS_OPTIMIZER)), model_init=lambda trial: llama())
    losses = []
    for rate in (1e-2, 1e-2, 2e-2):
        trainer.hp_search_backend = HPSearchBackend.RAY  # its trials are dicts of arguments
        trainer._hp_search_setup({"learning_rate": rate})
        trainer.hp_search_backend = None
        trainer.model = trainer.model_wrapped = trainer.call_model_init()
        trainer.train()
        losses.append([entry["loss"] for entry in history(trainer) if "loss" in entry])
    return {"same": losses[0] == losses[1], "other": losses[0] != losses[2]}


def sixteen(rank: int, world: int, out: str, stage: int, precision: str) -> dict[str, Any]:
    """A run in 16 bit; in fp16 the loss scale is too large at first."""
    config = ds_config(
        stage, **({"fp16": {"enabled": True, "initial_scale_power": 24}} if precision == "fp16" else {})
    )
    how = {} if precision == "fp32" else {precision: True}
    how["bf16_full_eval"] = precision == "bf16"
    trainer = trainer_of(arguments(out, config, max_steps=14, logging_steps=1, **how))
    trainer.train()
    trainer.save_model(f"{out}/final")
    dist.barrier()
    return {
        "history": history(trainer),
        "skipped": trainer.deepspeed.skipped_steps,
        "dtypes": {str(value.dtype) for value in saved_weights(f"{out}/final").values()},
        "eval": trainer.evaluate()["eval_loss"],
    }
