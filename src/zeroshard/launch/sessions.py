"""The processes that carry a job to its hosts, watched from here until none is left.

The first rank that fails ends the job: its host reports it (`failures.py`), the others are told to stop, and the
report is the last thing that is printed. A Ctrl-C is passed on to all hosts; a second one is SIGTERM; a third one
ends the connections, and with them what they started.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import FrameType

from zeroshard.launch import child
from zeroshard.launch.failures import (
    RECORD_PREFIX,
    Failure,
    describe_failure,
    exit_status,
    last_lines,
    read_record,
)
from zeroshard.launch.lifeline import BEAT_SECONDS
from zeroshard.launch.messages import log
from zeroshard.launch.processes import room_for_files
from zeroshard.launch.relay import Relay, write_out
from zeroshard.launch.remote import Start

__all__ = ["run_starts"]

_POLL_SECONDS = 0.05
_USUAL_PIPE = 1 << 16  # bytes that nobody has to read before we go on
_SETTLE_SECONDS = 3.0  # ranks that fail together are heard before one is named
_FILES_OF_A_SESSION = 10  # stdin, and for each of two streams two pipes; and what it takes to start it
_SECONDS_TO_PRINT = 1.0  # what came before a connection was cut
_SECONDS_TO_STOP = 20.0  # a little more than the hosts take to kill a rank that does not listen
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_printing = threading.Lock()


class _Session:
    """One started process, and what was heard from it."""

    def __init__(self, start: Start, environ: Mapping[str, str], directory: str) -> None:
        self.start = start
        self.failures: dict[int, Failure] = {}
        self.said: deque[str] = deque(maxlen=20)
        self.ended_at: float | None = None
        self._cut = False
        labelled = subprocess.PIPE if start.host else None
        # What listens to us stops by itself when we end; the others have to be told.
        told = () if start.listens else child.start_through_child("SIGTERM")
        self.process = subprocess.Popen(
            (*told, *start.words),
            env={**environ, **start.environment},
            cwd=directory,
            stdin=subprocess.PIPE if start.listens else subprocess.DEVNULL,
            stdout=labelled,
            stderr=labelled,
            start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on
            pipesize=-1 if len(start.first_line) < _USUAL_PIPE else len(start.first_line),
        )
        if start.first_line:
            self._write(start.first_line)
        self._relays = []
        for source, sink in ((self.process.stdout, 1), (self.process.stderr, 2)):
            if source is not None:
                with source:
                    self._relays.append(Relay(os.dup(source.fileno()), partial(self._read, sink)))

    def _read(self, sink: int, data: bytes) -> None:
        """Lines that came in; the last one may lack its end."""
        pieces = [piece for piece in re.split(rb"(?<=\n)|(?<=\r)(?!\n)", data) if piece]
        if pieces[-1][-1:] not in (b"\n", b"\r"):
            pieces[-1] += b"\n"
        self._pass_on(pieces, f"{self.start.host}: ".encode(), sink)

    def _pass_on(self, pieces: list[bytes], label: bytes, sink: int) -> None:
        for piece in pieces:
            line = self._without_record(piece) if sink == 2 else piece
            if not line:
                continue
            if sink == 2:
                self.said.append(line.decode(errors="replace").rstrip())
            with _printing:
                write_out(sink, label + line)

    def _without_record(self, piece: bytes) -> bytes:
        """What is to be shown: a rank may have died within a line, that of a progress bar, before the record."""
        before, found, record = piece.partition(RECORD_PREFIX.encode())
        try:
            self.failures |= read_record(record.decode(), self.start.host) if found else {}
        except (ValueError, TypeError, AttributeError, KeyError):  # somebody else's words
            return piece
        return before + b"\n" if found and before else before

    @property
    def name(self) -> str:
        """The host, or the program that is for all of them."""
        return self.start.host or self.start.words[0]

    def running(self) -> bool:
        """Whether it still runs; when it does not, all that it said has been passed on, unless it was cut off."""
        if self.ended_at is None and self.process.poll() is not None:
            for relay in self._relays:
                relay.close()
            until = time.monotonic() + (_SECONDS_TO_PRINT if self._cut else 0.0)
            if all(relay.wait(until) for relay in self._relays) or self._cut:
                self.ended_at = time.monotonic()
        return self.ended_at is None

    def send(self, word: str) -> None:
        """The name of a signal, or "" for a beat."""
        if self.start.listens:
            self._write(f"{word}\n")
        elif word:
            self._signal(signal.Signals[word])

    def _write(self, text: str) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or was cut off
                self.process.stdin.write(text.encode())
                self.process.stdin.flush()

    def cut(self) -> None:
        """End the connection, whatever it does."""
        self._cut = True
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def describe_end(self) -> str:
        """How it ended, where no rank's failure was reported."""
        code = self.process.returncode
        last = next((line for line in reversed(self.said) if line), "")
        if self.start.words[0] == "ssh" and code == 255:
            return f"the connection to {self.name} ended" + (f": {last}" if last else "")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return f"{self.name} {how}" + (
            f": {last.removeprefix('zeroshard: ')}" if self.start.host and last else ""
        )


