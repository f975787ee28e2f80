"""Collectives between processes: torch and shared memory give what a plain sum gives, and fail by name."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import (
    Collectives,
    RecordingCollectives,
    SharedMemoryCollectives,
    TorchCollectives,
    open_collectives,
)
from zeroshard.comm.exchange import Transfer
from zeroshard.comm.peers import REACTOR
from zeroshard.errors import CommError, RankLostError
from zeroshard.testing.ranks import RankPool, RunFailedError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
SHARDS = [0, 1, 7, 1023, 5_000, 100_003]


def opened(kind: str) -> Collectives:
    assert dist.group.WORLD is not None
    if kind == "torch":
        seam: Collectives = TorchCollectives(dist.group.WORLD)
        assert isinstance(seam, Collectives)
        return seam
    seam = open_collectives(None, CPU)
    assert isinstance(seam, RecordingCollectives)
    assert isinstance(seam.inner, SharedMemoryCollectives)
    assert isinstance(seam.inner, Collectives)
    return seam


def data_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    return torch.randint(0, 50, (numel,), generator=generator).to(dtype)


def block_like(seam: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    return seam.empty(tensor.numel(), dtype=tensor.dtype, device=CPU).copy_(tensor)


def reduced(tensors: list[torch.Tensor], average: bool) -> torch.Tensor:
    dtype = tensors[0].dtype
    floating = dtype.is_floating_point
    total = torch.stack([t.to(torch.float64 if floating else dtype) for t in tensors]).sum(0, dtype=None)
    total = total if floating else total.to(dtype)
    if average:
        total = total.div(len(tensors), rounding_mode=None if floating else "trunc")
    return total.to(dtype)


def check_verbs(rank: int, world: int, kind: str) -> int:
    seam = opened(kind)
    checks = 0
    for dtype in DTYPES:
        for k in SHARDS if kind == "shared memory" else (7, 100_003):  # gloo has one path for all sizes
            fulls = [data_of(r, world * k, dtype) for r in range(world)]
            own = slice(rank * k, (rank + 1) * k)
            gathered = torch.cat([fulls[r][r * k : (r + 1) * k] for r in range(world)])
            for block in (False, True) if kind == "shared memory" else (False,):
                start = block_like(seam, fulls[rank]) if block else fulls[rank].clone()
                for in_place in (False, True):
                    full = start.clone() if not block else block_like(seam, start)
                    shard = full[own] if in_place else full[own].clone()
                    seam.all_gather(full, shard).wait()
                    assert torch.equal(full, gathered), (dtype, k, block, in_place)
                    for average in (False, True):
                        full.copy_(start)
                        shard = full[own] if in_place else torch.empty(k, dtype=dtype)
                        seam.reduce_scatter(shard, full, average=average).wait()
                        wanted = reduced([f[own] for f in fulls], average)
                        torch.testing.assert_close(shard, wanted, msg=str((dtype, k, average)))
                        checks += 1
                for average in (False, True):
                    full = block_like(seam, start)
                    seam.all_reduce(full, average=average).wait()
                    torch.testing.assert_close(full, reduced(fulls, average), msg=str((dtype, k, average)))
                for source in (0, world - 1):
                    full = block_like(seam, start)
                    seam.broadcast(full, source)
                    assert torch.equal(full, fulls[source])
    host = seam.sum_to_host(torch.tensor([1.0, rank, 0.5], dtype=torch.float64))
    assert host == [world, world * (world - 1) / 2, world / 2]
    for odd in (torch.float8_e4m3fn, torch.bool):
        tensor = torch.full((300,), float(rank == 1)).to(odd)
        seam.broadcast(tensor, 1)
        full = torch.zeros(300 * world, dtype=odd)
        seam.all_gather(full, tensor).wait()
        assert full.float().sum() == 300 * world
        with pytest.raises(CommError, match="all_reduce"):
            seam.all_reduce(tensor, average=False).wait()
    seam.close()
    seam.close()
    return checks


@pytest.mark.parametrize("kind", ["torch", "shared memory"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_verb_is_right(request: pytest.FixtureRequest, kind: str, ranks: int) -> None:
    pool: RankPool = request.getfixturevalue(f"ranks{ranks}")
    assert len(set(pool.run(check_verbs, kind))) == 1


def exact_bits(rank: int, world: int) -> list[tuple[bytes, ...]]:
    seam = opened("shared memory")
    answers = []
    for numel in (1_000, 300_000):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        for dtype in (torch.float32, torch.bfloat16):
            runs = []
            for block in (False, True, False):
                tensor = block_like(seam, x.to(dtype)) if block else x.to(dtype)
                seam.all_reduce(tensor, average=True).wait()
                runs.append(tensor.view(torch.uint8).numpy().tobytes())
            answers.append(tuple(runs))
    seam.close()
    return answers


def test_all_ranks_and_repeats_get_the_same_bits(ranks3: RankPool) -> None:
    for answers in zip(*ranks3.run(exact_bits), strict=True):
        assert len({bits for runs in answers for bits in runs}) == 1


def shuffled_waits(rank: int, world: int, kind: str) -> None:
    """Many in flight on two groups, waited in an order of each rank's own."""
    first, second = opened(kind), opened(kind)
    order = random.Random(rank)
    for _ in range(3):
        works = []
        for index in range(12):
            seam = (first, second)[index % 2]
            tensor = torch.full(((1, 3_000, 60_000)[index % 3],), float(index + rank))
            if index % 4 >= 2:
                tensor = block_like(seam, tensor)
            works.append((seam.all_reduce(tensor, average=False), tensor, index))
        if kind == "shared memory":  # gloo progresses by itself in any order as well, but slowly
            order.shuffle(works)
        for work, tensor, index in works:
            work.wait()
            work.wait()
            assert torch.equal(tensor, torch.full_like(tensor, world * index + world * (world - 1) / 2))
    first.close()
    second.close()


