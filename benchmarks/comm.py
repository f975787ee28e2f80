"""Milliseconds per collective: gloo against shared memory, 2 ranks of one host, one torch thread each.

    python benchmarks/comm.py [--ranks 2] [--sizes 65536 1048576 ...]

Per size and verb the two are measured in turns within one run, so that both see the same machine; the figure
is the median round. `copied` sends ordinary memory, `zero-copy` memory of `Collectives.empty`. `full` has
the given number of bytes, fp32; the shard is the own slice of it. gloo's reduce_scatter is already the faster
way that `TorchCollectives` takes (an all_reduce).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zeroshard.comm import Collectives, TorchCollectives, open_collectives
from zeroshard.testing.ranks import RankPool

SIZES = [64, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
ROUNDS = 7


def verbs_of(seam: Collectives, full: torch.Tensor, shard: torch.Tensor) -> dict[str, Callable[[], None]]:
    return {
        "all_gather": lambda: seam.all_gather(full, shard).wait(),
        "reduce_scatter": lambda: seam.reduce_scatter(shard, full, average=True).wait(),
        "all_reduce": lambda: seam.all_reduce(full, average=True).wait(),
    }


def milliseconds(action: Callable[[], None], repeat: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        action()
    return (time.perf_counter() - start) / repeat * 1e3


def measure(rank: int, world: int, sizes: list[int]) -> list[tuple[int, str, dict[str, float]]]:
    device = torch.device("cpu")
    assert dist.group.WORLD is not None
    gloo = TorchCollectives(dist.group.WORLD)
    shared = open_collectives(None, device)
    rows = []
    for nbytes in sizes:
        numel = nbytes // 4
        ways: dict[str, dict[str, Callable[[], None]]] = {}
        for name, seam, source in (
            ("gloo", gloo, gloo),
            ("copied", shared, gloo),
            ("zero-copy", shared, shared),
        ):
            full = source.empty(numel, dtype=torch.float32, device=device).zero_()
            k = numel // world
            shard = full[rank * k : (rank + 1) * k]
            ways[name] = verbs_of(seam, full, shard)
        repeat = max(1, min(200, (4 << 20) // nbytes))
        for verb in ways["gloo"]:
            rounds: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(ROUNDS + 1):
                for name in ways:
                    spent = milliseconds(ways[name][verb], repeat)
                    if turn:  # the first turn maps memory
                        rounds[name].append(spent)
            rows.append((nbytes, verb, {name: statistics.median(each) for name, each in rounds.items()}))
    shared.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of full")
    arguments = parser.parse_args()
    with RankPool(arguments.ranks) as pool:
        rows = pool.run(measure, arguments.sizes, timeout=600)[0]
    head = ("bytes", "verb", "gloo ms", "copied ms", "zero-copy ms", "gloo/copied")
    print("{:>12} {:>15} {:>10} {:>10} {:>12} {:>12}".format(*head))
    for nbytes, verb, ms in rows:
        print(
            f"{nbytes:>12} {verb:>15} {ms['gloo']:>10.3f} {ms['copied']:>10.3f} {ms['zero-copy']:>12.3f} "
            f"{ms['gloo'] / ms['copied']:>12.1f}"
        )


if __name__ == "__main__":
    main()
