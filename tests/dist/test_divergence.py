"""Ranks that really diverge: nobody hangs, and every rank's error says who is where, and why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from zeroshard.comm.watch import EXIT_STATUS, debugs_collectives
from zeroshard.errors import CommError, ConfigError
from zeroshard.testing.ranks import RankPool

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Equal blocks: what one rank gathers for another block has the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, route: Any = (0, 1, 2, 3)) -> torch.Tensor:
        for index in route:
            x = self.blocks[index](x)
        return x


def start(stage: int = 3, **zero: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return zeroshard.initialize(model=Net(), config=config)[0]


def train(engine: Any, route: Any = (0, 1, 2, 3)) -> None:
    engine.backward(engine(torch.ones(2, WIDTH), route).square().mean())
    engine.step()


def called_thrice(engine: Any, rank: int) -> None:
    train(engine, (0, 1, 2, 3) if rank == 0 else (0, 1, 1, 1, 2, 3))


def fewer_batches(engine: Any, rank: int) -> None:
    for _ in range(3 if rank == 0 else 2):
        train(engine)
    if rank == 1:
        engine.close()


def frozen_on_one(engine: Any, rank: int) -> None:
    if rank == 1:
        engine.module.blocks[0].linear.requires_grad_(False)
    train(engine)


def gathered_on_one(engine: Any, rank: int) -> None:
    if rank == 0:
        with engine.gathered():
            torch.save(engine.module.state_dict(), os.devnull)
    train(engine)


def other_branch(engine: Any, rank: int) -> None:
    train(engine, (0, 1, 3) if rank == 0 else (0, 2, 3))


def shorter_generation(engine: Any, rank: int) -> None:
    engine.eval()
    with torch.no_grad():
        for _ in range(3 if rank == 0 else 6):
            engine(torch.ones(2, WIDTH))
    engine.train()
    train(engine)


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Variables of this process, for the length of a test."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def run(rank: int, world: int, case: Callable[..., None], shared: bool) -> tuple[str, float]:
    with environment(ZEROSHARD_DEBUG="collectives", ZEROSHARD_SHARED_MEMORY=str(int(shared))):
        engine = start(stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
        train(engine)
        began = time.monotonic()
        try:
            case(engine, rank)
        except CommError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began
        return "nothing was noticed", time.monotonic() - began


CASES = {
    called_thrice: ["'blocks.1' (blocks.1.linear.weight, blocks.1.linear.bias)", "on rank 1", "control flow"],
    fewer_batches: ["rank 1 left the loop earlier", "closes its engine", "same number of batches"],
    frozen_on_one: ["'blocks.0.linear.weight' and 1 more, frozen on rank 1 only"],
    gathered_on_one: ["only rank 0 called gathered()", "on every rank"],
    other_branch: ["of 'blocks.1'", "of 'blocks.2'", "first collective that differs", "control flow"],
    shorter_generation: ["without gradients was longer on rank 1", "engine.unwrap_for_generation()"],
}


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told(ranks2: RankPool, case: Callable[..., None], shared: bool) -> None:
    for rank, (error, seconds) in enumerate(ranks2.run(run, case, shared)):
        print(error)
        assert error.startswith(f"DivergedError: rank {rank} ")
        for text in [
            "rank 0: waits in",
            "rank 1: waits in",
            "test_divergence.py:",
            "last one that matched: ",
        ]:
            assert text in error
        for text in CASES[case]:
            assert text in error, text
        assert seconds < 20  # one to two on an idle machine


def generation(rank: int, world: int) -> list[float]:
    """Different lengths inside `unwrap_for_generation`, then training as if nothing had been."""
    with environment(ZEROSHARD_DEBUG="collectives"):
        engine = start()
        train(engine)
        with torch.no_grad(), engine.unwrap_for_generation() as whole:
            for _ in range(3 if rank == 0 else 6):
                whole(torch.ones(2, WIDTH))
        train(engine)
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(2, WIDTH)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.close()
    return losses


def test_unequal_generation_gathered_once(ranks2: RankPool) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(4):
        loss = model(torch.ones(2, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for losses in ranks2.run(generation):
        assert losses == pytest.approx(expected[2:], rel=1e-6)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def slow(rank: int, world: int) -> list[str]:
    """Rank 1 computes for twice as long as the limit: no divergence, but something to know."""
    lines = Lines()
    logging.getLogger("zeroshard").addHandler(lines)
    try:
        with environment(ZEROSHARD_DEBUG="collectives", ZEROSHARD_DEBUG_TIMEOUT="1"):
            engine = start()
            train(engine)
            dist.barrier()
            if rank == 1:
                time.sleep(3.0)
            train(engine)
            engine.close()
    finally:
        logging.getLogger("zeroshard").removeHandler(lines)
    return lines.lines


def test_a_slow_rank_is_named_and_waited_for(ranks2: RankPool) -> None:
    for line in ranks2.run(slow)[0]:
        if "in slow" in line:
            assert "rank 0 waits for all_gather of 'blocks.0'" in line
            assert "rank 1 is slow, at " in line
            return
    pytest.fail("nothing was said")


def compared(rank: int, world: int) -> str:
    """Without ZEROSHARD_DEBUG: shared memory compares what collectives are about on its own."""
    engine = start(stage3_max_reuse_distance=0)
    train(engine)
    try:
        other_branch(engine, rank)
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def test_equal_sizes_are_not_mixed_up(ranks2: RankPool) -> None:
    for error in ranks2.run(compared):
        assert error.startswith("DivergedError: all_gather of ")
        assert "for other parameters instead" in error
        assert "rank 0 launched all_gather of 'blocks.1'" in error
        assert "rank 1 launched all_gather of 'blocks.2'" in error


def unequal_debug(rank: int, world: int) -> None:
    with (
        environment(ZEROSHARD_DEBUG="collectives" if rank == 0 else "0"),
        pytest.raises(CommError, match=r"ZEROSHARD_DEBUG=collectives is set on ranks \[0\] of \[0, 1\] only"),
    ):
        start()


def test_debugging_on_one_rank_only(ranks2: RankPool) -> None:
    ranks2.run(unequal_debug)


def test_an_unknown_kind_of_debugging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROSHARD_DEBUG", "colectives")
    with pytest.raises(
        ConfigError, match=r"ZEROSHARD_DEBUG='colectives' in the environment is not known.*collectives"
    ):
        debugs_collectives()
    monkeypatch.setenv("ZEROSHARD_DEBUG", "collectives")
    monkeypatch.setenv("ZEROSHARD_DEBUG_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="ZEROSHARD_DEBUG_TIMEOUT='soon' must be a number of seconds"):
        debugs_collectives()


LIMIT = 3.0


def waits(engine: Any, rank: int) -> None:
    if rank == 1:
        time.sleep(2 * LIMIT)
    train(engine)


def one_forward_more(engine: Any, rank: int) -> None:
    engine(torch.ones(2, WIDTH)).square().mean().backward()
    if rank == 0:
        engine(torch.ones(2, WIDTH))
    engine.optimizer.step()


def late(rank: int, world: int, case: Callable[..., None], shared: bool) -> tuple[str, float]:
    """Without ZEROSHARD_DEBUG, in a group whose time-out is short."""
    with environment(ZEROSHARD_SHARED_MEMORY=str(int(shared))), pytest.MonkeyPatch.context() as patch:
        train(start())  # what is imported now does not count
        patch.setattr("zeroshard.comm.choose._timeout_of", lambda *_: LIMIT)
        engine = start()
        train(engine)
        began = time.monotonic()
        try:
            case(engine, rank)
        except CommError as error:
            return str(error), time.monotonic() - began
        return "", time.monotonic() - began


LATE: dict[Callable[..., None], tuple[tuple[int, ...], list[str]]] = {
    # who times out, and what it says
    waits: ((0,), ["rank 1: in no collective, at ", "in waits", "rank 1 is slower", "longer time-out"]),
    one_forward_more: (
        (0, 1),
        ["rank 1: waits in step for sum_to_host", "'blocks.0' (blocks.0.linear.weight"],
    ),
}


@pytest.mark.parametrize(
    ("case", "shared"),
    [
        (one_forward_more, True),
        pytest.param(one_forward_more, False, marks=pytest.mark.slow),
        pytest.param(waits, True, marks=pytest.mark.slow),
        (waits, False),
    ],
)
def test_the_time_out_tells_without_debugging(case: Callable[..., None], shared: bool) -> None:
    ranks, texts = LATE[case]
    with RankPool(2) as pool:  # what gloo gave up would disturb later tests
        outcomes = pool.run(late, case, shared)
    for rank in ranks:
        error, seconds = outcomes[rank]
        for text in ["rank 0: waits in forward for all_gather of 'blocks.0'", *texts]:
            assert text in error
        assert LIMIT - 0.5 < seconds < LIMIT + 20


SCRIPT = """
import torch
import zeroshard

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(16 + i, 17 + i) for i in range(3)])
config = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
engine, *_ = zeroshard.initialize(model=model, config=config)
rank = torch.distributed.get_rank()
for batch in range(3 if rank == 0 else 2):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
print("finished", rank, flush=True)
"""


@pytest.mark.parametrize(
    ("shared", "debug"),
    [
        ("1", "0"),
        pytest.param("1", "collectives", marks=pytest.mark.slow),
        pytest.param("0", "0", marks=pytest.mark.slow),
        ("0", "collectives"),
    ],
)
def test_a_rank_that_has_finished(tmp_path: Path, shared: str, debug: str) -> None:
    """A whole run: it ends by itself, with a status, and says who left."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", str(script)],
        env={
            **os.environ,
            "ZEROSHARD_SHARED_MEMORY": shared,
            "ZEROSHARD_DEBUG": debug,
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.split() == ["finished", "1"]
    assert "rank 0: waits in forward for all_gather of '0' (0.weight, 0.bias)" in done.stderr
    assert "at train.py:14 in <module>" in done.stderr
    assert "rank 1: its script has finished" in done.stderr
    assert "rank 1 left the loop earlier, as with fewer batches" in done.stderr


BEYOND_REACH = """
import time
from zeroshard.comm.record import GroupRecord
from zeroshard.comm.watch import Watch
import torch

record = GroupRecord("1.1", [0, 1], 0.2)
watch = Watch(None, 0, 2)
watch.add(record)
with record.waiting_for(record.note("all_gather", "'layer'", 8, torch.float32)):
    time.sleep(60)
"""


def test_a_wait_that_nothing_ends_is_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEYOND_REACH], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == EXIT_STATUS
    assert "rank 0 has waited" in done.stderr
    assert "past the time-out of its group" in done.stderr
    assert "rank 0: waits for all_gather of 'layer' (number 0), at <string>:11 in <module>" in done.stderr
    assert "rank 1: no answer" in done.stderr
