"""The directory of checkpoints: which there are, which is the latest, how a new one appears all at once.

    save_dir/latest                 a text file: the tag that is opened when none is named
    save_dir/<tag>/                 a whole checkpoint
    save_dir/.saving-<tag>/         one that is being written, or was when its run died
    save_dir/.replaced-<tag>/       the old checkpoint of a tag that is being written again

A checkpoint is written under its first name, then renamed; `latest` is moved after that. So at any moment `latest`
names a whole checkpoint. The next save takes away what a dead run left. One run writes to a directory at a time.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from zeroshard.checkpoint.files import sync_directory, write_small
from zeroshard.errors import CheckpointError

__all__ = ["INDEX", "Saves"]

LATEST, INDEX = "latest", "index.json"
_SAVING, _REPLACED = ".saving-", ".replaced-"


class Saves:
    """The checkpoints below one directory."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def check_tag(self, tag: str) -> None:
        """CheckpointError unless `tag` is the name of a directory here."""
        if (
            not tag
            or tag in (".", "..", LATEST)
            or tag.startswith((_SAVING, _REPLACED))
            or Path(tag).name != tag
            or tag.strip() != tag  # `latest` is a line of text
        ):
            raise CheckpointError(
                f"tag {tag!r} cannot name a checkpoint: it is the name of one directory below {self.directory}, "
                f"without spaces around it, and not {LATEST!r}"
            )

    def fresh(self, tag: str) -> Path:
        """The directory in which `tag` is written."""
        return self.directory / f"{_SAVING}{tag}"

    def begin(self, tag: str) -> None:
        """Take away what a dead run left, and make that directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.recover()
        self._check_replaceable(self.directory / tag)
        self.fresh(tag).mkdir()

    def _check_replaceable(self, final: Path) -> None:
        """CheckpointError where a save would delete what no save wrote."""
        if not final.exists() or (final.is_dir() and (not any(final.iterdir()) or (final / INDEX).is_file())):
            return
        raise CheckpointError(
            f"{final} is there and is no checkpoint of zeroshard (it has no {INDEX}), so it is not replaced. Give "
            f"another tag, or take it away"
        )

    def commit(self, tag: str, *, latest: bool) -> None:
        """What was written for `tag`, all of it on disk, becomes a checkpoint, and the latest if that is wanted."""
        final, replaced = self.directory / tag, self.directory / f"{_REPLACED}{tag}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(self.fresh(tag), final)
        sync_directory(self.directory)
        if latest:
            write_small(self.directory / LATEST, f"{tag}".encode())
        if replaced.exists():
            shutil.rmtree(replaced)

    def abandon(self, tag: str) -> None:
        """The save failed: leave nothing of it."""
        shutil.rmtree(self.fresh(tag), ignore_errors=True)

    def recover(self) -> list[str]:
        """Take away what dead runs left; a checkpoint that was being replaced comes back. The names of both."""
        done = []
        for entry in sorted(self.directory.iterdir()):
            if entry.name.startswith(_REPLACED):
                final = self.directory / entry.name.removeprefix(_REPLACED)
                if final.exists():
                    shutil.rmtree(entry)
                else:
                    os.rename(entry, final)
                done.append(entry.name)
            elif entry.name.startswith(_SAVING):
                shutil.rmtree(entry)
                done.append(entry.name)
        return done

    def latest(self) -> str | None:
        """The tag in `latest`; None without that file. CheckpointError when it cannot be read."""
        path = self.directory / LATEST
        try:
            tag = path.read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Name a tag, or write one into it."
            ) from error
        if not tag:
            raise CheckpointError(f"{path} is empty; it should have a tag. Name a tag, or write one into it.")
        return tag

    def find(self, tag: str) -> Path:
        """The directory of `tag`. CheckpointError, with what there is, when there is none."""
        self.check_tag(tag)
        for place in (self.directory / tag, self.directory / f"{_REPLACED}{tag}"):
            if place.is_dir():
                return place
        there = ", ".join(self.tags()) or "none"
        raise CheckpointError(f"{self.directory} has no checkpoint {tag!r}; it has {there}")

    def tags(self) -> list[str]:
        """All checkpoints, in the order in which they were made."""
        if not self.directory.is_dir():
            return []
        found = [
            entry for entry in self.directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")
        ]
        return [
            entry.name for entry in sorted(found, key=lambda entry: (entry.stat().st_mtime_ns, entry.name))
        ]

    def prune(self, keep_last: int, keep_every: int, made: str | None = None) -> list[str]:
        """Delete all but the newest `keep_last` checkpoints (0: keep all), and those of every `keep_every`-th step.

        Of those that save_checkpoint named itself (`global_step<N>`); a tag of the user's is never deleted, nor is
        the latest, nor `made`, which is the newest whatever its step. The names of those deleted.
        """
        steps = {
            tag: int(match[1]) for tag in self.tags() if (match := re.fullmatch(r"global_step(\d+)", tag))
        }
        if not keep_last:
            return []
        newest = sorted(steps, key=lambda tag: steps[tag])[-keep_last:]
        spared = {*newest, self.latest(), made}
        spared |= {tag for tag, step in steps.items() if keep_every and step % keep_every == 0}
        doomed = [tag for tag in steps if tag not in spared]
        for tag in doomed:
            # First out of sight in one step, so that no half-deleted checkpoint can be opened.
            os.rename(self.directory / tag, self.fresh(tag))
            shutil.rmtree(self.fresh(tag))
        return doomed
