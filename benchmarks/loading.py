"""Memory of building and loading a model that is sharded in the end, per rank, for several ways to get there.

    python benchmarks/loading.py                 1 GB of fp32 weights on 2 and on 4 ranks; a few minutes
    python benchmarks/loading.py --gigabytes 0.01 --ranks 2
    python benchmarks/loading.py --demo          the demo's model of 135 M parameters, built with random weights

The model is a Llama of transformers; its file is made in a temporary directory, which goes afterwards. Figures
are of `Pss_Anon + Pss_Shmem` (/proc/self/smaps_rollup, every 20 ms), above what the process had after
its imports: memory that the rank has for itself, and its part of memory that ranks share. VmHWM would count pages
of the mapped weight file, which the kernel may drop at any time and which ranks share, and would count the shared
memory of a rank for each rank that has it mapped; it is shown as well.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zeroshard.testing import RankPool

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
MB = 1 << 20


class Peak:
    """Samples this process's memory in a thread of its own."""

    def __init__(self) -> None:
        gc.collect()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # VmHWM starts anew
        self._base, self._base_high = own_bytes(), high_water_mark()
        self._most = self._base
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self._most = max(self._most, own_bytes())

    def finish(self) -> tuple[int, int, int]:
        """(most, at the end, VmHWM), in bytes above the start."""
        gc.collect()
        end = own_bytes()
        self._stop.set()
        self._thread.join()
        return max(self._most, end) - self._base, end - self._base, high_water_mark() - self._base_high


def own_bytes() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(
            int(line.split()[1]) * 1024 for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
        )


def high_water_mark() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def shape_of(gigabytes: float) -> Any:
    """A Llama with about that many bytes of fp32 weights."""
    from transformers import LlamaConfig

    width = 1024 if gigabytes >= 0.2 else 64
    block = 4 * width * width + 3 * width * (11 * width // 4)
    vocabulary = 8 * width
    layers = max(round((gigabytes * 1e9 / 4 - vocabulary * width) / block), 1)
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )


def demo_shape() -> Any:
    """SmolLM2-135M's."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def auto() -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM


def initialize(model: Any) -> Any:
    import zeroshard

    return zeroshard.initialize(model=model, config=CONFIG)[0]


def plain_random(path: str, shape: Any) -> Any:
    return initialize(auto().from_config(shape))


def plain_then_initialize(path: str, shape: Any) -> Any:
    return initialize(auto().from_pretrained(path))


def init_from_pretrained(path: str, shape: Any) -> Any:
    import zeroshard

    with zeroshard.Init():
        model = auto().from_pretrained(path)
    return initialize(model)


def init_load(path: str, shape: Any) -> Any:
    import zeroshard

    with zeroshard.Init():
        model = auto().from_config(shape)
    zeroshard.load_pretrained(model, path)
    return initialize(model)


def init_initialize_load(path: str, shape: Any) -> Any:
    import zeroshard

    with zeroshard.Init():
        model = auto().from_config(shape)
    engine = initialize(model)
    zeroshard.load_pretrained(engine, path)
    return engine


def init_random(path: str, shape: Any) -> Any:
    import zeroshard

    with zeroshard.Init():
        model = auto().from_config(shape)
    return initialize(model)


LOADING: dict[str, Callable[[str, Any], Any]] = {
    "from_config, initialize": plain_random,
    "from_pretrained, initialize": plain_then_initialize,
    "Init: from_pretrained, initialize": init_from_pretrained,
    "Init: from_config; load_pretrained(model), initialize": init_load,
    "Init: from_config; initialize, load_pretrained(engine)": init_initialize_load,
}
BUILDING: dict[str, Callable[[str, Any], Any]] = {
    "from_config, initialize": plain_random,
    "Init: from_config, initialize": init_random,
}


def measure(rank: int, world: int, way: str, path: str, shape: Any) -> tuple[int, int, int, float]:
    import transformers.models.llama.modeling_llama  # noqa: F401 - before the start is measured

    import zeroshard.initialization
    import zeroshard.loading  # noqa: F401

    auto().from_config(shape_of(0.0001))  # what a first model imports
    peak = Peak()
    begin = time.perf_counter()
    kept = {**LOADING, **BUILDING}[way](path, shape)
    seconds = time.perf_counter() - begin
    figures = peak.finish()
    del kept
    return *figures, seconds


def table(ways: dict[str, Any], path: str, shape: Any, ranks: list[int], nbytes: int) -> list[str]:
    lines = [
        "| ranks | way | weights / ranks MB | peak MB per rank | at the end MB | VmHWM MB | seconds |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for world in ranks:
        for way in ways:
            with RankPool(world) as pool:
                found = pool.run(measure, way, path, shape, timeout=900.0)
            most, end, high, seconds = (max(column) for column in zip(*found, strict=True))
            cells = [nbytes / world / MB, most / MB, end / MB, high / MB]
            lines.append(
                f"| {world} | {way} | " + " | ".join(f"{c:.0f}" for c in cells) + f" | {seconds:.1f} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the weights (default: 1)")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--demo", action="store_true", help="build the demo's model instead, on 2 ranks")
    arguments = parser.parse_args()
    ranks = [2] if arguments.demo else [int(number) for number in arguments.ranks.split(",")]
    shape = demo_shape() if arguments.demo else shape_of(arguments.gigabytes)
    with tempfile.TemporaryDirectory() as directory:
        if not arguments.demo:
            auto().from_config(shape).save_pretrained(directory, max_shard_size="100GB")
        nbytes = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors")) or 4 * 134_515_008
        lines = table(BUILDING if arguments.demo else LOADING, directory, shape, ranks, nbytes)
    print(
        f"\n{nbytes / 1e9:.2f} GB of weights, {shape.num_hidden_layers} layers of width {shape.hidden_size}\n"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
