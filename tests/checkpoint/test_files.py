"""What is written is what is read, or an error names the bytes."""

from __future__ import annotations

import concurrent.futures.thread
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.checkpoint.files import CheckedReader, CheckedWriter, write_small
from zeroshard.errors import CheckpointError

BLOCK = 16


def write(path: Path, parts: list[bytes]) -> tuple[int, list[int]]:
    with CheckedWriter(path, BLOCK) as file:
        for part in parts:
            file.write(part)
        return file.nbytes, file.checksums()


def reader(path: Path, nbytes: int, sums: list[int]) -> CheckedReader:
    return CheckedReader(path, nbytes, sums, BLOCK)


@given(st.lists(st.binary(max_size=70), max_size=12), st.data())
@settings(max_examples=150)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    nbytes, sums = write(path, parts)
    whole = b"".join(parts)
    assert path.read_bytes() == whole
    assert sums == [zlib.crc32(whole[at : at + BLOCK]) for at in range(0, len(whole), BLOCK)]
    with reader(path, nbytes, sums) as file:
        for _ in range(5):
            begin = data.draw(st.integers(0, nbytes))
            end = data.draw(st.integers(begin, nbytes))
            target = bytearray(end - begin)
            file.read_into(begin, memoryview(target))
            assert target == whole[begin:end]
        file.verify()


@pytest.mark.parametrize("flipped", [0, 15, 16, 40, 99])
def test_a_flipped_bit_is_found_by_every_read_that_touches_its_block(tmp_path: Path, flipped: int) -> None:
    path = tmp_path / "file"
    nbytes, sums = write(path, [bytes(range(100))])
    damaged = bytearray(path.read_bytes())
    damaged[flipped] ^= 4
    path.write_bytes(damaged)
    low = flipped // BLOCK * BLOCK
    with reader(path, nbytes, sums) as file:
        with pytest.raises(CheckpointError, match=f"file is damaged: bytes {low} to {min(low + 16, 100)}"):
            file.read_into(flipped, memoryview(bytearray(1)))
        with pytest.raises(CheckpointError, match="damaged"):
            file.verify()


def test_a_short_or_missing_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    nbytes, sums = write(path, [bytes(50)])
    path.write_bytes(bytes(49))
    with pytest.raises(CheckpointError, match="has 49 bytes, and was written with 50"):
        reader(path, nbytes, sums)
    path.unlink()
    with pytest.raises(CheckpointError, match="file is missing: it should have 50 bytes"):
        reader(path, nbytes, sums)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "file", [b"x"])
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", [b"y"])


def test_a_file_is_finished_while_the_interpreter_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may end without `close` while a save is being written; executors take nothing more then."""
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    nbytes, sums = write(tmp_path / "file", [bytes(40)])
    with reader(tmp_path / "file", nbytes, sums) as file:
        file.verify()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    link = tmp_path / "latest.new"
    link.symlink_to(full)
    with pytest.raises(OSError, match="No space left"):
        write_small(tmp_path / "latest", b"global_step1")
