"""The key table covers the tree and DeepSpeed's keys, each exactly once, and each row says what happens."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from zeroshard.config import explain_config, iter_keys, parse, render_keys
from zeroshard.config.keys import BY_PATH, SECTIONS, TABLE, tree_fields

DEEPSPEED = [
    (line[0], line[2:])
    for line in (Path(__file__).parent / "data" / "deepspeed_keys.txt").read_text().splitlines()
]
OPEN_PARAMS = ("optimizer.params.", "optimizer.params (", "scheduler.params.", "scheduler.params (")
OUTSIDE_THE_TREE = {key.path for key in TABLE if key.status.kind in ("alias", "deprecated")} | {
    key.path for key in TABLE if key.path.startswith(OPEN_PARAMS)
}


def test_no_row_twice() -> None:
    assert [path for path, count in Counter(key.path for key in TABLE).items() if count > 1] == []


def test_every_field_of_the_tree_has_a_row() -> None:
    assert sorted(set(tree_fields()) - set(BY_PATH)) == []


def test_every_row_is_a_field_an_alias_or_a_parameter() -> None:
    assert sorted(set(BY_PATH) - set(tree_fields()) - OUTSIDE_THE_TREE) == []
    assert not OUTSIDE_THE_TREE & set(tree_fields())


def test_every_alias_leads_to_a_key() -> None:
    for key in TABLE:
        if key.status.kind in ("alias", "deprecated"):
            assert key.status.text in tree_fields() or key.status.text in SECTIONS, key.path


def test_the_reference_list_is_whole() -> None:
    assert Counter(tier for tier, _ in DEEPSPEED) == {"A": 145, "B": 178, "C": 92}


@pytest.mark.parametrize("tier", ["A", "B", "C"])
def test_every_deepspeed_key_has_a_row(tier: str) -> None:
    missing = []
    for found, path in DEEPSPEED:
        # Sections that are refused as a whole have one row.
        whole = path.split(".")[0] if tier == "C" else path.removesuffix(".*")
        known = path in BY_PATH or path in SECTIONS or whole in BY_PATH
        if found == tier and not known:
            missing.append(path)
    assert missing == []


def test_tiers_agree_with_the_reference_list() -> None:
    wrong = [path for tier, path in DEEPSPEED if path in BY_PATH and BY_PATH[path].tier != tier]
    assert wrong == []


def test_every_row_has_a_meaning_and_a_reason() -> None:
    for key in TABLE:
        assert key.meaning.endswith(".") or key.meaning.endswith("..."), key.path
        assert len(key.meaning) > 5, key.path
        assert key.status.text, key.path
        assert (key.type is not None) == key.path.startswith(OPEN_PARAMS), key.path


def test_listing() -> None:
    rows = {row.path: row for row in iter_keys()}
    assert len(rows) == len(TABLE)
    bucket = rows["zero_optimization.reduce_bucket_size"]
    assert (bucket.type, bucket.default, bucket.tier) == ("int", 500_000_000, "A")
    assert bucket.status.startswith("used by layout")
    assert rows["communication_data_type"].type == "fp32|fp16|bf16"
    assert rows["zero_optimization.leaf_module.names"].type == "list[str]"
    assert rows["zero_optimization.prefetch_bucket_size"].default == 50_000_000
    assert rows["optimizer.params.lr"].default == 1e-3
    assert rows["comet.enabled"].status == "not yet (monitors)"
    assert all(row.type for row in rows.values())
    assert all(len(cells) == 6 and all(isinstance(cell, str) for cell in cells) for cells in render_keys())


def test_explanation_has_one_row_per_given_key() -> None:
    config = parse(
        {
            "train_batch_size": 8,
            "fp16": {"enabled": False, "loss_scale": 128},
            "bfloat16": {"enabled": True},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": 3, "max_live_parameters": 5, "zenflow": {"topk_ratio": 0.5}},
        }
    )
    rows = {row.path: row for row in explain_config(config)}
    assert set(rows) == {
        "train_batch_size",
        "fp16.enabled",
        "fp16.loss_scale",
        "bf16.enabled",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.momentum",
        "zero_optimization.stage",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.zenflow",
        "zero_optimization.zenflow.topk_ratio",
    }
    assert rows["train_batch_size"].status == "used by config.resolve_batch"
    assert rows["fp16.loss_scale"].status == "off, because fp16.enabled is off"
    assert rows["fp16.loss_scale"].value == 128
    assert rows["zero_optimization.zenflow.topk_ratio"].status.startswith("not yet")
    assert rows["zero_optimization.stage3_max_live_parameters"].default == 10**9


def test_explanation_knows_optimizers_that_are_refused() -> None:
    config = parse({"optimizer": {"type": "LBFGS"}})
    rows = {row.path: row.status for row in explain_config(config)}
    assert rows == {
        "optimizer.type": "refused, because it re-evaluates the loss inside a step and keeps one state for "
        "all parameters",
    }


def test_parameters_without_a_row_are_passed_on() -> None:
    config = parse({"optimizer": {"type": "NAdam", "params": {"momentum_decay": 0.1}}})
    rows = {row.path: row for row in explain_config(config)}
    assert rows["optimizer.params.momentum_decay"].status == "used: passed on"


def test_rows_of_an_optimizers_own_parameters() -> None:
    rows = {row.path: row for row in iter_keys()}
    assert rows["optimizer.params (Lamb).max_coeff"].status == "used by optimizers.Lamb"
    assert rows["optimizer.params (Muon).muon_lr"].status == "used by optimizers.muon_groups"
    assert rows["optimizer.params (Muon).eps"].default == 1e-10
    assert rows["optimizer.params.eps"].default == 1e-8
    waiting = [
        row.path for row in rows.values() if row.path.startswith("optimizer") and "not yet" in row.status
    ]
    assert waiting == []
    config = parse({"optimizer": {"type": "muon", "params": {"eps": 1e-9, "momentum": 0.9}}})
    told = {row.path: (row.status, row.default) for row in explain_config(config)}
    assert told["optimizer.params.eps"] == ("used by optimizers.Muon", 1e-10)
    assert told["optimizer.params.momentum"] == ("used by optimizers.Muon", 0.95)


def test_import_brings_no_torch() -> None:
    code = "import sys, zeroshard.config; print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
