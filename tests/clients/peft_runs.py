"""PEFT's adapters under transformers' Trainer. Runs in workers; see `trainer_runs.client`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from loading_runs import save_plain
from torch import Tensor
from trainer_runs import arguments, ds_config, history, samples, saved_weights, trainer_of

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole embedding": {"modules_to_save": ["embed_tokens"]},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "all linear": {"target_modules": "all-linear"},
    "embedding too": {"target_modules": ["q_proj", "embed_tokens"]},
}


def adapted(model: Any, adapter: str) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **ADAPTERS[adapter]}
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(samples(1)[0]["input_ids"][None]).logits


def tuned(rank: int, world: int, out: str, stage: int | None, adapter: str, loaded: bool) -> dict[str, Any]:
    """Train an adapter, on a base that was `loaded` after the arguments (under zero.Init at stage 3) or not."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    plain = save_plain(f"{out}/base", tie_word_embeddings=False)
    how = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    args = arguments(out, None if stage is None else ds_config(stage), **how)
    base = AutoModelForCausalLM.from_pretrained(f"{out}/base") if loaded else copy.deepcopy(plain)
    model = adapted(base, adapter)
    trainer = trainer_of(args, model)
    trainer.train()
    trainer.evaluate()
    facts: dict[str, Any] = {"history": history(trainer)}
    trainer.save_model(f"{out}/final")
    dist.barrier()
    trained = logits(trainer.model_wrapped)
    unset_hf_deepspeed_config()
    again = PeftModel.from_pretrained(plain, f"{out}/final")
    facts["reloaded"] = float((logits(again) - trained).abs().max())
    facts["names"] = sorted(saved_weights(f"{out}/final"))
    facts["empty"] = [name for name, value in saved_weights(f"{out}/final").items() if not value.numel()]
    return facts
