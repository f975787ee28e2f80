"""What comes out of a pipe: in whole lines, all of it, and no longer than it matters."""

from __future__ import annotations

import os
import threading
import time

import pytest

from zeroshard.launch.output import RankOutput
from zeroshard.launch.relay import Relay, write_out

LIMIT_SECONDS = 60


class Pipe:
    """A relay's pipe, and what has come out of it."""

    def __init__(self, patience: float | None = None) -> None:
        self.taken: list[bytes] = []
        self.more = threading.Condition()
        source, self.write_end = os.pipe()
        self.relay = Relay(source, self.take, patience)

    def take(self, data: bytes) -> None:
        with self.more:
            self.taken.append(data)
            self.more.notify()

    def write(self, data: bytes) -> None:
        write_out(self.write_end, data)

    def wait_until_taken(self, wanted: bytes) -> None:
        with self.more:
            assert self.more.wait_for(lambda: b"".join(self.taken) == wanted, LIMIT_SECONDS)


def limit() -> float:
    return time.monotonic() + LIMIT_SECONDS


def test_lines_are_whole_and_the_last_needs_no_end() -> None:
    pipe = Pipe()
    pipe.write(b"one\ntw")
    pipe.wait_until_taken(b"one\n")
    pipe.write(b"o\r 3")
    pipe.wait_until_taken(b"one\ntwo\r")
    os.close(pipe.write_end)
    assert pipe.relay.wait(limit())
    assert pipe.taken == [b"one\n", b"two\r", b" 3"]


def test_a_row_of_dots_is_shown_while_it_grows() -> None:
    """Each follows sooner than the last has been there for long enough."""
    pipe = Pipe(patience=0.3)
    end = limit()
    while not pipe.taken:
        assert time.monotonic() < end
        pipe.write(b".")
        time.sleep(0.01)
    os.close(pipe.write_end)
    assert pipe.relay.wait(limit())


def test_a_line_without_end_is_cut() -> None:
    pipe = Pipe()
    for _ in range(40):
        pipe.write(b"x" * 65536)
    os.close(pipe.write_end)
    assert pipe.relay.wait(limit())
    assert len(pipe.taken) == 3
    assert b"".join(pipe.taken) == b"x" * 40 * 65536


def test_a_writer_that_stays_is_not_waited_for() -> None:
    pipe = Pipe()
    pipe.write(b"line\nmore")
    pipe.relay.close()
    assert pipe.relay.wait(limit())
    assert b"".join(pipe.taken) == b"line\nmore"
    os.close(pipe.write_end)


def test_a_slow_reader_gets_all() -> None:
    """What was said last is passed on when the ranks have long ended."""
    ours, stdout = os.pipe()
    source, write_end = os.pipe()
    relay = Relay(source, lambda data: write_out(stdout, data))
    said = b"".join(b"%08d\n" % number for number in range(12000))  # more than one pipe takes, less than two
    write_out(write_end, said)
    relay.close()
    assert not relay.wait(time.monotonic() + 0.2)
    got = b""
    while len(got) < len(said):
        got += os.read(ours, 65536)
    assert relay.wait(limit())
    assert got == said
    for descriptor in (ours, stdout, write_end):
        os.close(descriptor)


def test_a_full_pipe_that_does_not_block_loses_nothing() -> None:
    ours, stdout = os.pipe()
    os.set_blocking(stdout, False)
    said = bytes(300_000)
    writer = threading.Thread(target=write_out, args=(stdout, said), daemon=True)
    writer.start()
    got = 0
    while got < len(said):
        got += len(os.read(ours, 65536))
    writer.join(LIMIT_SECONDS)
    assert not writer.is_alive()
    os.close(ours)
    write_out(stdout, said)  # nobody reads: neither an error nor a wait
    os.close(stdout)


def rank() -> dict[str, str]:
    return {"RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}


def test_output_is_finished_though_torch_holds_it_open(capfd: pytest.CaptureFixture[str]) -> None:
    output = RankOutput(None)
    destination = output.reify({0: rank()})
    with open(destination.stdouts[0], "w") as stdout, open(destination.stderrs[0], "w") as stderr:
        print("to be", file=stdout, flush=True)
        print("oh", file=stderr, flush=True)
        finishing = threading.Thread(target=output.finish, daemon=True)
        finishing.start()
        finishing.join(LIMIT_SECONDS)
        assert not finishing.is_alive()
    assert capfd.readouterr() == ("to be\n", "oh\n")
    assert output.last_lines(0) == ("oh",)


def test_no_file_stays_open_when_ranks_are_started_again(tmp_path: os.PathLike[str]) -> None:
    made = RankOutput(str(tmp_path))

    def open_files() -> int:
        made.reify({0: rank()})
        return len(os.listdir("/dev/fd"))

    assert open_files() == open_files() == open_files()
    made.finish()
