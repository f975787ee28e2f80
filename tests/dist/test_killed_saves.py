"""SIGKILL, for real: of one rank and of all, at any moment of a run that does nothing but save."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.checkpoint.opening import open_checkpoint

KILLS = 8
"""In the suite that everybody runs; `make test-all` makes 60."""

LIMIT = 60.0
"""Seconds until a case is given up."""


def run(rank: int, directory: str) -> None:
    """One of two ranks: open what is there, then step and save until the end."""
    torch.set_num_threads(1)
    where = Path(directory)
    dist.init_process_group("gloo", store=dist.FileStore(str(where / "store"), 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {}},
        "checkpoint": {"keep_last": 2},
    }
    engine = zeroshard.initialize(model=model, config=config)[0]
    saves = where / "saves"
    engine.load_checkpoint(saves)
    while True:
        engine.backward(engine(torch.ones(1, 64)).square().mean())
        engine.step()
        engine.save_checkpoint(saves)
        if rank == 0:
            (where / "returned.new").write_text(str(engine.global_steps))
            os.replace(where / "returned.new", where / "returned")


def steps_saved(where: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return int((where / "returned").read_text())
    return 0


def kill_once(where: Path, context: multiprocessing.context.BaseContext, dice: random.Random) -> None:
    """Go on from what is there, kill in the middle, and check that nothing is lost."""
    before = steps_saved(where)
    with contextlib.suppress(FileNotFoundError):
        (where / "store").unlink()
    ranks: list[BaseProcess] = [
        context.Process(target=run, args=(rank, str(where)), daemon=True)  # type: ignore[attr-defined]
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT
    while steps_saved(where) < before + 1:
        assert time.monotonic() < deadline, "no checkpoint in time"
        assert all(process.is_alive() for process in ranks), [process.exitcode for process in ranks]
        time.sleep(0.002)
    time.sleep(dice.uniform(0.0, 0.05))
    killed = dice.choice([ranks[:1], ranks[1:], ranks])
    for process in killed:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0.1))  # a survivor ends by itself, with an error
        assert process.exitcode not in (0, None), "a rank outlived its peer"
    saved = steps_saved(where)
    reader = open_checkpoint(where / "saves")
    reader.verify()
    step = int(re.fullmatch(r"global_step(\d+)", reader.directory.name)[1])  # type: ignore[index]
    assert step >= saved > before
    assert reader.extras()["global_steps"] == step


def kills(where: Path, count: int, seed: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "zeroshard.initialization", "torch.distributed.checkpoint"])
    dice = random.Random(seed)
    for _ in range(count):
        kill_once(where, context, dice)


def test_killed_saves_lose_nothing(tmp_path: Path) -> None:
    kills(tmp_path, KILLS, seed=0)
    left = [entry.name for entry in (tmp_path / "saves").iterdir()]
    assert len(left) <= 5, "leftovers are not cleared up"


@pytest.mark.slow
def test_sixty_killed_saves_lose_nothing(tmp_path: Path) -> None:
    kills(tmp_path, 60, seed=1)
