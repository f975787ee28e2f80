"""Trains a causal language model on text files, in the manner of transformers' examples."""

import logging
import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain

import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Weights to begin with."})
    config_name: str | None = field(default=None, metadata={"help": "A config, to begin from scratch."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "If it is elsewhere."})
    cache_dir: str | None = field(default=None, metadata={"help": "For what is downloaded and prepared."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "A text file."})
    validation_file: str = field(metadata={"help": "Another one."})
    block_size: int = field(default=32, metadata={"help": "Tokens of one sample."})


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(sys.stdout)])
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    set_seed(training_args.seed)

    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = load_dataset("text", data_files=files, cache_dir=model_args.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if model_args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    else:
        config = AutoConfig.from_pretrained(model_args.config_name)
        model = AutoModelForCausalLM.from_config(config)
        count = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
        logger.info(f"Training new model from scratch - Total size={count} params")
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def tokenize(examples):
        return tokenizer(examples["text"])

    def group(examples):
        joined = {name: list(chain(*examples[name])) for name in ("input_ids", "attention_mask")}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            name: [ids[i : i + data_args.block_size] for i in range(0, total, data_args.block_size)]
            for name, ids in joined.items()
        }
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw.map(tokenize, batched=True, remove_columns=["text"])
        blocks = tokenized.map(group, batched=True, remove_columns=tokenized["train"].column_names)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"] if training_args.do_train else None,
        eval_dataset=blocks["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint
        if checkpoint is None and os.path.isdir(training_args.output_dir):
            checkpoint = get_last_checkpoint(training_args.output_dir)
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = result.metrics
        metrics["train_samples"] = len(blocks["train"])
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
