"""`zeroshard explain` and `zeroshard check`, in this process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from zeroshard.launch.cli import main
from zeroshard.planner import check as check_module
from zeroshard.testing import Difference
from zeroshard.testing.loops import LOOPS


def test_explain_draws_the_plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # figures are not cut short
    assert main(["explain", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 3 on 8 ranks" in out
    assert "49,408 │    6,176 │ gathered at use" in out
    assert "0GATHER 0WAIT" in out
    assert "blocks.3  " in out
    assert "peak" in out


def test_explain_names_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--ranks", "8", "--mics", "4", "--hpz", "2"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks, 2 replicas of shard groups of 4 (MiCS), second shards in groups of 2 (hpZ)" in out


@pytest.mark.parametrize("hpz", [2, 3])
def test_explain_tells_of_second_shards_that_would_be_the_first(
    caplog: pytest.LogCaptureFixture, hpz: int
) -> None:
    assert main(["explain", "--hpz", str(hpz)]) == 0
    assert caplog.messages == [
        f"zero_optimization.zero_hpz_partition_size = {hpz} has no effect here: states are sharded over 2 ranks, "
        "and second shards need a smaller group of ranks"
    ]


def test_explain_of_a_resident_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--stage", "1"]) == 0
    assert "all parameters are resident" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "--stage", "4"], "--stage"),
        (["check", "--model", "huge"], "'huge' is not one of tiny, smollm2"),
        (["check", "--steps", "0"], "--steps"),
        (["check", "--only", "hpZ"], "these rows take a multiple of 4 ranks"),
        (
            ["explain", "--ranks", "8", "--mics", "3"],
            "mics_shard_size = 3: the 8 ranks of the run cannot be cut into groups of 3; choose one of 1, 2, 4, 8",
        ),
        (
            ["check", "--only", "Adamm"],
            "no row's name contains 'Adamm'. They are precision: fp32, 1 micro-batch",
        ),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err.strip()
    assert told in err
    assert "\n" not in err


def test_the_rows_of_check(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything that is promised to be the same is compared; nothing runs to say so."""
    assert main(["check", "--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(set(rows)) == len(rows)
    for dtype in ("fp32", "bf16", "fp16", "autocast"):
        assert sum(row.startswith(f"precision: {dtype},") for row in rows) == 4
    for name in ("Adam", "AdamW", "Adagrad", "RMSprop", "Lion", "Lamb", "Adafactor", "Muon"):
        assert f"optimizer: {name}" in rows
    assert [row for row in rows if row.startswith("loop")] == [f"loop: {name}" for name in LOOPS]
    assert [row for row in rows if row.startswith("groups")] == [
        "groups: MiCS, shard groups of 2 (--ranks 4)",
        "groups: hpZ, second shards in groups of 2 (--ranks 4)",
    ]
    assert main(["check", "--list", "--only", "muon"]) == 0
    assert capsys.readouterr().out == "optimizer: Muon\n"


def test_check_runs_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--steps", "2", "--only", "loop: plain"]) == 0
    out = capsys.readouterr().out
    assert "all the same" in out
    assert out.count("loop: plain") == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({2: float("nan")}, "1 run differs"), (dict.fromkeys(range(4), 2e-6), "4 runs differ")],
    ids=["one stage", "all stages"],
)
def test_what_differs_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: dict[int, float], told: str
) -> None:
    """Said by the status too. What was measured is made up, so no rank is started."""

    def measured(*args: Any, **kwargs: Any) -> Difference:
        relative = wrong.get(args[2]["zero_optimization"]["stage"], 9e-7)
        return Difference(parameter="p", relative=relative, steps=1, losses=(), reference_losses=())

    monkeypatch.setattr(check_module, "measure_parity", measured)
    monkeypatch.setattr(check_module, "RankPool", lambda ranks, quiet: nullcontext())
    assert main(["check", "--only", "optimizer: Muon"]) == 1
    out = capsys.readouterr().out
    assert out.count(f"{next(iter(wrong.values())):.1e}") == len(wrong)
    assert "DIFFERENT" in out
    assert told in out
