"""One rank's part of the tests of Fabric."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning_runs import SHARDED
from torch import nn


def fabric_of(stage: int | None, **config: Any) -> Any:
    """A launched Fabric; stage None is its own DDP."""
    import lightning as L
    import lightning_parts as parts

    parts.as_torchrun()
    strategy: Any = "ddp"
    if stage is not None:
        strategy = parts.CPUFabricDeepSpeed(stage=stage, process_group_backend="gloo")
        strategy.config |= config
        if stage == 3:
            strategy.config["zero_optimization"] |= SHARDED
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    return fabric


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 24), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()).squeeze(-1)


def setup(fabric: Any, inside: bool = False, scheduled: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(3)
    net: Any
    if inside:
        with fabric.init_module():
            net = Net()
    else:
        net = Net()
    net._born = type(net.up.weight).__name__
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if not scheduled:
        return fabric.setup(net, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return fabric.setup(net, optimizer, scheduler=schedule)


def train(
    stage: int | None,
    directory: str,
    *,
    window: int = 1,
    clip: float = 0.0,
    inside: bool = False,
    scheduled: bool = False,
    save: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """A loop as Fabric's guide has it, and what it computed."""
    import lightning_parts as parts

    fabric = fabric_of(stage, gradient_clipping=clip)
    model, optimizer, *rest = setup(fabric, inside, scheduled)
    batches = fabric.setup_dataloaders(parts.loader())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0, "lr": 0.1}
    state |= {f"schedule {place}": schedule for place, schedule in enumerate(rest)}
    found: dict[str, Any] = {"losses": [], "left": None}
    if resume:
        found["left"] = sorted(fabric.load(f"{directory}/saved", state))
    for epoch in range(state["epoch"], 2):
        for index, (x, y) in enumerate(batches):
            accumulates = (index + 1) % window != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / window)
            found["losses"].append(loss.item())
            if accumulates:
                continue
            if clip and stage is None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
            for schedule in rest:
                schedule.step()
        state["epoch"] = epoch + 1
        if save == epoch:
            fabric.save(f"{directory}/saved", {**state, "other": torch.ones(2)})
    with torch.no_grad():
        model.eval()
        found["evaluated"] = model(torch.ones(2, 10))
    found["born"] = model._born
    found["weights"] = dict(model.state_dict())
    found["rate"] = optimizer.param_groups[0]["lr"]
    found["epoch"] = state["epoch"]
    return found


def refused(stage: int, directory: str) -> dict[str, Any]:
    """Calls that Fabric itself refuses, and loading what has not all that is asked for."""
    fabric = fabric_of(stage)
    model, optimizer = setup(fabric)
    told: dict[str, Any] = {}
    try:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    except NotImplementedError as error:
        told["clip"] = str(error)
    fabric.save(f"{directory}/weights", {"model": model, "epoch": 4})
    state = {"model": model, "epoch": 0, "never": 1}
    told["left"] = fabric.load(f"{directory}/weights", state, strict=False)
    told["state"] = {name: value for name, value in state.items() if name != "model"}
    return told


def raw(stage: int, file: str, trained: bool) -> dict[str, Any]:
    """A file of plain weights is loaded into what Fabric has set up."""
    fabric = fabric_of(stage)
    net = Net()
    model = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))[0] if trained else fabric.setup(net)
    fabric.load_raw(file, net)  # the engine's own names begin with "module."
    return {"weights": dict(model.state_dict()), "evaluated": model(torch.ones(2, 10)).detach()}


class Scored(Net):
    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def several(stage: int | None) -> list[float]:
    """Two models that are trained in turn, by a method of their own."""
    fabric = fabric_of(stage, gradient_clipping=0.0)
    torch.manual_seed(1)
    parts = []
    for net in (Scored(), Scored()):
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model.mark_forward_method("score")
        parts.append((model, optimizer))
    x = torch.ones(4, 10) * (fabric.global_rank + 1)
    losses = []
    for _ in range(3):
        for model, optimizer in parts:
            loss = model.score(x)
            fabric.backward(loss, **({} if stage is None else {"model": model}))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
