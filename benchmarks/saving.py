"""What saving and loading a checkpoint costs: bytes per second, memory, and how long training waits.

    python benchmarks/saving.py                      1 GB of state on 2 ranks, loaded on 2 and on 3; minutes
    python benchmarks/saving.py --gigabytes 0.05
    python benchmarks/saving.py --directory /data    where to write (default: a temporary directory)

The state is fp32 masters and two Adam moments. `write + fsync` is one process that writes as many bytes from
memory, in one go; `torch.save` is each rank writing its own part of that state, which only the same ranks can read.
Every figure is the best of the rounds. Memory is as in loading.py, the most above what was there before, in a round
of its own. Bytes read are what the ranks asked the kernel for.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loading import MB, Peak
from torch import nn

import zeroshard
from zeroshard.testing import RankPool

WIDTH = 1024


def build(gigabytes: float, background: bool = False) -> Any:
    layers = max(round(gigabytes * 1e9 / 12 / (WIDTH * WIDTH)), 1)
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {}},
        "checkpoint": {"async": background},
    }
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    engine = zeroshard.initialize(model=model, config=config)[0]
    step(engine)
    return engine


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()


def timed(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def state_bytes(engine: Any) -> int:
    """Of this rank."""
    states = engine.optimizer.state.values()
    moments = sum(value.nbytes for state in states for value in state.values() if value.dim())
    return moments + sum(buffer.owned.nbytes for buffer in engine._states.buffers)


def save_with_torch(engine: Any, path: Path) -> None:
    parts = {name: buffer.owned for name, buffer in zip(range(999), engine._states.buffers, strict=False)}
    with open(path, "wb") as file:
        torch.save({"masters": parts, "optimizer": list(engine.optimizer.state.values())}, file)
        file.flush()
        os.fsync(file.fileno())


def saves(rank: int, world: int, gigabytes: float, rounds: int, where: str) -> dict[str, Any]:
    """Seconds by way, this rank's bytes, the memory of a save."""
    engine = build(gigabytes)
    found: dict[str, list[float]] = {"zeroshard": [], "torch.save": []}
    for number in range(rounds):
        drop(engine, where, f"plain{number - 1}")
        tag = f"plain{number}"
        found["zeroshard"].append(timed(lambda tag=tag: engine.save_checkpoint(where, tag=tag)))
    path = Path(where) / f"torch_{rank}.pt"
    for _ in range(rounds):
        drop(engine, where, "none")
        found["torch.save"].append(timed(lambda: save_with_torch(engine, path)))
        path.unlink()
    drop(engine, where, tag)
    peak = Peak()  # which takes time itself
    engine.save_checkpoint(where)
    memory = peak.finish()[0]
    nbytes = state_bytes(engine)
    engine.close()
    engine = build(gigabytes, background=True)
    blocked, whole = [], []
    for number in range(rounds):
        drop(engine, where, f"async{number - 1}")
        begin, tag = time.perf_counter(), f"async{number}"
        blocked.append(timed(lambda tag=tag: engine.save_checkpoint(where, tag=tag, save_latest=False)))
        engine._saver.wait()
        whole.append(time.perf_counter() - begin)
    drop(engine, where, tag)
    engine.close()
    return {**found, "blocked": blocked, "async": whole, "bytes": nbytes, "memory": memory}


def deepspeed_saves(rank: int, world: int, gigabytes: float, rounds: int, where: str) -> list[float]:
    """Seconds of DeepSpeed's save of the same model at stage 3, which does not wait for the disk."""
    import deepspeed
    import torch.distributed as dist

    layers = max(round(gigabytes * 1e9 / 12 / (WIDTH * WIDTH)), 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.Adam(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[
        0
    ]
    step(engine)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        seconds.append(timed(lambda: engine.save_checkpoint(where, tag="deepspeed")))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(where) / "deepspeed")
            os.sync()
    return seconds


def drop(engine: Any, where: str, tag: str) -> None:
    """Away with the previous round's, so that no save has it to replace; the ranks go on together."""
    if engine._states.rank == 0:
        shutil.rmtree(Path(where) / tag, ignore_errors=True)
        os.sync()
    engine._states.sum([0.0])


def loads(rank: int, world: int, gigabytes: float, where: str) -> tuple[float, int, int]:
    """(seconds, memory, bytes read)."""
    engine = build(gigabytes)
    seconds, before = [], 0
    for _ in range(3):
        before = bytes_read()
        seconds.append(timed(lambda: engine.load_checkpoint(where)))
    read = bytes_read() - before
    peak = Peak()
    engine.load_checkpoint(where)
    memory = peak.finish()[0]
    engine.close()
    return min(seconds), memory, read


def bytes_read() -> int:
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))


def plain_write(nbytes: int, path: Path) -> float:
    data = memoryview(bytearray(os.urandom(1 << 20) * (nbytes // (1 << 20))))

    def write() -> None:
        with open(path, "wb", buffering=0) as file:
            at = 0
            while at < len(data):
                at += file.write(data[at:])
            os.fsync(file.fileno())

    seconds = timed(write)
    path.unlink()
    return seconds * nbytes / len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--directory", help="where to write")
    arguments = parser.parse_args()
    where = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        with RankPool(2) as pool:
            found = pool.run(saves, arguments.gigabytes, arguments.rounds, str(where), timeout=900.0)
        total = sum(rank["bytes"] for rank in found)
        plain = min(plain_write(total, where / "file") for _ in range(arguments.rounds))
        best = {
            way: max(min(rank[way]) for rank in found)
            for way in ("zeroshard", "torch.save", "blocked", "async")
        }
        print(f"{total / 1e9:.2f} GB of state on 2 ranks, best of {arguments.rounds} rounds\n")
        print("| save | seconds | MB/s | of write + fsync |\n| --- | ---: | ---: | ---: |")
        rows = {
            "write + fsync": plain,
            "save_checkpoint": best["zeroshard"],
            "torch.save + fsync": best["torch.save"],
        }
        rows["save_checkpoint, async: until written"] = best["async"]
        for name, seconds in rows.items():
            print(f"| {name} | {seconds:.2f} | {total / 1e6 / seconds:.0f} | {plain / seconds:.2f} |")
        if importlib.util.find_spec("deepspeed") is not None:
            with RankPool(2) as pool:
                theirs = pool.run(
                    deepspeed_saves, arguments.gigabytes, arguments.rounds, str(where / "ds"), timeout=900.0
                )
            seconds = max(map(min, theirs))
            print(
                f"| DeepSpeed, no fsync | {seconds:.2f} | {total / 1e6 / seconds:.0f} | {plain / seconds:.2f} |"
            )
        share = best["blocked"] / best["zeroshard"]
        print(f"| save_checkpoint, async: training waits | {best['blocked']:.3f} | | {share:.0%} of a save |")
        print(f"\nmemory of a save: {max(rank['memory'] for rank in found) / MB:.0f} MB per rank\n")
        print("| load on | seconds | MB per rank above | bytes read / state |\n| ---: | ---: | ---: | ---: |")
        for world in (2, 3):
            with RankPool(world) as pool:
                ranks = pool.run(loads, arguments.gigabytes, str(where), timeout=900.0)
            seconds, memory, _ = map(max, zip(*ranks, strict=True))
            read = sum(rank[2] for rank in ranks) / total
            print(f"| {world} | {seconds:.2f} | {memory / MB:.0f} | {read:.2f} |", flush=True)
    finally:
        shutil.rmtree(where)


if __name__ == "__main__":
    main()
