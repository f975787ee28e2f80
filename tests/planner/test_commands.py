"""`zeroshard explain` and `zeroshard check`, in this process."""

from __future__ import annotations

import pytest

from zeroshard.launch.cli import main
from zeroshard.planner import check as check_module
from zeroshard.planner.check import Case


def test_explain_draws_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 3 on 8 ranks" in out
    assert "0GATHER 0WAIT" in out
    assert "blocks.3  " in out
    assert "peak" in out


def test_explain_of_a_resident_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--stage", "1"]) == 0
    assert "all parameters are resident" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["explain", "--stage", "4"], "--stage"),
        (["check", "--model", "huge"], "'huge' is not one of tiny, smollm2"),
        (["check", "--steps", "0"], "--steps"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err.strip()
    assert told in err
    assert "\n" not in err


@pytest.mark.parametrize("limit", [1e-6, -1.0])
def test_check_judges(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """With a limit that nothing can meet it finds every run different, and says so by its status."""
    tiny = check_module.SUBJECTS["tiny"]._replace(cases=(Case("fp32", 1, 0.0),))
    monkeypatch.setitem(check_module.SUBJECTS, "tiny", tiny)
    monkeypatch.setattr(check_module, "FP32_TOLERANCE", limit)
    status = main(["check", "--steps", "2"])
    out = capsys.readouterr().out
    assert status == (0 if limit > 0 else 1)
    assert ("all the same" if limit > 0 else "4 runs differ") in out
    assert out.count("fp32") == 4
