"""What tests of Lightning and Fabric train, and `DeepSpeedStrategy` without its wish for CUDA.

Imported in workers only: Lightning looks for deepspeed when it is imported, and workers have the stand-in by then.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import lightning as L
import torch
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeed
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["CSVLogger"]


class CPUDeepSpeed(DeepSpeedStrategy):
    """As docs/lightning.md has it."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class CPUFabricDeepSpeed(FabricDeepSpeed):
    """The same for Fabric."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(FabricDeepSpeed, self).setup_environment()

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        if not self._config_initialized:
            self._format_config()
            self._config_initialized = True


class Regression(L.LightningModule):
    """A few layers, a buffer that training changes, dropout-free: the same losses in every run."""

    def __init__(
        self, width: int = 24, lr: float = 1e-2, schedule: str | None = "step", sgd: bool = False, **odd: Any
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.make_layers()

    def make_layers(self) -> None:
        torch.manual_seed(5)
        width = self.hparams.width
        hidden = nn.Linear(width, width)
        self.net = nn.Sequential(nn.Linear(10, width), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(width, 1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.seen += len(x)
        self.losses.append(loss.item())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        settings: dict[str, Any] = {"lr": self.hparams.lr, "weight_decay": 0.1}
        if self.hparams.sgd:
            optimizer: Any = torch.optim.SGD(self.parameters(), momentum=0.9, **settings)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), **settings)
        if self.hparams.schedule is None:
            return optimizer
        if self.hparams.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.2 * step))
        return [optimizer], [{"scheduler": schedule, "interval": self.hparams.schedule}]


def loader(samples: int = 48, batch: int = 4, seed: int = 0) -> DataLoader[Any]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 10, generator=random)
    return DataLoader(TensorDataset(x, x.sum(-1).sin()), batch_size=batch)


def as_torchrun() -> None:
    """What Lightning looks for in the environment to know that its processes are there."""
    os.environ.update(
        TORCHELASTIC_RUN_ID="tests", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", GROUP_RANK="0"
    )


def trainer(strategy: Any, directory: str, **changes: Any) -> L.Trainer:
    as_torchrun()
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": directory,
    }
    return L.Trainer(strategy=strategy, **{**settings, **changes})


class ByHand(Regression):
    """Manual optimization: a step every second batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        loss = super().training_step(batch, index)
        self.manual_backward(loss / 2)
        if index % 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Configured(Regression):
    """Its layers are made in `configure_model`, which the strategy calls under `zero.Init`."""

    def make_layers(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            super().make_layers()

    def on_fit_start(self) -> None:
        self.born = type(self.net[0].weight).__name__


# ---- callbacks ------------------------------------------------------------------------------------------


class Average(L.Callback):
    """An exponential average of the whole weights, as people write it: gathered where there is something to."""

    def __init__(self) -> None:
        self.told: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        import deepspeed

        with torch.no_grad(), deepspeed.zero.GatheredParameters(list(module.parameters())):
            for name, value in module.named_parameters():
                self.told[name] = torch.lerp(self.told.get(name, value), value, 0.1).clone()


class Summary(ModelSummary):
    """Keeps what it would print."""

    def __init__(self) -> None:
        super().__init__(max_depth=3)
        self.told = ""

    def summarize(self, summary_data: Any, *numbers: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.told = f"{summary_data} {numbers}"


class Rates(LearningRateMonitor):
    """Keeps the names under which rates are logged."""

    @property
    def told(self) -> dict[str, list[float]]:
        return self.lrs


def every_step(directory: str, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(directory, filename="{step}", save_top_k=-1, **settings)


CALLBACKS = {
    "average": Average,
    "rates": Rates,
    "summary": Summary,
    "swapped average": lambda: EMAWeightAveraging(decay=0.5),
}