@pytest.mark.parametrize("kind", ["torch", "shared memory"])
def test_waits_in_any_order_on_two_groups(ranks3: RankPool, kind: str) -> None:
    ranks3.run(shuffled_waits, kind)


_read_at_once = Transfer.input_of


def read_slowly(work: Transfer, rank: int, start: int, count: int) -> torch.Tensor:
    time.sleep(0.1)
    return _read_at_once(work, rank, start, count)


def overwrite_at_once(rank: int, world: int, block: bool, verb: str) -> None:
    """Rank 1 reads late; rank 0 overwrites its input as soon as it may. Rank 1 must not see that."""
    seam = opened("shared memory")
    k = 100_000
    for turn in range(3):
        full = torch.full((world * k,), float(rank + turn))
        full = block_like(seam, full) if block else full
        shard = full[rank * k : (rank + 1) * k]
        if verb == "all_gather":
            out = torch.empty(world * k)
            work = seam.all_gather(out, shard)
        elif verb == "reduce_scatter":
            out = torch.empty(k)
            work = seam.reduce_scatter(out, full, average=False)
        else:
            out = full
            work = seam.all_reduce(full, average=False)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                time.sleep(0.1)
                patch.setattr("zeroshard.comm.exchange.Transfer.input_of", read_slowly)
            work.wait()
        result = out.clone()
        full.fill_(-1000.0)
        total = world * turn + world * (world - 1) / 2
        if verb == "all_gather":
            wanted = torch.arange(world).repeat_interleave(k) + float(turn)
        else:
            wanted = torch.full_like(result, total)
        assert torch.equal(result, wanted)
    seam.close()


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("block", [False, True])
def test_input_may_be_overwritten_after_wait(ranks2: RankPool, block: bool, verb: str) -> None:
    ranks2.run(overwrite_at_once, block, verb)


def flood(rank: int, world: int) -> int:
    """More messages than a socket buffer holds, launched by rank 0 long before rank 1 reads any."""
    seam = opened("shared memory")
    tensors = [torch.full((500,), float(i)) for i in range(3_000)]
    if rank == 1:
        time.sleep(0.5)
    works = [seam.all_reduce(tensor, average=True) for tensor in tensors]
    if rank == 0:
        time.sleep(0.5)  # away computing: its unsent rest must reach rank 1 all the same
    for work in reversed(works):
        work.wait()
    assert all(tensor[0] == i for i, tensor in enumerate(tensors))
    mapped = seam.inner.exchange.pool.mapped_bytes  # type: ignore[attr-defined]
    big = torch.ones(200_000)
    for _ in range(50):
        seam.all_reduce(big, average=True).wait()
    assert seam.inner.exchange.pool.mapped_bytes <= mapped + 4 * (1 << 20)  # type: ignore[attr-defined]
    seam.close()
    return len(seam.inner.exchange.inboxes) + len(seam.inner.exchange.works)  # type: ignore[attr-defined]


