"""A script of Lightning's Trainer, as people have it, but for the strategy, which only knows GPUs.

    script_lightning.py OUT [--resume]

writes what it computed to OUT/rank0.json, and checkpoints to OUT.
"""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    @property
    def root_device(self):
        return torch.device("cpu", 0)

    def setup_environment(self):
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self):
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Model(L.LightningModule):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            width = self.hparams.width
            self.net = nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


out, resume = Path(sys.argv[1]), "--resume" in sys.argv
L.seed_everything(0)
x = torch.randn(64, 10)
data = TensorDataset(x, x.sum(-1, keepdim=True).sin())
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy=CPUDeepSpeedStrategy(stage=3, process_group_backend="gloo"),
    max_epochs=4 if resume else 2,
    callbacks=[ModelCheckpoint(out, save_last=True)],
    default_root_dir=out,
    logger=False,
    enable_progress_bar=False,
)
model, batches, tests = Model(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
found = {}
last = out / "last.ckpt" if resume else None
if resume:
    (found["at start"],) = trainer.validate(model, tests, ckpt_path=last)
trainer.fit(model, batches, tests, ckpt_path=last)
(found["at end"],) = trainer.validate(model, tests)
found |= {"steps": trainer.global_step, "epoch": trainer.current_epoch, "ranks": trainer.world_size}
if trainer.is_global_zero:
    (out / "rank0.json").write_text(json.dumps(found))