def run_starts(
    starts: Sequence[Start], environ: Mapping[str, str], directory: str, enough: int | None = None
) -> int:
    """Start all, and return the exit status for the shell when all have ended: as `runner.run_node`.

    `enough`: the job goes on while so many of them do, though connections to others end (elastic hosts). With 0
    there is no job, and each goes its own way to its end.
    """
    received: list[signal.Signals] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    # nohup makes us deaf to the end of the terminal, and it stays so.
    heard = [n for n in _SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in heard}
    sessions: list[_Session] = []
    try:
        with room_for_files(_FILES_OF_A_SESSION, len(starts), "hosts"):
            for start in starts:
                if not received:
                    sessions.append(_Session(start, environ, directory))
        failed = _watch(sessions, received, len(starts) if enough is None else enough)
    finally:
        for session in sessions:
            if session.running():
                session.cut()
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        lost = [s.name for s in sessions if s.process.returncode == -signal.SIGKILL]
        unsure = f", but {', '.join(lost)} did not say so" if lost else ""
        ended = "" if enough == 0 else "; all ranks have ended"
        log.error("stopped by %s%s%s", received[0].name, ended, unsure)
        return 128 + received[0]
    return _tell(failed, stopped=len(starts) > 1 and enough != 0)


def _watch(sessions: list[_Session], received: list[signal.Signals], enough: int) -> list[_Session]:
    """Until all have ended. Returns those that failed by themselves, in their order."""
    failed: list[_Session] = []
    answered, next_beat, told = 0, time.monotonic(), False
    stop_at = cut_at = float("inf")
    while running := [session for session in sessions if session.running()]:
        now = time.monotonic()
        if not told:
            new = _newly_failed(sessions, failed)
            failed += new
            for session in new:
                if not session.failures and len(running) >= enough > 0:
                    log.warning("%s; going on with %d", session.describe_end(), len(running))
        if len(received) > answered:
            answered, told = answered + 1, True
            for session in running:
                session.send(received[0].name if answered == 1 else "SIGTERM")
            cut_at = now if answered > 2 else min(cut_at, now + _SECONDS_TO_STOP)
        elif not told and failed and (len(running) < enough or any(s.failures for s in failed)):
            stop_at = min(stop_at, now + _SETTLE_SECONDS)
            if now >= stop_at:
                told, cut_at = True, now + _SECONDS_TO_STOP
                for session in running:
                    session.send("SIGTERM")
        if now >= cut_at:
            for session in running:
                session.cut()
        if now >= next_beat:
            next_beat = now + BEAT_SECONDS
            for session in running:
                session.send("")
        time.sleep(_POLL_SECONDS)
    if not told:
        failed += _newly_failed(sessions, failed)
        done = sum(session.process.returncode == 0 for session in sessions)
        if done >= enough > 0 and not any(session.failures for session in failed):
            return []
    return failed


def _newly_failed(sessions: list[_Session], failed: list[_Session]) -> list[_Session]:
    new = [s for s in sessions if s.ended_at is not None and s.process.returncode and s not in failed]
    return sorted(new, key=lambda session: session.ended_at or 0.0)


def _tell(failed: list[_Session], stopped: bool) -> int:
    """Name what failed first, and return the exit status.

    A host that ended without a word of its ranks is the cause of what happened to the ranks of others.
    """
    if not failed:
        return 0
    silent = [session for session in failed if not session.failures]
    if silent:
        log.error("%s%s", silent[0].describe_end(), "; the others were stopped" if stopped else "")
        code: int = silent[0].process.returncode
        return code if code > 0 else 128 - code
    failures = {rank: failure for session in failed for rank, failure in session.failures.items()}
    if said := last_lines(failures):
        log.error(said)
    log.error(describe_failure(failures, None))
    return exit_status(failures)
