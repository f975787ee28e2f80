"""Scripts of accelerate and Lightning, started as people start them, with nothing but the stand-in on the path."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zeroshard.compat import standin_directory

HERE = Path(__file__).parent
LIMIT_SECONDS = 180


def start(out: Path, *words: str) -> dict[str, Any]:
    """Run `python -m words`; what the script wrote."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    paths = [str(standin_directory()), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=out,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "rank0.json").read_text())
    return found


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: {stage}
  gradient_accumulation_steps: 3
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: {ranks}
use_cpu: false
"""


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch(tmp_path: Path) -> None:
    """By options at stage 3 on two ranks; then by a config file, from the saved state, at stage 2 on one."""
    script = str(HERE / "script_accelerate.py")
    options = [
        "--use_deepspeed",
        "--zero_stage",
        "3",
        "--gradient_clipping",
        "1.0",
        "--mixed_precision",
        "no",
    ]
    options += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", free_port()]
    first = start(tmp_path, "accelerate.commands.launch", *options, script, str(tmp_path))
    assert (first["kind"], first["ranks"], first["stage"]) == ("DistributedType.DEEPSPEED", 2, 3)
    assert (first["clipping"], first["window"], len(first["losses"])) == (1.0, 1, 8)

    (tmp_path / "config.yaml").write_text(CONFIG.format(stage=2, ranks=1))
    options = ["--config_file", str(tmp_path / "config.yaml"), "--main_process_port", free_port()]
    second = start(tmp_path, "accelerate.commands.launch", *options, script, str(tmp_path), "--resume")
    assert (second["ranks"], second["stage"], second["clipping"], second["window"]) == (1, 2, 0.5, 3)
    assert second["at start"] == pytest.approx(first["at end"], rel=1e-6)
    assert second["at end"] < second["at start"]


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_by_both_launchers(tmp_path: Path) -> None:
    """On two ranks; then from its checkpoint on one, with the same losses where it goes on."""
    script = str(HERE / "script_lightning.py")
    first = start(tmp_path, "zeroshard", "run", "--nproc", "2", script, str(tmp_path))
    assert (first["ranks"], first["steps"], first["epoch"]) == (2, 16, 2)
    options = ["--nproc-per-node", "1", "--master-port", free_port()]
    second = start(tmp_path, "torch.distributed.run", *options, script, str(tmp_path), "--resume")
    assert second["at start"] == pytest.approx(first["at end"], rel=1e-5)
    assert (second["ranks"], second["steps"], second["epoch"]) == (1, 48, 4)
    assert second["at end"]["val"] < second["at start"]["val"]
