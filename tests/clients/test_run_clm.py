"""A script as it comes with transformers, started by `zeroshard run`: trains, saves, goes on, evaluates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroshard.compat import standin_directory
from zeroshard.testing.ranks import RankPool

if not all(map(find_spec, ("transformers", "datasets"))):  # not imported here: only workers have the stand-in
    pytest.skip("not installed: transformers or datasets", allow_module_level=True)

import trainer_runs as runs
import trl_runs
from trainer_runs import client

SCRIPT = Path(__file__).parent / "scripts" / "run_clm.py"


def run(folder: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", HF_HOME=str(folder / "hf"))
    environment["PYTHONPATH"] = os.pathsep.join([str(standin_directory()), environment.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", str(SCRIPT), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stdout + result.stderr


def test_the_script_runs_as_it_is(ranks2: RankPool, tmp_path: Path) -> None:
    ranks2.run(client, trl_runs.save_parts, str(tmp_path / "model"))
    for name, count in {"train": 60, "validation": 12}.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(trl_runs.texts(count, 12)))
    config = runs.ds_config(3, **runs.DS_OPTIMIZER, **runs.DS_SCHEDULER)
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    words = [
        *("--config_name", "model", "--tokenizer_name", "model", "--cache_dir", "cache"),
        *("--train_file", "train.txt", "--validation_file", "validation.txt"),
        *("--deepspeed", "ds_config.json", "--local_rank", "0", "--use_cpu"),
        *(
            "--per_device_train_batch_size",
            "2",
            "--gradient_accumulation_steps",
            "2",
            "--learning_rate",
            "0.01",
        ),
        *("--output_dir", "out", "--do_train", "--do_eval", "--report_to", "none", "--disable_tqdm", "true"),
        *("--logging_steps", "1", "--save_steps", "3"),
    ]
    run(tmp_path, *words, "--max_steps", "3", "--lr_scheduler_type", "constant")
    first = json.loads((tmp_path / "out/trainer_state.json").read_text())
    assert first["global_step"] == 3
    told = run(tmp_path, *words, "--max_steps", "6")  # finds its checkpoint
    again = json.loads((tmp_path / "out/trainer_state.json").read_text())
    assert [entry["step"] for entry in again["log_history"] if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert again["log_history"][:3] == first["log_history"][:3]
    results = json.loads((tmp_path / "out/eval_results.json").read_text())
    assert 1 < results["perplexity"] < 60
    assert runs.saved_weights(tmp_path / "out")["model.embed_tokens.weight"].shape == (59, 24)
    assert "rank 1" not in told
