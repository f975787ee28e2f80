"""The rank pool: results, errors, time-outs, restarts, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zeroshard.testing.ranks import RankPool, RunFailedError


def summed(rank: int, world: int, start: int, *, step: int = 1) -> tuple[int, int, float]:
    value = torch.tensor([float(start + rank * step)])
    dist.all_reduce(value)
    return rank, world, value.item()


def process_id(rank: int, world: int) -> int:
    return os.getpid()


def write_to_stdout(rank: int, world: int) -> None:
    os.write(1, b"from below Python\n")


def fail_on_one(rank: int, world: int) -> str:
    if rank == 1:
        raise ValueError("the reason is 42")
    dist.barrier()  # never completes: rank 1 is not here
    return "unreachable"


def hang_on_zero(rank: int, world: int) -> None:
    if rank == 0:
        sleep_forever()


def sleep_forever() -> None:
    time.sleep(1000)


def killed_on_one(rank: int, world: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def unpicklable(rank: int, world: int) -> object:
    return lambda: None


def test_results_come_back_in_rank_order_and_workers_are_reused(ranks2: RankPool) -> None:
    assert ranks2.run(summed, 10, step=5) == [(0, 2, 25.0), (1, 2, 25.0)]
    first = ranks2.run(process_id)
    assert first == ranks2.run(process_id) == ranks2.process_ids()
    assert os.getpid() not in first


def test_quiet_ranks_write_nothing_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with RankPool(1) as pool:
        pool.run(write_to_stdout)
    assert "from below Python" in capfd.readouterr().out
    with RankPool(1, quiet=True) as pool:
        pool.run(write_to_stdout)
    assert capfd.readouterr().out == ""


def test_an_exception_brings_its_traceback_and_releases_the_others(ranks2: RankPool) -> None:
    before = time.monotonic()
    with pytest.raises(RunFailedError, match=r"(?s)fail_on_one.*rank 1.*the reason is 42") as caught:
        ranks2.run(fail_on_one, grace=0.5)
    assert time.monotonic() - before < 30
    assert isinstance(caught.value.__cause__, ValueError)
    assert "fail_on_one" in (caught.value.outcomes[0].error or "")
    assert ranks2.run(summed, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_time_out_reports_the_stack(ranks2: RankPool) -> None:
    with pytest.raises(RunFailedError, match=r"(?s)rank 0: no answer within 0.5 s.*sleep_forever"):
        ranks2.run(hang_on_zero, timeout=0.5)
    assert ranks2.process_ids() == []


def test_a_killed_worker_is_named(ranks2: RankPool) -> None:
    with pytest.raises(RunFailedError, match=r"rank 1: the worker process .* ended with signal 9") as caught:
        ranks2.run(killed_on_one)
    assert caught.value.outcomes[0].value == "survived"


def test_a_closure_is_refused_with_the_cure(ranks2: RankPool) -> None:
    with pytest.raises(RunFailedError, match="top level of a module"):
        ranks2.run(lambda rank, world: None)
    with pytest.raises(RunFailedError, match="result cannot be pickled"):
        ranks2.run(unpicklable)


SCRIPT = """
import os, sys, time
from zeroshard.testing.ranks import RankPool

def work(rank, world):
    return os.getpid()

def stall(rank, world):
    if rank == 0:
        os.kill(os.getppid(), 2)
    time.sleep(100)

if __name__ == "__main__":
    pool = RankPool(2, quiet=True)
    print(*pool.run(work), flush=True)
    if sys.argv[1] == "die":
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "interrupt":
        pool.run(stall)
"""


@pytest.mark.parametrize("end", ["return", "die", "interrupt"])
def test_a_plain_script_leaves_no_process_behind(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), end], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == {"return": 0, "die": -9, "interrupt": -2}[end], done.stderr
    assert "rank-" not in done.stderr  # no worker printed anything
    children = [int(word) for word in done.stdout.split()]
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(_is_running(child) for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
