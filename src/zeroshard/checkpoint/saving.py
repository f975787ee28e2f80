"""Saving an engine: at once, or while training goes on."""

from __future__ import annotations

import logging
import os
import time
import warnings
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zeroshard.checkpoint.contents import collect, digests_of_frozen
from zeroshard.checkpoint.directory import Saves
from zeroshard.checkpoint.extras import EXTRAS, checked_blob, facts_of, gather_extras, random_state
from zeroshard.checkpoint.storage import Writer
from zeroshard.checkpoint.together import together, told
from zeroshard.checkpoint.views import FlatPiece, PieceSavePlanner
from zeroshard.comm import ballot, unanimous
from zeroshard.errors import CheckpointError
from zeroshard.states import States

if TYPE_CHECKING:
    from zeroshard.checkpoint.methods import Checkpoints

__all__ = ["Saver"]

log = logging.getLogger("zeroshard")


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One checkpoint to be written by all ranks."""

    saves: Saves
    tag: str
    contents: dict[str, Any]
    writer: Writer
    keep_last: int
    keep_every: int
    rank: int
    world: int


class Saver:
    """The saves of one engine. At most one is being written at any time."""

    def __init__(self) -> None:
        self._running: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._group: dist.ProcessGroup | None = None

    def save(
        self,
        engine: Checkpoints,
        directory: str | os.PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        latest: bool,
        frozen: bool,
    ) -> None:
        """See `Checkpoints.save_checkpoint`."""
        began = time.monotonic()
        self.wait()
        states, options = engine._states, engine._config.checkpoint
        tag = tag if tag is not None else f"global_step{engine._update.attempted}"
        tag = _agreed(states, tag, options.tag_validation)
        saves = Saves(directory)
        base = None if frozen else digests_of_frozen(states)

        def prepare() -> dict[str, Any]:
            saves.check_tag(tag)
            engine._update.take_edits()
            found: dict[str, Any] = dict(collect(states, engine.module, engine.optimizer, frozen=frozen))
            found[f"rng/{states.rank}"] = checked_blob(random_state(engine), "the random state")
            if states.rank == 0:
                found[EXTRAS] = gather_extras(engine, client_state, base)
            return found

        contents = together(states, "save_checkpoint", prepare)
        in_background = options.writer is not None and options.writer.decoupled
        if in_background:
            contents = {name: _on_host(value) for name, value in contents.items()}
        job = _Job(
            saves=saves,
            tag=tag,
            contents=contents,
            writer=Writer(saves, tag, facts_of(engine), latest=latest),
            keep_last=options.keep_last,
            keep_every=options.keep_every,
            rank=states.rank,
            world=states.world,
        )
        if not in_background:
            _write(job, None, began)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-save")
            # Its collectives run beside those of training, so they need an order of their own.
            self._group = dist.new_group(backend="gloo") if states.world > 1 else None
        self._running = self._thread.submit(_write, job, self._group, began)
        self._running.add_done_callback(_tell)
        if states.rank == 0:
            log.info("checkpoint %s: training waited %.2f s, and goes on", tag, time.monotonic() - began)

    def wait(self) -> None:
        """Until what is being written is on disk. Raises what went wrong with it, once."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """The same, and the end."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._group is not None:
                dist.destroy_process_group(self._group)
            self._thread = self._group = None


def _agreed(states: States, tag: str, validation: str) -> str:
    """Rank 0's tag, when ranks do not give the same. All write to one place."""
    (same,) = unanimous(states.ask(ballot([zlib.crc32(tag.encode())])), states.world)
    if same:
        return tag
    tags: list[Any] = [None] * states.world
    dist.all_gather_object(tags, tag)
    told = f"ranks gave save_checkpoint different tags: {', '.join(map(repr, dict.fromkeys(tags)))}"
    if validation == "Fail":
        raise CheckpointError(f"{told}. Give the same on every rank (checkpoint.tag_validation is Fail)")
    if validation == "Warn" and states.rank == 0:
        log.warning("%s; rank 0's is used", told)
    return str(tags[0])


def _on_host(value: Any) -> Any:
    """A copy in host memory, which training does not change."""
    if isinstance(value, FlatPiece):
        return value.on_host()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _tell(running: Future[None]) -> None:
    """At once, since a run may end without another save or a close, which raise it."""
    if not running.cancelled() and (error := running.exception()) is not None:
        log.error("%s", error)


def _write(job: _Job, group: dist.ProcessGroup | None, began: float) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                job.contents,
                storage_writer=job.writer,
                planner=PieceSavePlanner(),
                process_group=group,
                no_dist=job.world == 1,
            )
    except CheckpointException as failures:
        if job.rank == 0:
            job.saves.abandon(job.tag)
        what = f"checkpoint {job.tag!r} could not be saved in {job.saves.directory}"
        raise told(failures, what) from failures
    except (RuntimeError, ValueError) as error:
        # Of torch.distributed; what a rank raised itself came as the above.
        raise CheckpointError(
            f"checkpoint {job.tag!r} could not be saved in {job.saves.directory}: a rank was lost, or left before "
            f"all had written. What `latest` names is as before; the next save there clears up. ({error})"
        ) from error
    if job.rank != 0:
        return
    seconds = time.monotonic() - began
    log.info(
        "saved %s in %.2f s, %.0f MB/s on this rank",
        job.saves.directory / job.tag,
        seconds,
        job.writer.nbytes / 1e6 / seconds,
    )
    try:
        deleted = job.saves.prune(job.keep_last, job.keep_every, job.tag)
    except OSError as error:  # of this rank only, and what was to be saved is
        log.warning("older checkpoints in %s could not all be deleted: %s", job.saves.directory, error)
        return
    for old in deleted:
        log.info("deleted checkpoint %s, since checkpoint.keep_last is %d", old, job.keep_last)
