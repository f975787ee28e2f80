"""`RankPool`: a few persistent worker processes with a gloo group, to run a function on every rank.

    with RankPool(2) as pool:
        pool.run(count_parameters, "gpt2")     # [result of rank 0, result of rank 1]

where `def count_parameters(rank, world, name): ...` lives at the top level of a module or of the script.
Starting a worker costs seconds (it imports torch), so a pool is kept and used many times. A run that failed
leaves collectives half done; the pool then ends its workers and starts new ones at the next run.

The pool ends only processes it started, by their own process id, and leaves none behind: workers end when
their pipe to the parent closes, however the parent died.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from zeroshard.errors import ZeroShardError

__all__ = ["Outcome", "RankPool", "RunFailedError"]

_START_TIMEOUT = 120.0  # seconds; importing torch on a busy machine is slow
_STACK_SIGNAL = getattr(signal, "SIGUSR1", None)


@dataclass(frozen=True)
class Outcome:
    """What one rank did with a run: a `value`, or an `error` text (a traceback, an exit code, a stack)."""

    value: Any = None
    error: str | None = None
    exception: BaseException | None = None


class RunFailedError(ZeroShardError, RuntimeError):
    """A run in which a rank raised, died or did not answer in time. `outcomes` has one entry per rank."""

    def __init__(self, message: str, outcomes: Sequence[Outcome] = ()) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection


class RankPool:
    """`size` worker processes of one gloo group, started at first use, one torch thread each.

    `quiet` drops what they write to stdout, also from C++: gloo of torch 2.9 prints a line for each group.
    """

    def __init__(self, size: int, *, quiet: bool = False) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one rank, got {size}")
        self.size = size
        self._quiet = quiet
        self._workers: list[_Worker] = []
        self._directory = ""
        self._lock = threading.Lock()
        _open_pools.add(self)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 5.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(rank, world, *args, **kwargs)` on every rank; the results in rank order.

        `timeout` bounds the run in seconds (not the start of the workers). After the first failure the other
        ranks have `grace` seconds to end by themselves, then they are stopped. Raises `RunFailedError` with
        the remote tracebacks, or with each rank's current stack when the time is over.
        """
        request = _pickle_request(fn, args, kwargs)
        with self._lock:
            try:
                self._start()
                for worker in self._workers:
                    with contextlib.suppress(OSError):  # a worker that died since is found below, by its EOF
                        worker.pipe.send_bytes(request)
                outcomes = self._collect(timeout, grace)
            except BaseException:  # Ctrl-C as well: nobody would read the answers that are still to come
                self._stop()
                raise
            if any(outcome.error is not None for outcome in outcomes):
                self._stop()
                _raise_failure(fn, outcomes)
            return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End the workers. The pool starts new ones if it is used again."""
        with self._lock:
            self._stop()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def process_ids(self) -> list[int]:
        """Process ids of the running workers, by rank; empty before the first run."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _start(self) -> None:
        if self._workers:
            return
        self._directory = tempfile.mkdtemp(prefix="zeroshard-ranks-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.size, self._directory, self._quiet),
                name=f"zeroshard-rank-{rank}",
            )
            process.start()
            theirs.close()  # so that our end sees EOF when the worker dies
            self._workers.append(_Worker(process, ours))
        outcomes = self._collect(_START_TIMEOUT, grace=1.0)
        failed = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
        if failed:
            raise RunFailedError(
                "the workers did not start. A script must use its pool under `if __name__ == '__main__':`, "
                "because workers import it.\n" + "\n".join(failed),
                outcomes,
            )

    def _collect(self, timeout: float, grace: float) -> list[Outcome]:
        """One outcome of every worker, waiting no longer than `timeout`, or `grace` after a failure."""
        outcomes: dict[int, Outcome] = {}
        rank_of = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting = [pipe for pipe, rank in rank_of.items() if rank not in outcomes]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = rank_of[pipe]
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        silent = [rank for rank in range(self.size) if rank not in outcomes]
        if silent:
            reason = (
                f"stopped {grace:g} s after another rank failed"
                if any(outcome.error for outcome in outcomes.values())
                else f"no answer within {timeout:g} s"
            )
            for rank, stack in self._stacks(silent).items():
                outcomes[rank] = Outcome(error=f"{reason}; its stack then:\n{stack}")
        return [outcomes[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> Outcome:
        worker = self._workers[rank]
        try:
            outcome = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(5.0)
            code = worker.process.exitcode
            ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return Outcome(error=f"the worker process (pid {worker.process.pid}) ended with {ended}")
        except Exception as error:
            return Outcome(error=f"its answer could not be unpickled here: {error!r}")
        assert isinstance(outcome, Outcome)
        return outcome

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stacks of all threads of `ranks`, written by faulthandler in the workers."""
        if _STACK_SIGNAL is None:
            return dict.fromkeys(ranks, "(stacks are not available on this system)")
        for rank in ranks:
            process = self._workers[rank].process
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, _STACK_SIGNAL)
        time.sleep(0.5)
        stacks = {}
        for rank in ranks:
            try:
                with open(_stack_file(self._directory, rank), encoding="utf-8", errors="replace") as file:
                    stacks[rank] = file.read().rstrip() or "(no stack was written)"
            except OSError as error:
                stacks[rank] = f"(no stack: {error})"
        return stacks

    def _stop(self) -> None:
        """Close the pipes, which asks the workers to end; then end our own that did not."""
        for worker in self._workers:
            worker.pipe.close()
        deadline = time.monotonic() + 1.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.process.close()
        self._workers = []
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""


_open_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_open_pools):
        pool.close()


def _pickle_request(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    cure = "Move it to the top level of a module that the workers can import, and pass what it closes over."
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if getattr(fn, "__module__", None) == "__main__" and not os.path.isfile(script):
        raise RunFailedError(
            f"{fn!r} is defined at an interactive prompt; worker processes cannot import it. {cure}"
        )
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise RunFailedError(
            f"{fn!r} cannot be sent to worker processes, which import it by name: {error}. {cure}"
        ) from error
    try:
        body = pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise RunFailedError(
            f"the arguments of {fn!r} cannot be pickled for the workers: {error}. "
            "Pass plain data (numbers, strings, tensors, importable functions)."
        ) from error
    return pickle.dumps((list(sys.path), body))


def _raise_failure(fn: Callable[..., Any], outcomes: Sequence[Outcome]) -> None:
    name = getattr(fn, "__qualname__", repr(fn))
    failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error is not None]
    text = "\n".join(f"--- rank {rank}: {(outcome.error or '').rstrip()}" for rank, outcome in failed)
    cause = next((outcome.exception for _, outcome in failed if outcome.exception is not None), None)
    raise RunFailedError(
        f"{name} failed on ranks {[rank for rank, _ in failed]} of {len(outcomes)}:\n{text}", outcomes
    ) from cause


def _stack_file(directory: str, rank: int) -> str:
    return os.path.join(directory, f"stack-{rank}")


# Below: the worker process.


def _serve(pipe: Connection, rank: int, world: int, directory: str, quiet: bool) -> None:
    """The life of a worker: join the group, then answer requests until the pipe closes."""
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    stack = open(_stack_file(directory, rank), "w", encoding="utf-8")  # noqa: SIM115 - lives with the process
    if _STACK_SIGNAL is not None:
        faulthandler.register(_STACK_SIGNAL, file=stack, all_threads=True)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    _answer(pipe, lambda: _join_group(rank, world, directory))
    while True:
        request = requests.get()
        _answer(pipe, lambda request=request: _call(request, rank, world))  # type: ignore[misc]


def _read_requests(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    """A thread of its own, so that the end of the parent is seen while the main thread computes."""
    try:
        while True:
            requests.put(pipe.recv_bytes())
    except (EOFError, OSError):
        # Neither atexit nor destructors: gloo's would wait for peers that are ending too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _join_group(rank: int, world: int, directory: str) -> None:
    if sys.platform == "linux":
        # All ranks are on this host: works without a network and with a host name that does not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
    rendezvous = "file://" + os.path.join(directory, "rendezvous")  # a file, so no port can be taken
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)


def _call(request: bytes, rank: int, world: int) -> Any:
    path, body = pickle.loads(request)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    try:
        fn, args, kwargs = pickle.loads(body)
    except (AttributeError, ImportError) as error:
        raise RunFailedError(
            f"the function or an argument could not be imported in the worker: {error}. "
            "Move it to the top level of a module that the workers can import."
        ) from error
    return fn(rank, world, *args, **kwargs)


def _answer(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        outcome = Outcome(value=call())
    except BaseException as error:  # pytest's failures and SystemExit as well: the worker serves on
        outcome = Outcome(error=traceback.format_exc(), exception=_picklable(error))
    try:
        answer = pickle.dumps(outcome)
    except Exception as error:
        answer = pickle.dumps(Outcome(error=f"its result cannot be pickled: {error}"))
    with contextlib.suppress(OSError):  # the parent is gone; the reading thread ends this process
        pipe.send_bytes(answer)


def _picklable(error: BaseException) -> BaseException | None:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return copy if type(copy) is type(error) else None
