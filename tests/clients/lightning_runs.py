"""One rank's part of the tests of Lightning and Fabric. Top-level imports are what every process has."""

from __future__ import annotations

import enum
import warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def client(rank: int, world: int, case: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `case(...)` as a process that `zeroshard run --as-deepspeed` started would."""
    from zeroshard.compat import activate

    activate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case(*args, **kwargs)


# ---- Trainer --------------------------------------------------------------------------------------------


SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def strategy_of(stage: int | None, **settings: Any) -> Any:
    """Lightning's strategy; stage None is its own DDP."""
    import lightning_parts as parts

    if stage is None:
        return "ddp"
    strategy = parts.CPUDeepSpeed(stage=stage, process_group_backend="gloo", **settings)
    if stage == 3:  # so that a model this small is sharded, and gathered each time
        strategy.config["zero_optimization"] |= SHARDED
    return strategy


def fit(
    stage: int | None,
    directory: str,
    *,
    model: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    samples: int = 48,
    resume: str | None = None,
    callbacks: tuple[str, ...] = (),
    saves: dict[str, Any] | None = None,
    sharded: bool = False,
    manual: bool = False,
    logs: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train and evaluate; what can be compared of it."""
    import lightning_parts as parts

    kind = parts.Configured if sharded else parts.ByHand if manual else parts.Regression
    made = kind(**(model or {}))
    added = [parts.CALLBACKS[name]() for name in callbacks]
    if saves is not None:
        added.append(parts.every_step(directory, **saves))
    trainer = parts.trainer(
        strategy_of(stage, **(strategy or {})),
        directory,
        callbacks=added,
        enable_checkpointing=saves is not None,
        logger=parts.CSVLogger(directory) if logs else False,
        log_every_n_steps=2,
        **settings,
    )
    trainer.fit(made, parts.loader(samples), parts.loader(16, seed=1), ckpt_path=resume)
    return {
        "losses": made.losses,
        "rates": made.rates,
        "steps": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": dict(made.state_dict()),
        "born": getattr(made, "born", None),
        "callbacks": [getattr(callback, "told", None) for callback in added],
    }


def all_of_it(stage: int | None, directory: str, **settings: Any) -> dict[str, Any]:
    """Everything a trainer does, one after the other, with one model."""
    import lightning_parts as parts

    made = parts.Regression()
    trainer = parts.trainer(strategy_of(stage), directory, **settings)
    found: dict[str, Any] = {}
    found["before"] = trainer.validate(made, parts.loader(16, seed=1), verbose=False)
    trainer.fit(made, parts.loader(), parts.loader(16, seed=1))
    found["after"] = trainer.validate(made, parts.loader(16, seed=1), verbose=False)
    found["test"] = trainer.test(made, parts.loader(16, seed=2), verbose=False)
    found["predicted"] = torch.cat(trainer.predict(made, parts.loader(16, seed=2)))
    trainer.fit_loop.max_epochs += 1
    trainer.fit(made, parts.loader(), parts.loader(16, seed=1))
    return {**found, "losses": made.losses}


class Mode(enum.Enum):
    """A hyper-parameter of a class of the user's."""

    FAST = "fast"
    SLOW = "slow"


def moved_away(stage: int, directory: str) -> list[Any]:
    """(losses of validation within fit, of a test after it, of a test from a checkpoint saved after it)."""
    import lightning_parts as parts

    made = parts.Regression()

    class OnDevice(parts.CPUDeepSpeed):
        def teardown(self) -> None:
            super().teardown()
            for parameter in made.parameters():
                if type(parameter) is nn.Parameter:
                    parameter.data = parameter.data.clone()

    strategy = OnDevice(stage=stage, process_group_backend="gloo")
    if stage == 3:  # the weight of 24 x 24 is sharded, the others are not
        strategy.config["zero_optimization"]["stage3_param_persistence_threshold"] = 500
    trainer = parts.trainer(strategy, directory, max_epochs=1)
    batches = parts.loader(16, seed=1)
    trainer.fit(made, parts.loader(), batches)
    within = float(trainer.callback_metrics["val_loss"])
    trainer.save_checkpoint(f"{directory}/after.ckpt")
    (after,) = trainer.test(made, batches, verbose=False)
    (again,) = trainer.test(made, batches, ckpt_path=f"{directory}/after.ckpt", verbose=False)
    return [within, after["test_loss"], again["test_loss"]]


def odd_settings() -> dict[str, Any]:
    """What people save as hyper-parameters."""
    return {
        "data": Path("/data/set"),
        "mode": Mode.SLOW,
        "nested": {
            "dims": [1, (2, 3)],
            "dropout": np.float32(0.5),
            "when": timedelta(hours=1),
            "act": nn.ReLU,
        },
        "arguments": Namespace(root=Path("x"), seed=3),
        "activation": torch.tanh,
    }


def fp32_file(directory: str, out: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(what Lightning's converter finds, the weights of a module made from its file, that module's settings)."""
    import lightning_parts as parts
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    out = f"{out}.{dist.get_rank()}"
    found = convert_zero_checkpoint_to_fp32_state_dict(directory, out)
    module = parts.Regression.load_from_checkpoint(out, map_location="cpu", weights_only=False)
    return found, dict(module.state_dict()), dict(module.hparams)


def evaluate(stage: int | None, directory: str, checkpoint: str) -> list[Any]:
    """A new model that gets its weights from a checkpoint: validated, tested and predicted with."""
    import lightning_parts as parts

    made = parts.Regression(lr=5.0)
    trainer = parts.trainer(strategy_of(stage), directory)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    batches = parts.loader(16, seed=1)
    return [
        trainer.validate(made, batches, ckpt_path=checkpoint, verbose=False),
        trainer.test(made, batches, ckpt_path=checkpoint, verbose=False),
        torch.cat(trainer.predict(made, batches, ckpt_path=checkpoint)),
    ]


def precise(stage: int | None, directory: str, precision: str) -> dict[str, Any]:
    """Losses, and what the weights are computed in."""
    import lightning_parts as parts

    made = parts.Regression(sgd=True)
    settings = {} if stage is None else {"initial_scale_power": 8}
    trainer = parts.trainer(strategy_of(stage, **settings), directory, precision=precision, max_epochs=1)
    trainer.fit(made, parts.loader(), parts.loader(16, seed=1))
    return {"losses": made.losses, "dtype": str(made.net[0].weight.dtype)}


def from_one_file(directory: str, file: str) -> tuple[dict[str, Any], int]:
    """Stage 3 goes on from the single file of another strategy: (weights when it began, steps at the end)."""
    import lightning_parts as parts

    began: dict[str, Any] = {}

    class Look(parts.L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            began.update({name: value.clone() for name, value in module.state_dict().items()})

    made = parts.Regression()
    strategy = strategy_of(3, load_full_weights=True)
    trainer = parts.trainer(strategy, directory, callbacks=[Look()], max_epochs=3)
    trainer.fit(made, parts.loader(), ckpt_path=file)
    return began, trainer.global_step
