"""`zeroshard bench` on ranks: rows of a pool, and one real run with its file."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from zeroshard.bench.carriers import SeamCarrier, TorchCarrier
from zeroshard.bench.measure import Row, measure, memory_for_each_rank
from zeroshard.bench.plan import Plan
from zeroshard.comm import open_collectives
from zeroshard.comm.bandwidth import OPERATIONS
from zeroshard.testing import RankPool, RunFailedError

CPU = torch.device("cpu")
SHARES = {"all_reduce": 1.0, "broadcast": 1.0, "point_to_point": 1.0}  # on 2 ranks; 1/2 for the others


def rows_of(rank: int, world: int, plan: Plan, memory: int | None) -> list[Row]:
    seam = SeamCarrier(open_collectives(None, CPU))
    rows = list(measure(plan, [TorchCarrier("gloo"), seam], CPU, memory))
    seam.close()
    return rows


def planned(dtypes: tuple[str, ...], sizes: tuple[int, ...], iterations: int | None = 3) -> Plan:
    return Plan(
        operations=OPERATIONS, sizes=sizes, dtypes=dtypes, iterations=iterations, warmup=1, seconds=1e-3
    )


def test_every_operation_of_both_carriers(ranks2: RankPool) -> None:
    first, last = ranks2.run(rows_of, planned(("fp32",), (4096, 9, 1)), None)
    assert first == last  # times are the slowest rank's, so all ranks know the same
    assert [(row.operation, row.nbytes, row.carrier) for row in first] == [
        (operation, nbytes, carrier)
        for operation in OPERATIONS
        for nbytes in (4096, 8, 8)  # whole elements, a multiple of the ranks, one at least
        for carrier in ("torch gloo", "shared memory")
        if carrier == "torch gloo" or operation not in ("all_to_all", "point_to_point")
    ]
    for row in first:
        assert row.note == ""
        assert row.iterations == 3
        assert 0 < row.low <= row.median <= row.high
        algorithm, bus = row.bandwidth
        assert algorithm == pytest.approx(row.nbytes / row.median)
        assert bus == pytest.approx(algorithm * SHARES.get(row.operation, 0.5))


def test_a_dtype_that_a_backend_lacks_is_a_row_and_the_rest_goes_on(ranks2: RankPool) -> None:
    rows = ranks2.run(rows_of, planned(("fp8", "fp32"), (1024,)), None)[0]
    notes = {(row.operation, row.carrier): row.note for row in rows if row.dtype == "fp8"}
    assert "not possible with fp8: " in notes["all_reduce", "torch gloo"]
    assert "cannot be summed" in notes["all_reduce", "shared memory"]
    assert notes["all_gather", "shared memory"] == ""
    assert all(row.note == "" for row in rows if row.dtype == "fp32")


def test_what_does_not_fit_is_a_row(ranks3: RankPool) -> None:
    rows = ranks3.run(rows_of, planned(("bf16",), (600, 6000), None), 2000)[0]
    assert all((row.note == "") == (row.nbytes == 600) for row in rows)
    assert "and may take 0 MB, half of what is free" in rows[-1].note
    assert all(5 <= row.iterations <= 200 for row in rows if not row.note)


def left_for_a_rank(rank: int, world: int) -> int | None:
    return memory_for_each_rank(CPU)


def test_ranks_agree_on_the_memory(ranks2: RankPool) -> None:
    found = ranks2.run(left_for_a_rank)
    assert found[0] == found[1]
    assert found[0] > 1_000_000


def one_rank_fails(rank: int, world: int) -> None:
    class Carrier(TorchCarrier):
        def prepare(self, *args: object) -> object:
            if rank == 1:
                raise RuntimeError("out of handles")
            return lambda: None

    list(measure(planned(("fp32",), (8,)), [Carrier("gloo")], CPU, None))


def test_a_rank_that_fails_alone_is_an_error_on_all(ranks2: RankPool) -> None:
    with pytest.raises(RunFailedError) as caught:
        ranks2.run(one_rank_fails)
    errors = [str(outcome.exception) for outcome in caught.value.outcomes]
    assert all("1 of 2 ranks could not do what the others can" in error for error in errors)
    assert "this is rank 1: out of handles" in errors[1]


def unequal(rank: int, world: int) -> Row:
    class Carrier(TorchCarrier):
        def prepare(self, *args: object) -> object:
            return lambda: time.sleep(0.1 if rank == 1 else 0.05)

    plan = Plan(operations=("broadcast",), sizes=(8,), dtypes=("fp32",), iterations=3, warmup=1)
    return next(measure(plan, [Carrier("gloo")], CPU, None))


def test_the_time_is_that_of_the_slowest_rank(ranks2: RankPool) -> None:
    first, last = ranks2.run(unequal)
    assert first == last
    assert 0.1 <= first.low < 0.15


def test_the_command(tmp_path: Path) -> None:
    """It starts its ranks itself, prints a table and writes the rows."""
    file = tmp_path / "rows.csv"
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "zeroshard",
            "bench",
            "--sizes",
            "1K,8K",
            "--dtypes",
            "fp32,int16",
            "-n",
            "2",
            "--backend",
            "gloo",
            "--iterations",
            "4",
            "--csv",
            str(file),
        ],
        env={name: value for name, value in os.environ.items() if name not in ours},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "2 rank(s) on cpu, gloo"
    assert lines[1].split()[:2] == ["operation", "carried"]
    with file.open(newline="") as found:
        rows = list(csv.DictReader(found))
    assert len(rows) == 2 * 2 * (6 + 4) == len(lines) - 4  # two lines above, two below
    for row in rows:
        if row["note"]:
            assert (row["carried_by"], row["dtype"]) == ("torch gloo", "int16")
            continue
        assert row["iterations"] == "4"
        algorithm = int(row["bytes"]) / float(row["median_seconds"]) / 1e9
        assert float(row["algbw_gb_per_s"]) == pytest.approx(algorithm)
        share = SHARES.get(row["operation"], 0.5)
        assert float(row["busbw_gb_per_s"]) == pytest.approx(algorithm * share)
    assert {row["operation"] for row in rows if not row["note"]} == set(OPERATIONS)
