"""The stand-in: a package `deepspeed` for scripts and libraries that import that name.

    zeroshard run --as-deepspeed train.py     # or, in code, before anything asks for deepspeed:
    import zeroshard.compat.deepspeed

`standin/` is a directory for `sys.path` that has a package `deepspeed` and its distribution's metadata. The
package is a table of names (`names.py`), each with its home in zeroshard; a submodule exists when it is imported, a
name when it is used. What it does beyond renaming is in the other files here. Nothing here imports torch by itself.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from pathlib import Path

from zeroshard.errors import ZeroShardError

__all__ = ["VERSION", "activate", "real_deepspeed_installed", "standin_directory"]

VERSION = "0.19.8+zeroshard"
"""The release whose calls are offered; libraries compare it with their minima."""

_LOOKED = {"transformers.integrations.deepspeed": "transformers", "accelerate.accelerator": "accelerate"}
"""Modules that look for deepspeed while they are imported, and never again."""


def standin_directory() -> Path:
    """The directory that, in front on `sys.path` or in PYTHONPATH, makes `import deepspeed` find the stand-in."""
    return Path(__file__).parent / "standin"


def real_deepspeed_installed() -> bool:
    """A package `deepspeed` that is not the stand-in would be imported without it."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != standin_directory()]
    found = importlib.machinery.PathFinder.find_spec("deepspeed", elsewhere)
    if found is None or found.origin is None:  # or a folder of that name, with configs in it
        return False
    return not any(
        str(distribution.version).endswith("+zeroshard")
        for distribution in importlib.metadata.distributions(name="deepspeed", path=elsewhere)
    )


def activate() -> None:
    """Make `import deepspeed`, and the metadata of that name, mean the stand-in, in this process. Idempotent.

    Libraries look for deepspeed when they are imported: call it before. A warning names those that have been.

    Raises:
        ZeroShardError: another deepspeed is imported already.
    """
    directory = str(standin_directory())
    imported = sys.modules.get("deepspeed")
    if imported is not None and getattr(imported, "__version__", None) != VERSION:
        raise ZeroShardError(
            f"deepspeed is imported already, from {getattr(imported, '__file__', None)}; the stand-in cannot take "
            f"its place any more. Import zeroshard.compat.deepspeed first, or start the script with "
            f"`zeroshard run --as-deepspeed`"
        )
    if directory not in sys.path:
        late = [library for module, library in _LOOKED.items() if module in sys.modules]
        if late and importlib.util.find_spec("deepspeed") is None:
            warnings.warn(
                f"{' and '.join(late)} looked for deepspeed when imported, and found none: what they do with it "
                f"will fail. Import zeroshard.compat.deepspeed before, or start the script with `zeroshard run`",
                stacklevel=2,
            )
        sys.path.insert(0, directory)
        importlib.invalidate_caches()
