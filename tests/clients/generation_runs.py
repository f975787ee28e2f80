"""Generation under ZeRO, as transformers and TRL do it; runs in workers (`trainer_runs.client`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trainer_runs import arguments, ds_config, samples, trainer_of

HOW = {"do_sample": False, "pad_token_id": 0}


def plain_copy(trainer: Any) -> Any:
    """The trained weights in a model of their own, on every rank."""
    import deepspeed
    from trainer_runs import llama

    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        model = llama()
        model.load_state_dict(trainer.model.state_dict())
    return model.eval()


def generated(rank: int, world: int, out: str, stage: int) -> dict[str, bool]:
    """`generate` on the inner model after training, ranks with prompts and lengths of their own."""
    trainer = trainer_of(arguments(out, ds_config(stage)))
    trainer.train()
    plain = plain_copy(trainer)
    model = trainer.model.eval()
    prompt = samples(3)[rank]["input_ids"][None, : 3 + rank]
    together = model.generate(prompt, max_new_tokens=4, **HOW)
    facts = {"together": torch.equal(together, plain.generate(prompt, max_new_tokens=4, **HOW))}
    longer = {"max_new_tokens": 2 + 5 * rank, **HOW}
    expected = plain.generate(prompt, **longer)
    # Ranks stop at different lengths: those that are done run on until the last one is.
    facts["synced"] = torch.equal(model.generate(prompt, synced_gpus=True, **longer), expected)
    with trainer.model_wrapped.unwrap_for_generation() as whole:
        facts["unwrapped"] = torch.equal(whole.generate(prompt, **longer), expected)
    if stage == 3:
        from trl.models.utils import unwrap_model_for_generation

        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as whole:
            facts["trl"] = torch.equal(whole.generate(prompt, **longer), expected)
    trainer.deepspeed.train()
    loss = trainer.training_step(
        trainer.model_wrapped, dict(zip(("input_ids", "labels"), [prompt] * 2, strict=True))
    )
    facts["trains on"] = bool(torch.isfinite(loss))
    return facts


def seq2seq(rank: int, world: int, out: str, stage: int | None) -> dict[str, Any]:
    """`predict_with_generate`: evaluation generates, on sets that end unevenly."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=61, d_model=24, d_kv=12, d_ff=40, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )
    seen: list[Tensor] = []

    def metrics(predictions: Any) -> dict[str, float]:
        seen.append(torch.as_tensor(predictions.predictions))
        return {"sum": float(predictions.predictions.sum())}

    args = arguments(
        out,
        None if stage is None else ds_config(stage),
        Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=9,
    )
    trainer = Seq2SeqTrainer(
        model=model, args=args, train_dataset=samples(40), eval_dataset=samples(5), compute_metrics=metrics
    )
    trainer.train()
    found = trainer.evaluate()
    return {"loss": found["eval_loss"], "sum": found["eval_sum"], "predictions": seen[-1].tolist()}