def test_a_flood_neither_deadlocks_nor_leaks(ranks2: RankPool) -> None:
    assert ranks2.run(flood) == [0, 0]


def from_threads(rank: int, world: int) -> None:
    """Groups used by a thread each, as the autograd thread does."""
    seams = [opened("shared memory") for _ in range(2)]
    failures: list[BaseException] = []

    def work(seam: Collectives) -> None:
        try:
            for i in range(200):
                tensor = torch.full((20_000,), float(i))
                seam.all_reduce(tensor, average=True).wait()
                assert tensor[-1] == i
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seam,)) for seam in seams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for seam in seams:
        seam.close()


def test_groups_in_threads(ranks2: RankPool) -> None:
    ranks2.run(from_threads)


def versions_and_fork(rank: int, world: int) -> int:
    """Verbs are no edits to autograd; a forked child (a data loader's) holds no connection of its rank."""
    gc.collect()
    before = len(REACTOR._peers)  # of groups that other tests left open
    for kind in ("torch", "shared memory"):
        seam = opened(kind)
        k = 40_000
        full = torch.zeros(world * k)
        own = full[rank * k : (rank + 1) * k]
        seam.all_gather(full, own).wait()
        seam.reduce_scatter(own, full, average=True).wait()
        seam.all_reduce(full, average=True).wait()
        seam.broadcast(full, 0)
        assert full._version == 0
    child = os.fork()
    if child == 0:
        os._exit(len(REACTOR._peers))
    seam.all_reduce(full, average=True).wait()
    del seam  # without close
    gc.collect()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + len(REACTOR._peers) - before


def test_version_counters_and_forks(ranks2: RankPool) -> None:
    assert ranks2.run(versions_and_fork) == [0, 0]


def lose_one(rank: int, world: int, numel: int, block: bool) -> tuple[str, str, float]:
    seam = opened("shared memory")
    tensor = seam.empty(numel, dtype=torch.float32, device=CPU) if block else torch.ones(numel)
    seam.all_reduce(tensor, average=True).wait()
    if rank == 1:
        seam.all_reduce(tensor, average=True)
        os.kill(os.getpid(), signal.SIGKILL)
    before = time.monotonic()
    try:
        for _ in range(10):
            seam.all_reduce(tensor, average=True).wait()
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - before
    return "nothing", "", 0.0


@pytest.mark.parametrize(("numel", "block"), [(10, False), (1_000_000, True)])
def test_a_killed_rank_is_named_by_the_survivors(ranks3: RankPool, numel: int, block: bool) -> None:
    with pytest.raises(RunFailedError) as caught:
        ranks3.run(lose_one, numel, block, grace=10.0)
    for survivor in (0, 2):
        name, text, seconds = caught.value.outcomes[survivor].value
        assert name == RankLostError.__name__
        # The other survivor may have given up, and gone, before this one looked.
        assert "global rank 1 closed" in text or "global ranks [" in text
        assert "all_reduce" in text
        assert seconds < 5


def lose_one_over_torch(rank: int, world: int) -> str:
    seam = opened("torch")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        seam.all_reduce(torch.ones(10), average=True).wait()
    except CommError as error:
        return str(error)
    return "nothing"


def test_torch_says_that_a_peer_is_gone(ranks2: RankPool) -> None:
    with pytest.raises(RunFailedError) as caught:
        ranks2.run(lose_one_over_torch, grace=10.0)
    assert "all_reduce on global rank 0 of the group of global ranks [0, 1]" in caught.value.outcomes[0].value


