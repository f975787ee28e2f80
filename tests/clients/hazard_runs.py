"""What users do around a Trainer; runs in workers (`trainer_runs.client`)."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainer_runs import (
    arguments,
    ds_config,
    forget_singletons,
    history,
    llama,
    samples,
    saved_weights,
    trainer_of,
)


def with_metrics(rank: int, world: int, out: str, stage: int | None) -> Any:
    """Logits of all ranks, evaluation before the first step and between, smoothed labels."""

    def metrics(given: Any) -> dict[str, float]:
        return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}

    args = arguments(
        out,
        None if stage is None else ds_config(stage),
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=1,
        label_smoothing_factor=0.1,
        batch_eval_metrics=False,
    )
    trainer = trainer_of(args, compute_metrics=metrics)
    trainer.train()
    return history(trainer), trainer.evaluate()["eval_accuracy"]


def own_loss(rank: int, world: int, out: str, stage: int | None) -> Any:
    """A Trainer whose `compute_loss` reads the logits."""
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return (loss, outputs) if return_outputs else loss

    args = arguments(out, None if stage is None else ds_config(stage))
    trainer = Own(model=llama(), args=args, train_dataset=samples(40), eval_dataset=samples(6))
    trainer.train()
    trainer.evaluate()
    return history(trainer), None


def with_callbacks(rank: int, world: int, out: str, stage: int | None) -> Any:
    """A callback that generates after every step; data without a length."""
    from torch.utils.data import IterableDataset
    from transformers import TrainerCallback

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from samples(40)

    texts: list[list[int]] = []

    class Writes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            prompt = samples(1)[0]["input_ids"][None, :4]
            texts.append(
                model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist()
            )

    args = arguments(out, None if stage is None else ds_config(stage))
    trainer = trainer_of(args, train_dataset=Endless(), callbacks=[Writes()])
    trainer.train()
    return history(trainer), texts


def trained_again(rank: int, world: int, out: str, stage: int | None) -> Any:
    """One Trainer that trains, evaluates, trains anew, and goes on from a checkpoint."""
    how = {"save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(arguments(out, None if stage is None else ds_config(stage), **how))

    def again(**where: Any) -> None:
        if stage is None:
            trainer.optimizer = None  # as transformers itself does with `deepspeed=`
        else:
            trainer.model_wrapped = trainer.model
        trainer.train(**where)

    trainer.train()
    trainer.evaluate()
    again()
    trainer.args.max_steps = 6
    again(resume_from_checkpoint=True)
    trainer.evaluate()
    found = history(trainer)
    if stage is not None:
        with pytest.raises(RuntimeError, match=r"trainer\.model_wrapped = trainer\.model"):
            trainer.train()
    return found, None


def compiled(rank: int, world: int, out: str, stage: int | None) -> Any:
    """`torch_compile`: accelerate asks the engine to compile."""
    how = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = trainer_of(arguments(out, None if stage is None else ds_config(stage), **how))
    trainer.train()
    trainer.evaluate()
    return history(trainer), None


def around(rank: int, world: int, out: str, stage: int) -> dict[str, Any]:
    """Attributes of parameters; gathered in another order on each rank and edited on one; saved by hand."""
    import deepspeed

    model = llama()
    for name, parameter in model.named_parameters():
        parameter.own_name = name  # type: ignore[attr-defined]
    trainer = trainer_of(arguments(out, ds_config(stage)), model)
    trainer.train()
    facts = {"attributes": all(p.own_name == name for name, p in model.named_parameters())}  # type: ignore[attr-defined]
    trainer.model.save_pretrained(f"{out}/by hand", is_main_process=rank == 0)
    trainer.save_model(f"{out}/final")
    dist.barrier()
    ours, theirs = saved_weights(f"{out}/by hand"), saved_weights(f"{out}/final")
    facts["by hand"] = all(torch.equal(ours[name], value) for name, value in theirs.items())
    found: list[Tensor] = list({*model.parameters(), *model.buffers()})  # the order of a set of objects
    with deepspeed.zero.GatheredParameters(found[::-1] if rank else found, modifier_rank=0):
        if rank == 0:
            with torch.no_grad():
                model.model.norm.weight.fill_(3.0)  # type: ignore[union-attr, operator]
    state = trainer.deepspeed._zero3_consolidated_16bit_state_dict()
    facts["edited"] = rank > 0 or bool((state["model.norm.weight"] == 3).all())
    if rank == 0:
        facts["names"] = list(model.lm_head.state_dict()) == ["weight"]  # of a part: no collective
    return facts


def left_alone(rank: int, world: int, out: str, stage: int) -> dict[str, Any]:
    """Trainers that are just dropped: nothing of them stays."""
    alive: list[weakref.ref[Any]] = []
    groups = []
    for number in range(4):
        trainer = trainer_of(arguments(f"{out}/{number}", ds_config(stage)))
        trainer.train()
        parameters = [weakref.ref(parameter) for parameter in trainer.model.parameters()]
        alive += [weakref.ref(trainer.deepspeed), weakref.ref(trainer.model), *parameters]
        del trainer
        forget_singletons()
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return {"alive": sum(ref() is not None for ref in alive), "groups": groups[-1] - groups[0]}
