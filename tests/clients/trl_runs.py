"""TRL's trainers; runs in workers (`trainer_runs.client`). Tokenizer, texts and models are made here."""

from __future__ import annotations

from typing import Any

import torch
from trainer_runs import arguments, ds_config, history, llama, llama_config

WORDS = [f"w{number}" for number in range(56)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def save_parts(rank: int, world: int, directory: str) -> None:
    """A config and a tokenizer, as scripts want them."""
    if rank == 0:
        tokenizer().save_pretrained(directory)
        llama_config(vocab_size=59, eos_token_id=1).save_pretrained(directory)


def texts(count: int, words: int = 9) -> list[str]:
    generator = torch.Generator().manual_seed(3)
    return [
        " ".join(WORDS[i] for i in torch.randint(0, 56, (words - number % 4,), generator=generator).tolist())
        for number in range(count)
    ]


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def finished(trainer: Any, out: str) -> list[dict[str, float]]:
    trainer.train()
    trainer.save_model(f"{out}/final")
    return history(trainer)


def sft(rank: int, world: int, out: str, stage: int | None, adapter: bool, packing: bool) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = arguments(
        out,
        None if stage is None else ds_config(stage),
        SFTConfig,
        max_length=16,
        packing=packing,
        max_steps=3,
        bf16=False,
    )
    torch.manual_seed(1)
    trainer = SFTTrainer(
        model=llama(),
        args=args,
        train_dataset=Dataset.from_dict({"text": texts(40)}),
        processing_class=tokenizer(),
        peft_config=lora_config() if adapter else None,
    )
    return finished(trainer, out)


def dpo(rank: int, world: int, out: str, stage: int | None, adapter: bool) -> Any:
    """With a reference model of its own, which is a second engine, or the model without its adapter."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_dict({"prompt": texts(40, 5), "chosen": texts(40, 6), "rejected": texts(40, 7)})
    args = arguments(
        out, None if stage is None else ds_config(stage), DPOConfig, max_length=24, max_steps=3, bf16=False
    )
    torch.manual_seed(1)
    trainer = DPOTrainer(
        model=llama(),
        ref_model=None if adapter else llama(),
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=lora_config() if adapter else None,
    )
    return finished(trainer, out)


def grpo(rank: int, world: int, out: str, stage: int | None) -> Any:
    """Generates with the weights that it trains, in every step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    args = arguments(
        out,
        None if stage is None else ds_config(stage),
        GRPOConfig,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
        temperature=1.0,
        seed=5,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=llama(),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": texts(16, 5)}),
        processing_class=tokenizer(),
    )
    return finished(trainer, out)