def misuse(rank: int, world: int) -> list[str]:
    seam = opened("shared memory")
    assert isinstance(seam, RecordingCollectives)
    assert isinstance(seam.inner, SharedMemoryCollectives)
    texts = []
    work = seam.all_reduce(torch.ones(8 + rank), average=False)
    with pytest.raises(CommError) as caught:
        work.wait()
    texts.append(str(caught.value))
    seam.inner.exchange.timeout = seam.record.timeout = 0.3
    if rank == 0:
        with pytest.raises(CommError) as caught:
            seam.all_gather(torch.ones(world), torch.ones(1)).wait()
        texts.append(str(caught.value))
    return texts


def test_different_collectives_and_silence_are_errors(ranks2: RankPool) -> None:
    first, second = ranks2.run(misuse)
    assert "rank 1 launched all_reduce of 9 torch.float32 instead" in first[0]
    assert "rank 0 launched all_reduce of 8 torch.float32 instead" in second[0]
    assert "waited 0.3 s for the launch by global ranks [1]" in first[1]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


def fall_back(rank: int, world: int, cause: str) -> tuple[str, list[tuple[int, str]]]:
    lines = _Lines()
    logging.getLogger("zeroshard").addHandler(lines)
    with pytest.MonkeyPatch.context() as patch:
        if cause == "no room" and rank == 1:

            def refuse(*args: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "posix_fallocate", refuse)
        if cause == "environment" and rank == 1:
            patch.setenv("ZEROSHARD_SHARED_MEMORY", "0")
        if cause == "two hosts":
            patch.setattr("zeroshard.comm.rendezvous.host_fingerprint", lambda: (str(rank),))
        seam = open_collectives(None, CPU)
    tensor = torch.ones(3)
    seam.all_reduce(tensor, average=False).wait()
    assert tensor.tolist() == [world] * 3
    seam.close()
    logging.getLogger("zeroshard").removeHandler(lines)
    assert isinstance(seam, RecordingCollectives)
    return type(seam.inner).__name__, lines.lines


@pytest.mark.parametrize("cause", ["no room", "environment", "two hosts"])
def test_all_ranks_fall_back_together(ranks2: RankPool, cause: str) -> None:
    first, second = ranks2.run(fall_back, cause)
    assert first[0] == second[0] == "TorchCollectives"
    assert second[1] == []
    if cause == "no room":
        [(level, text)] = first[1]
        assert level == logging.WARNING
        assert "rank 1" in text
        assert "No space left" in text
    else:
        assert first[1] == []


def subgroups(rank: int, world: int) -> list[str]:
    """Two groups of two of four ranks: the seam speaks group ranks, its errors global ones."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    kinds = []
    for seam in (open_collectives(mine, CPU), TorchCollectives(mine)):
        assert (seam.rank, seam.size) == (rank // 2, 2)
        for numel in (4, 100_000):
            tensor = torch.full((numel,), float(rank))
            seam.broadcast(tensor, 1)
            assert tensor[0] == rank % 2 + 2
            seam.all_reduce(tensor.fill_(rank), average=True).wait()
            assert tensor[-1] == rank % 2 + 1
        kinds.append(type(seam.inner if isinstance(seam, RecordingCollectives) else seam).__name__)
        seam.close()
    with pytest.raises(CommError, match="not in the group"):
        TorchCollectives(pairs[1 - rank % 2])
    return kinds


def test_subgroups(ranks4: RankPool) -> None:
    assert ranks4.run(subgroups) == [["SharedMemoryCollectives", "TorchCollectives"]] * 4


CRASH = """
import os, sys, time, torch
from zeroshard.comm import open_collectives
from zeroshard.testing.ranks import RankPool

def work(rank, world):
    seam = open_collectives(None, torch.device("cpu"))
    x = seam.empty(1_000_000, dtype=torch.float32, device=torch.device("cpu"))
    seam.all_reduce(x, average=True)
    if rank == 0:
        time.sleep(0.5)
    os.kill(os.getpid(), 9)

if __name__ == "__main__":
    try:
        RankPool(2, quiet=True).run(work)
    except Exception as error:
        print(str(error).count("signal 9"))
"""


def shared_files() -> set[str]:
    """Without semaphores, which are those of other programs: none is made here."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def test_nothing_is_left_behind_when_all_are_killed(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH)
    before = shared_files()
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=True
    )
    assert done.stdout.split() == ["2"], done.stderr
    assert shared_files() <= before
