"""Which files a DeepSpeed checkpoint has, and whether all of them are there.

<directory>/latest                                             the tag that is opened when none is named
<directory>/latest_universal                                   the same for a universal checkpoint
<directory>/<tag>/mp_rank_00_model_states.pt                   stages 0 to 2
<directory>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt    stage 3, one per rank
<directory>/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
<directory>/<tag>/zero/<parameter>/fp32.pt, exp_avg.pt, ...    universal
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.errors import CheckpointError

__all__ = ["CONVERT", "COPY", "Files", "find", "missing", "need_ranks", "tag_directory"]

COPY = "Copy it from where the checkpoint was written, or load another tag."
CONVERT = "convert it with `python -m deepspeed.checkpoint.ds_to_universal`"

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_OTHER = re.compile(r"layer_.*model_states\.pt|expert_.*model_states\.pt|expp_rank_.*optim_states\.pt")
"""Pipeline stages and experts. The underscore before `optim_states` is missing in old releases."""


@dataclass
class Files:
    """The files of one tag, by rank."""

    directory: Path
    whole: Path | None = None
    """The model's states of stages 0 to 2."""
    shares: dict[int, Path] = field(default_factory=dict)
    """The model's states of stage 3."""
    optimizer: dict[str, dict[int, Path]] = field(default_factory=dict)
    """By prefix: `bf16_` or none."""
    universal: bool = False

    def optimizer_of(self, config: Mapping[str, Any]) -> dict[int, Path]:
        """Those of the run that saved last, where the directory has files of both prefixes."""
        if len(self.optimizer) > 1:
            prefix = "bf16_" if (config.get("bf16") or {}).get("enabled") else ""
            return self.optimizer.get(prefix, {})
        return next(iter(self.optimizer.values()), {})


def tag_directory(directory: Path, tag: str | None) -> Path:
    """The directory with the files. Raises CheckpointError when there is none, and says what was looked for."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no directory: pass the one that DeepSpeed's save_checkpoint was given."
        )
    if tag is not None:
        return _existing(directory / tag, f"tag {tag!r}", directory)
    for pointer in ("latest", "latest_universal"):
        if (directory / pointer).is_file():
            named = (directory / pointer).read_text(errors="replace").strip()
            return _existing(directory / named, f"{directory / pointer} names {named!r}", directory)
    if any(directory.glob("*_model_states.pt")):
        return directory
    raise CheckpointError(
        f"{directory} has no `latest` or `latest_universal`, and no *_model_states.pt of its own. Pass a tag, the "
        f"directory of one tag, or the directory that DeepSpeed's save_checkpoint was given.{_tags(directory)}"
    )


def _existing(path: Path, why: str, directory: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{why}, and {path} is no directory. Pass another tag.{_tags(directory)}")
    return path


def _tags(directory: Path) -> str:
    tags = sorted({path.parent.name for path in directory.glob("*/*_model_states.pt")})
    return f" Tags here: {', '.join(tags)}." if tags else ""


def find(directory: Path) -> Files:
    """The files of the checkpoint in a tag's directory. Raises CheckpointError for layouts that are not read."""
    files = Files(directory, universal=(directory / "zero").is_dir())
    others = []
    for path in sorted(directory.iterdir()):
        if found := _MODEL.fullmatch(path.name):
            if int(found[2]):
                others.append(path.name)
            elif found[1] is None:
                files.whole = path
            else:
                files.shares[int(found[1])] = path
        elif found := _OPTIM.fullmatch(path.name):
            if int(found[3]):
                others.append(path.name)
            else:
                files.optimizer.setdefault(found[1], {})[int(found[2])] = path
        elif _OTHER.fullmatch(path.name):
            others.append(path.name)
    if others and not files.universal:
        raise CheckpointError(
            f"{directory} has {others[0]}: it is of a run with tensor or pipeline parallelism or experts, and how "
            f"its files belong together is not in them. First {CONVERT}."
        )
    if files.whole is None and not files.shares:
        raise CheckpointError(
            f"{directory} has no mp_rank_00_model_states.pt (ZeRO stages 0 to 2) and no "
            f"zero_pp_rank_0_mp_rank_00_model_states.pt (stage 3). {COPY}"
        )
    return files


def missing(path: Path, why: str) -> CheckpointError:
    """A file that must be there."""
    return CheckpointError(f"{path} is missing: {why}. {COPY}")


def need_ranks(files: Mapping[int, Path], count: int) -> list[Path]:
    """The files of ranks 0 to `count - 1`. Raises CheckpointError when one is missing or there are more."""
    absent = [rank for rank in range(count) if rank not in files]
    known = next(iter(files.values()))
    if absent:
        names = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", known.name) for rank in absent]
        others = f", and so are {len(names) - 1} more" if len(names) > 1 else ""
        raise missing(
            known.parent / names[0], f"{count} ranks saved, and {len(files)} files are here{others}"
        )
    if len(files) > count:
        raise CheckpointError(
            f"{files[max(files)]} is left from another run: {count} ranks saved the checkpoint, and {len(files)} "
            f"such files are here. Move those of ranks {count} and above away if the others are of one run."
        )
    return [files[rank] for rank in range(count)]
