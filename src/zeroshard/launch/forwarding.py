"""What of the environment travels to other hosts: variables by prefix, and the lines of `.deepspeed_env`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from zeroshard.errors import LaunchError

__all__ = ["ENVIRONMENT_FILE", "FORWARDED_PREFIXES", "forwarded_environment", "read_environment_file"]

# What `env` takes; accelerate writes the whole environment into the file, and not all of it was made by a shell.
_NAME = re.compile(r"[^\W\d][^\s=\"']*")
ENVIRONMENT_FILE = ".deepspeed_env"
FORWARDED_PREFIXES = ("GLOO", "MLFLOW", "MV2", "NCCL", "OMP", "PYTHON", "TORCH", "UCX", "ZEROSHARD")


def forwarded_environment(environ: Mapping[str, str], home: Path, here: Path) -> dict[str, str]:
    """Variables for every host: by prefix, then those of the file in `home`, then those of the file in `here`.

    The file is `.deepspeed_env`, or what DS_ENV_FILE names. PYTHONPATH is kept, with `here` in front of it.
    """
    chosen = {name: value for name, value in environ.items() if name.startswith(FORWARDED_PREFIXES)}
    name = environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    for file in dict.fromkeys((home / name, here / name)):
        if file.is_file():
            chosen |= read_environment_file(file)
    chosen["PYTHONPATH"] = os.pathsep.join([str(here), *filter(None, [chosen.get("PYTHONPATH")])])
    return dict(sorted(chosen.items()))


def read_environment_file(file: Path) -> dict[str, str]:
    """Lines `NAME=VALUE`; a value in quotes loses them, as a shell would have it."""
    read: dict[str, str] = {}
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{file} cannot be read: {error}") from None
    for number, raw in enumerate(lines, start=1):
        line = raw.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise LaunchError(f"{file}, line {number}: {raw!r} is not of the form NAME=VALUE")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        read[name] = value
    return read
