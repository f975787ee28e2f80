"""Runs of transformers' `Trainer` on one rank, for the tests of this folder. Runs in workers; see `client`.

Nothing of transformers is imported at the top: it looks for deepspeed when it is imported, and only workers have
the stand-in.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61


def client(rank: int, world: int, case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `case(rank, world, ...)` as a process that `zeroshard run --as-deepspeed` started would."""
    from zeroshard.compat import activate

    activate()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    if not gc.get_freeze_count():
        import transformers.trainer  # noqa: F401

        gc.freeze()  # trainers collect garbage often, and these modules have a million objects
    forget_singletons()
    torch.manual_seed(0)
    try:
        return case(rank, world, *args, **kwargs)
    finally:
        forget_singletons()


def forget_singletons() -> None:
    """What transformers and accelerate keep from one trainer to the next in a process."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    gc.collect()


# ---- what is trained ------------------------------------------------------------------------------------


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**{**shape, **changes})


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**changes))


def lora(**changes: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = llama()
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{**settings, **changes}))


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sentences of unequal numbers of tokens that count, so that means over tokens and over samples differ."""
    made = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(1, VOCABULARY, (12,), generator=generator)
        labels = ids.clone()
        labels[: number % 7] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


# ---- how ------------------------------------------------------------------------------------------------

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
DS_OPTIMIZER = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
}
DS_SCHEDULER = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    }
}


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    """The config that HF's guide begins with, sections `more` added; weights come and go with every use."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        **more.pop("zero_optimization", {}),
    }
    return copy.deepcopy({**AUTO, "zero_optimization": zero, **more})


def arguments(out: str | Path, config: Any, cls: Any = None, **changes: Any) -> Any:
    """TrainingArguments; `config` None is DDP."""
    from transformers import TrainingArguments

    defaults = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }
    return (cls or TrainingArguments)(
        output_dir=str(out), **({} if config is None else {"deepspeed": config}), **{**defaults, **changes}
    )


def trainer_of(args: Any, model: Any = None, rates: Sequence[float] | None = None, **more: Any) -> Any:
    """A Trainer; with `rates`, the learning rate of step k is `rates[k]` times the one in `args`."""
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import Trainer

    class Scheduled(Trainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: rates[step])
            return self.lr_scheduler

    given = {"train_dataset": samples(40), "eval_dataset": samples(6), **more}
    if "model_init" not in given:
        given["model"] = llama() if model is None else model
    return (Trainer if rates is None else Scheduled)(args=args, **given)


def history(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logged, without times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "step")
    return [{key: float(entry[key]) for key in kept if key in entry} for entry in trainer.state.log_history]


def saved_weights(directory: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = sorted(Path(directory).glob("*.safetensors"))
    return {name: tensor for file in found for name, tensor in load_file(file).items()}


# ---- cases ----------------------------------------------------------------------------------------------


def untied() -> nn.Module:
    return llama(tie_word_embeddings=False)


def per_sample() -> nn.Module:
    """Its loss is a mean over the tokens of a micro-batch, which Trainer then averages over micro-batches."""
    model: Any = llama()
    model.accepts_loss_kwargs = False
    return model


MODELS = {"llama": llama, "lora": lora, "untied": untied, "per_sample": per_sample}


def train(
    rank: int,
    world: int,
    out: str,
    config: Any,
    model: str = "llama",
    rates: Sequence[float] | None = None,
    resume: str | bool | None = None,
    data: int = 40,
    **changes: Any,
) -> list[dict[str, float]]:
    """Train, evaluate, save to `out/final`; what was logged."""
    trainer = trainer_of(
        arguments(out, config, **changes), MODELS[model](), rates, train_dataset=samples(data)
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.save_model(f"{out}/final")
    return history(trainer)
