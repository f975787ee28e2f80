"""CASES 110, 111, 114, 119: no CUDA, no compiler, two CPU processes; engines made and closed again and again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import zeroshard
import zeroshard.compat
from zeroshard.testing import RankPool

SCRIPT = """
import deepspeed, torch, sys
from deepspeed.ops.adam import DeepSpeedCPUAdam

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=0.01, adamw_mode=True)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}},
)
assert str(engine.device) == "cpu" and engine.world_size == 2, (engine.device, engine.world_size)
for step in range(30):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + engine.global_rank))
    loss = (engine(x) - x.sum(-1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
assert engine.global_steps == 30
if engine.global_rank == 0:
    print("loss below 3:", loss.item() < 3)
engine.destroy()
"""


@pytest.mark.parametrize("how", ["run", "torchrun"])
def test_without_cuda_and_compiler(tmp_path: Path, how: str) -> None:
    """An unchanged script that asks for DeepSpeed's CPU optimizer, with nothing on PATH and no devices."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    standin = str(zeroshard.compat.standin_directory())
    paths = [str(Path(zeroshard.__file__).parents[1]), *([] if how == "run" else [standin])]
    env = {
        "PATH": str(tmp_path),
        "HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    start = {
        "run": ["-m", "zeroshard", "run", "--nproc", "2", "--as-deepspeed"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    done = subprocess.run(
        [sys.executable, *start[how], str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loss below 3: True\n"
    assert "Traceback" not in done.stderr
    assert "compil" not in done.stderr.lower()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


def again_and_again(rank: int, world: int, stage: int) -> dict[str, Any]:
    """Bytes of the process after each round, without the garbage collector; what the last module is left with."""
    sizes: list[int] = []
    gone: list[bool] = []
    model, engine = nn.Module(), None
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            model = nn.Sequential(*[Block() for _ in range(4)])  # 4.2 MB
            engine, *_ = zeroshard.initialize(
                model=model,
                optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
                config={"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
            )
            for step in range(2):
                loss = engine(torch.full((2, 256), float(step))).square().mean()
                engine.backward(loss)
                engine.step()
            engine.close()
            loss = None
            sizes.append(psutil.Process().memory_info().rss)
            left = weakref.ref(engine)
            del engine, _
            gone.append(left() is None)
    finally:
        gc.enable()
    hooks = sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    )
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    with torch.no_grad():
        output = float(model(torch.ones(1, 256)).sum())
    last = weakref.ref(model)
    del model
    return {
        "sizes": sizes,
        "gone": all(gone) and last() is None,
        "hooks": hooks,
        "kinds": kinds,
        "output": output,
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rounds_of_engines_leave_nothing(ranks2: RankPool, stage: int) -> None:
    """CASES 119: a closed engine and its model go with their last name, whenever the collector runs."""
    first, second = ranks2.run(again_and_again, stage)
    for got in (first, second):
        assert got["gone"], "something holds the engine, or the model, in a cycle"
        assert got["hooks"] == 0
        assert got["kinds"] == {"Parameter"}
        # The allocator gives back and takes again as it likes: the highest of each half. A leak would be 4 x 4 MB.
        assert max(got["sizes"][4:]) - max(got["sizes"][:4]) < 6e6, got["sizes"]
    assert first["output"] == second["output"], "both have the full weights"
