"""DeepSpeed's functions over checkpoints, for zeroshard's checkpoints and DeepSpeed's own."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zeroshard.checkpoint.export import export, parse_size, read_weights
from zeroshard.checkpoint.opening import open_checkpoint
from zeroshard.checkpoint.plain import check_known
from zeroshard.console import command_line, guarded

__all__ = [
    "clone_tensors_for_torch_save",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "universal_main",
]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of nested containers whose tensors have memory of their own on `device`: what torch.save then writes
    is no larger than they are. Tensors that are the same elements, such as tied weights, share one copy."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        same = leaf.dtype, leaf.data_ptr(), leaf.shape, leaf.stride()
        if leaf.data_ptr() == 0 or same not in copies:
            copies[same] = leaf.detach().clone().to(device)
        return copies[same]

    return tree_map(clone, item)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The whole model in fp32 on the CPU, without ranks or a GPU. `lazy_mode` has no effect: see `zeroshard export`
    for models that do not fit. Raises CheckpointError."""
    return read_weights(open_checkpoint(checkpoint_dir, tag), trained_only=exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write them to `output_dir` as `pytorch_model.bin`, or `model.safetensors`, in parts with an index when they
    are larger than `max_shard_size`. Raises CheckpointError."""
    size = parse_size(str(max_shard_size)) if max_shard_size is not None else 2**62
    export(
        open_checkpoint(checkpoint_dir, tag),
        output_dir,
        max_shard_size=size,
        format="safetensors" if safe_serialization else "pt",
        trained_only=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """`model`, on the CPU and plain, with the checkpoint's fp32 weights."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


# ---- files that DeepSpeed has and zeroshard has not -----------------------------------------------------
# Lightning reads two of them beside the weights, for the stage and for its own state. They are made when asked for.


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """One file for torch.load, with `["optimizer_state_dict"]["zero_stage"]`."""
    stage = open_checkpoint(checkpoint_dir).extras().get("zero_stage", 0)
    return [_temporary({"optimizer_state_dict": {"zero_stage": stage}}, "optim_states.pt")]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """A file for torch.load, with what `save_checkpoint` was given as `client_state`."""
    state = open_checkpoint(checkpoint_dir).extras()["client_state"]
    check_known(state, str(checkpoint_dir))
    return _temporary(state, "model_states.pt")


def _temporary(value: Any, name: str) -> str:
    directory = tempfile.mkdtemp(prefix="zeroshard-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = Path(directory) / name
    torch.save(value, path)
    return str(path)


# ---- commands -------------------------------------------------------------------------------------------


def _zero_to_fp32(
    checkpoint_dir: Annotated[
        Path, typer.Argument(help="Directory that has `latest`, or one checkpoint in it.")
    ],
    output_dir: Annotated[Path, typer.Argument(help="Directory to write to.")],
    max_shard_size: Annotated[str, typer.Option("--max_shard_size", help="Bytes per file.")] = "5GB",
    safe_serialization: Annotated[
        bool, typer.Option("--safe_serialization", help="Write safetensors, not torch files.")
    ] = False,
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", help="Which checkpoint, if not the latest.")
    ] = None,
    exclude_frozen_parameters: Annotated[
        bool, typer.Option("--exclude_frozen_parameters", help="Leave out what was not trained.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", "-d", help="No effect.")] = False,
) -> None:
    """Write a checkpoint's weights in fp32, as whole tensors."""
    try:
        parse_size(max_shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--max_shard_size'") from None
    convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint_dir, output_dir, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def main() -> int:
    """`zero_to_fp32.py`: exit status 1 and one line when it fails."""
    name = "zero_to_fp32.py"
    return guarded(lambda: command_line(_zero_to_fp32, name)(sys.argv[1:]), name)


def universal_main() -> int:
    """`ds_to_universal`: says that nothing has to be converted."""
    print("zeroshard's checkpoints open at any number of ranks and any stage: there is nothing to convert.")
    return 0
