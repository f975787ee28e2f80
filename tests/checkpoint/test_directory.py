"""Whatever moment a run dies at, `latest` names a whole checkpoint, and the next save tidies up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zeroshard.checkpoint import directory
from zeroshard.checkpoint.directory import Saves
from zeroshard.errors import CheckpointError


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def write(saves: Saves, tag: str, content: str, latest: bool = True) -> None:
    saves.begin(tag)
    (saves.fresh(tag) / "data").write_text(content)
    (saves.fresh(tag) / "index.json").touch()
    saves.commit(tag, latest=latest)


def opened(saves: Saves) -> str:
    tag = saves.latest()
    assert tag is not None
    return (saves.find(tag) / "data").read_text()


def test_latest_moves_with_each_save_that_wants_it(tmp_path: Path) -> None:
    saves = Saves(tmp_path / "new" / "deep")
    assert saves.latest() is None
    write(saves, "a", "1")
    write(saves, "b", "2", latest=False)
    assert opened(saves) == "1"
    write(saves, "c", "3")
    assert opened(saves) == "3"
    assert saves.tags() == ["a", "b", "c"]


class Fuse:
    """Ends the process, so to say, at the n-th moment: just before or just after a call that changes the disk."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def burn(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.burn()
            result = original(*args, **kwargs)
            self.burn()
            return result

        return call


@pytest.mark.parametrize(("tag", "moments"), [("old", 10), ("new", 6)])
def test_a_death_at_any_moment_of_a_save(
    tmp_path: Path, tag: str, moments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths = 0
    for nth in range(1, 40):
        saves, fuse = Saves(tmp_path / str(nth)), Fuse(nth)
        write(saves, "old", "1")
        with monkeypatch.context() as patched:
            for owner, name in [
                (os, "rename"),
                (os, "replace"),
                (shutil, "rmtree"),
                (directory, "sync_directory"),
            ]:
                patched.setattr(owner, name, fuse.around(getattr(owner, name)))
            try:
                write(saves, tag, "2")
            except Killed:
                deaths += 1
            else:
                break
        assert opened(saves) in ("1", "2")
        # The next run finds a state from which it can load and save.
        write(saves, "later", "3")
        assert opened(saves) == "3"
        assert not [entry for entry in saves.directory.iterdir() if entry.name.startswith(".")]
    assert deaths == moments


@pytest.mark.parametrize("tag", ["", ".", "..", "latest", "a/b", ".saving-x", "/absolute", " a", "a\n"])
def test_tags_that_are_no_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        Saves(tmp_path).find(tag)


def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    write(saves, "global_step1", "1")
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'global_step2'; it has global_step1"):
        saves.find("global_step2")


def test_prune_keeps_the_newest_every_nth_the_latest_and_what_the_user_named(tmp_path: Path) -> None:
    saves = Saves(tmp_path)
    for step in (1, 2, 4, 5, 6, 7, 9, 10):
        write(saves, f"global_step{step}", "", latest=step == 2)
    write(saves, "best", "", latest=False)
    assert saves.prune(0, 0) == []
    deleted = saves.prune(2, 4)
    assert sorted(deleted) == sorted(f"global_step{step}" for step in (1, 5, 6, 7))
    assert set(saves.tags()) == {"global_step2", "global_step4", "global_step9", "global_step10", "best"}
    write(saves, "global_step3", "", latest=False)  # of a run that went on from an older one
    assert saves.prune(2, 4, "global_step3") == []


@pytest.mark.parametrize("name", ["data", "notes.txt"])
def test_what_no_save_wrote_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{name} is there and is no checkpoint"):
        Saves(tmp_path).begin(name)
    assert (tmp_path / "data" / "mine").read_text() == (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("content", "told"), [(b"", "is empty"), (b"\xff", "cannot be read")])
def test_a_latest_that_names_nothing(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"latest {told}.*Name a tag"):
        Saves(tmp_path).latest()
