"""`zeroshard bench` without ranks: what is asked for, what cannot be, and what is written."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.bench import command, output
from zeroshard.bench.measure import Row
from zeroshard.bench.plan import dtypes_of, operations_of, sizes_of
from zeroshard.launch.cli import main


def test_sizes() -> None:
    assert sizes_of("1, 4K,16MiB,1g,4096,64kb") == (1, 4096, 16 << 20, 1 << 30, 64 << 10)  # each once
    assert operations_of("all-reduce,broadcast") == ("all_reduce", "broadcast")
    assert dtypes_of("bf16,bf16,fp8") == ("bf16", "fp8")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sizes", "1K,x"], "--sizes: 'x' is not a number of bytes"),
        (["--sizes", "0"], "--sizes: '0' is not"),
        (["--sizes", "-1"], "--sizes: '-1' is not"),
        (["--sizes", ","], "--sizes: nothing is given"),
        (["--ops", "all_sum"], "--ops: 'all_sum' is not one of all_reduce, all_gather"),
        (["--dtypes", "fp99"], "--dtypes: 'fp99' is not one of fp32, bf16"),
        (["--backend", "mpi"], "--backend: 'mpi' is not one of gloo, nccl"),
        (["--csv", "/nowhere/x.csv"], "--csv: /nowhere/x.csv cannot be written"),
        (["--csv", "/"], "--csv: / cannot be written: Is a directory"),
        (["--csv", "/proc/rows.csv"], "--csv: /proc/rows.csv cannot be written: No such file"),
        (["--csv", "same.svg", "--plot", "./same.svg"], "both would be written to same.svg"),
        (["--sizes", "999999999999999G"], "--sizes: '999999999999999G' is not a number of bytes"),
        (["--plot", "x.doc"], "--plot: x.doc must end in .png, .svg or .pdf"),
        (["--ranks", "0"], "--ranks"),
        (["--iterations", "0"], "--iterations"),
        (["--warmup", "0"], "--warmup"),
        (["tiny"], "tiny"),
    ],
)
def test_mistakes_are_one_line_and_no_rank_is_started(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert told in printed.err


def test_another_number_of_ranks_than_the_launchers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["bench", "--ranks", "5"]) == 2
    assert "--ranks: 5, but a launcher has started 2" in capsys.readouterr().err


def test_nccl_needs_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--backend", "nccl"]) == 2
    assert "nccl cannot be used, because" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main(["bench", "-n", "8"]) == 2
    assert "8 ranks need as many GPUs with nccl, and there are 4" in capsys.readouterr().err


def test_without_matplotlib_the_plot_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'zeroshard[plot]'" in capsys.readouterr().err


def test_alone_it_starts_its_ranks_with_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []

    def run_ranks(words: list[str], count: int) -> int:
        started.append((words, count))
        return 7

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "a.csv"
    words = [
        "--ops",
        "broadcast",
        "--sizes",
        "1K",
        "--dtypes",
        "int8",
        "--iterations",
        "3",
        "--csv",
        str(file),
    ]
    assert main(["bench", *words, "-n", "3"]) == 7
    assert main(["bench"]) == 7
    (asked, three), (_, two) = started
    assert (three, two) == (3, 2)
    assert asked[:3] == ["-m", "zeroshard", "bench"]
    pairs = dict(zip(asked[3::2], asked[4::2], strict=True))
    assert pairs == {
        "--backend": "gloo",
        "--ops": "broadcast",
        "--dtypes": "int8",
        "--sizes": "1024",
        "--warmup": "2",
        "--iterations": "3",
        "--csv": str(file),
    }


ROWS = [
    Row(
        operation="all_reduce",
        carrier="torch gloo",
        dtype="fp32",
        nbytes=1 << 20,
        ranks=4,
        iterations=9,
        median=1e-3,
        low=9e-4,
        high=2e-3,
    ),
    Row(operation="all_gather", carrier="seam", dtype="int16", nbytes=512, ranks=4, note="not possible"),
]


def test_what_is_written(tmp_path: Path) -> None:
    output.write_csv(tmp_path / "rows.csv", ROWS)
    with (tmp_path / "rows.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["operation"], first["carried_by"], first["bytes"], first["ranks"]) == (
        "all_reduce",
        "torch gloo",
        "1048576",
        "4",
    )
    assert float(first["algbw_gb_per_s"]) == pytest.approx(1.048576)
    assert float(first["busbw_gb_per_s"]) == pytest.approx(1.5 * 1.048576)
    assert (second["median_seconds"], second["busbw_gb_per_s"], second["note"]) == ("", "", "not possible")
    columns = " ".join(output.line(ROWS[0]).split())
    assert columns == "all_reduce torch gloo fp32 1 MiB 1.00 ms 900.0 us - 2.00 ms 1.049 1.573"
    assert output.line(ROWS[1]).endswith("512 B  not possible")


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    output.plot(tmp_path / "a.png", ROWS)
    output.plot(tmp_path / "b.svg", ROWS[1:])  # nothing was measured
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "b.svg").read_text()
