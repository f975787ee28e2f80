"""A rank that dies in the middle of training: the others stop within seconds, and its name is told."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, time
import torch
import zeroshard

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
config = {{
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{"stage": {stage}, "stage3_param_persistence_threshold": 0}},
}}
engine, *_ = zeroshard.initialize(model=model, config=config)
rank = int(os.environ["RANK"])
for step in range(1000):
    if rank == 1 and step == 5:
        print("dies at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
print("finished")
"""


@pytest.mark.parametrize(("stage", "shared_memory"), [(3, "0"), (3, "1")])
def test_the_others_stop_and_the_rank_is_named(tmp_path: Path, stage: int, shared_memory: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(stage=stage))
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", str(script)],
        env={**os.environ, "ZEROSHARD_SHARED_MEMORY": shared_memory, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 128 + 9
    died = float(done.stdout.split("dies at ")[1].split()[0])
    assert time.time() - died < 20  # the start, two imports of torch, is not counted
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("zeroshard: rank 1 (pid ")
    assert "was killed by SIGKILL" in last
    assert "finished" not in done.stdout
    # What the survivor itself raises is in test_comm.py: here the launcher may stop it before it has said so.
