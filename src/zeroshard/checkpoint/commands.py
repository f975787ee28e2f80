"""`zeroshard inspect`, `verify` and `export`: a checkpoint without ranks and without a GPU."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zeroshard.checkpoint.export import FORMATS, parse_size
from zeroshard.checkpoint.export import export as export_weights
from zeroshard.checkpoint.opening import open_checkpoint
from zeroshard.checkpoint.storage import Reader
from zeroshard.console import command_line, show_table
from zeroshard.errors import CheckpointError
from zeroshard.precision import DTYPES, dtype_name

__all__ = ["export", "inspect", "verify"]

_Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or the directory of checkpoints: then what `latest` names.")
]
_Tag = Annotated[str | None, typer.Option(help="Which checkpoint of the directory.")]
_ABOUT = (
    "global_steps",
    "skipped_steps",
    "world_size",
    "zero_stage",
    "time",
    "zeroshard",
    "torch",
    "version",
)
_DTYPES = {**DTYPES, "saved": None}


def _inspect(
    checkpoint: _Checkpoint,
    tag: _Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """List what is in a checkpoint: the run that wrote it, and every tensor's name, dtype, shape and size."""
    reader = open_checkpoint(checkpoint, tag)
    tensors, extras = reader.tensors(), reader.extras()
    rows = [
        (name, dtype_name(entry.properties.dtype), tuple(entry.size), _nbytes(entry))
        for name, entry in tensors.items()
    ]
    config = extras["config"]
    about = {
        "checkpoint": str(reader.directory),
        "format": "zeroshard" if isinstance(reader, Reader) else "DeepSpeed",
        **{key: extras[key] for key in _ABOUT if key in extras},
        "client_state": sorted(extras["client_state"]),
        "tied": extras["aliases"],
        "config": json.loads(config) if isinstance(config, str) else config,
    }
    if as_json:
        listed = [dict(zip(("name", "dtype", "shape", "bytes"), row, strict=True)) for row in rows]
        print(json.dumps({**about, "tensors": listed}, indent=2))
        return
    for key, value in about.items():
        print(f"{key}\t{value if not isinstance(value, (dict, list)) else json.dumps(value)}")
    show_table(
        ("tensor", "dtype", "shape", "bytes"), [(*row[:2], str(row[2]), f"{row[3]:,}") for row in rows]
    )
    print(f"total\t{len(rows)} tensors\t{sum(row[3] for row in rows):,} bytes")


def _nbytes(entry: TensorStorageMetadata) -> int:
    return math.prod(entry.size) * entry.properties.dtype.itemsize


def _verify(checkpoint: _Checkpoint, tag: _Tag = None) -> None:
    """Read every byte of a checkpoint and compare it with the checksums taken when it was written."""
    reader = open_checkpoint(checkpoint, tag)
    if not isinstance(reader, Reader):
        raise CheckpointError(
            f"{reader.directory} was written by DeepSpeed, which takes no checksums: nothing can be compared"
        )
    nbytes = reader.verify()
    print(f"{reader.directory}: {len(reader.index.files)} files, {nbytes:,} bytes, all as they were written")


def _export(
    checkpoint: _Checkpoint,
    out: Annotated[Path, typer.Argument(help="Directory to write to; made if it is not there.")],
    tag: _Tag = None,
    dtype: Annotated[str, typer.Option(help=f"Of the parameters: {', '.join(_DTYPES)}.")] = "fp32",
    max_shard_size: Annotated[str, typer.Option(help="Bytes per file, and about the memory taken.")] = "5GB",
    format: Annotated[str, typer.Option(help=f"{' or '.join(FORMATS)}.")] = "safetensors",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Hugging Face directory to copy the tokenizer's files from.")
    ] = None,
) -> None:
    """Write a checkpoint's weights as full tensors, for transformers, safetensors or torch.load."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(_DTYPES)}", param_hint="--dtype")
    if format not in FORMATS:
        raise typer.BadParameter(f"{format!r} is none of {', '.join(FORMATS)}", param_hint="--format")
    try:
        limit = parse_size(max_shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from None
    written = export_weights(
        open_checkpoint(checkpoint, tag),
        out,
        dtype=_DTYPES[dtype],
        max_shard_size=limit,
        format=format,
        progress=_progress,
    )
    if tokenizer is not None:
        copied = _copy_tokenizer(tokenizer, out)
        print(f"{out}: {', '.join(copied)} from {tokenizer}")
    names = ", ".join(file.name for file in written.files[:3]) + (", ..." if len(written.files) > 3 else "")
    print(
        f"{out}: {written.tensors} tensors, {written.nbytes:,} bytes in {len(written.files)} files ({names})"
    )


def _copy_tokenizer(source: Path, out: Path) -> list[str]:
    patterns = ("*token*", "vocab*", "merges.txt", "*.model", "chat_template*", "*processor_config.json")
    found = sorted({path for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    if not found:
        raise CheckpointError(f"{source} has no tokenizer files: give the directory of a Hugging Face model")
    for path in found:
        shutil.copyfile(path, out / path.name)
    return [path.name for path in found]


def _progress(done: int, total: int) -> Any:
    if sys.stderr.isatty() and total:
        end = "\n" if done == total else ""
        print(f"\r{done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)


inspect = command_line(_inspect, "zeroshard inspect")
verify = command_line(_verify, "zeroshard verify")
export = command_line(_export, "zeroshard export")
