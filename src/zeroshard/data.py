"""Data for training: each rank's part of a dataset, from a position that can be saved and resumed.

A position is an epoch and the batches given in it. All ranks are at the same one, so the state that one rank
saves is the state of all. For a dataset with indices a position is also a place in the epoch's order, which does
not depend on the number of ranks: rank r of N takes each N-th sample from the r-th on, so after k batches of b
samples the ranks together have been given the first k*b*N. With 10 samples, 2 ranks and b = 2, unshuffled:

    batch      0          1          2
    rank 0     0 2        4 6        8
    rank 1     1 3        5 7        9
    together   0 1 2 3    4 5 6 7    8 9
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from zeroshard.clock import Clock
from zeroshard.errors import ConfigError, StateError

__all__ = ["EpochCount", "RepeatingLoader", "TrainingLoader"]

log = logging.getLogger("zeroshard")


class EpochCount:
    """In the place of a sampler where the dataset has an order of its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@dataclass
class _Position:
    epoch: int
    batches: int
    """Given so far in this epoch."""


class TrainingLoader:
    """One rank's part of `dataset`, in batches; each pass over it is an epoch, in an order of its own.

    Args:
        dataset: with indices (`__len__` and `__getitem__`), or an IterableDataset, which each rank reads whole
            unless it shards itself.
        batch_size: samples per batch of one rank.
        rank, world: this rank and their number.
        shuffle, seed: a new permutation for each epoch, the same on all ranks; not for an IterableDataset.
        drop_last: leave out what does not fill a batch on every rank. Otherwise the last batch may be smaller,
            and samples from the start of the order are repeated until all ranks have equally many, as in
            `torch.utils.data.DistributedSampler`.
        collate_fn, num_workers, pin_memory: as of `torch.utils.data.DataLoader`.

    A pass that is left early (`break`) is over: the next `iter()` is the next epoch. `set_epoch(n)`, also that of
    `sampler`, makes n the epoch of the next pass; nobody has to call it. Raises ConfigError for what cannot be
    loaded from.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rank: int,
        world: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"a loader's batch_size is a number of samples from 1 on; got {batch_size}")
        if not 0 <= rank < world:
            raise ConfigError(f"a loader's rank is from 0 to world - 1; got rank {rank} of {world}")
        iterable = isinstance(dataset, IterableDataset)
        if not iterable and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigError(
                f"a dataset has __len__ and __getitem__, or is a torch.utils.data.IterableDataset; "
                f"got {type(dataset).__name__}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world = world
        self.drop_last = drop_last
        self.sampler: DistributedSampler[Any] | EpochCount
        if iterable:
            self.sampler = EpochCount()
        else:
            self.sampler = DistributedSampler(dataset, world, rank, shuffle, seed, drop_last)
        self._order = {"shuffle": shuffle, "seed": seed}
        self._iterable = iterable
        self._loading: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
        }
        self.clock: Clock | None = None
        """Times the wait for batches."""
        self._resumed: _Position | None = None
        self._now: _Position | None = None  # of the newest pass, until it has given its last batch

    def __len__(self) -> int:
        """Batches of a whole epoch, equally many on all ranks. TypeError for a dataset without a length."""
        samples = len(cast(Sized, self.dataset if self._iterable else self.sampler))
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch."""
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """The next epoch; after `load_state_dict` what is left of the one that was resumed."""
        start = self._next()
        if self._resumed is not None and start.epoch != self._resumed.epoch and self._resumed.batches:
            log.warning(
                "set_epoch(%d) after a resume in the middle of epoch %d: what is left of that epoch is not read",
                start.epoch,
                self._resumed.epoch,
            )
        batches = self._stream(start.batches) if self._iterable else self._indexed(start.batches)
        self._resumed = None
        self._now = start
        self.sampler.set_epoch(start.epoch + 1)
        return self._give(start, batches)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in. The same on all ranks.

        Inside the loop over a pass, the batch in hand counts as given; batches that workers have ready do not.
        With the last batch of an epoch in hand (of an IterableDataset: after it) it is the start of the next.
        """
        position = self._now or self._next()
        return {
            "epoch": position.epoch,
            "batches": position.batches,
            "samples": self._samples(),
            "world": self.world,
            "batch_size": self.batch_size,
            "num_workers": self._loading["num_workers"],
            **self._order,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass start where `state` was taken.

        At the start of an epoch the number of ranks and the batch size may be others than in the state. Within
        an epoch they may where the samples given so far are whole batches here too; samples that were given are
        not loaded again. An IterableDataset is read up to the position, and needs the same numbers.

        Raises StateError where samples would be repeated or left out.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise StateError(f"not the state of a TrainingLoader: without {', '.join(sorted(missing))}")
        if state["samples"] != self._samples():
            raise StateError(
                f"the loader's state is of {_described(state['samples'])}, this loader has "
                f"{_described(self._samples())}. Resume with the same dataset, or start at an epoch of your choice "
                f"by set_epoch(n)"
            )
        position = _Position(state["epoch"], state["batches"])
        if position.batches:
            position.batches = self._batches_within(state)
        if not self._iterable and position.batches == len(self) > 0:
            # drop_last cuts off more with larger batches: nothing may be left of this epoch.
            position = _Position(position.epoch + 1, 0)
        self._resumed = position
        self._now = None
        self.sampler.set_epoch(position.epoch)

    def _batches_within(self, state: Mapping[str, Any]) -> int:
        """The batches of this loader that hold what `state` has given of its epoch."""
        where = f"the loader's state is in epoch {state['epoch']}, after {state['batches']} batches"
        fixed = ("world", "batch_size", "num_workers") if self._iterable else ("shuffle", "seed")
        here = self.state_dict()
        for name in fixed:
            if state[name] != here[name]:
                raise StateError(
                    f"{where} with {name} = {state[name]}; here it is {here[name]}, and the order of samples "
                    f"another one. Resume with {name} = {state[name]}, or from a state at the start of an epoch"
                )
        if self._iterable:
            return int(state["batches"])
        given = int(state["batches"] * state["batch_size"] * state["world"])
        together = self.batch_size * self.world
        if given % together:
            raise StateError(
                f"{where} of {state['batch_size']} samples on {state['world']} ranks = {given} samples; here "
                f"{self.batch_size} samples on {self.world} ranks are {together} at a time, and {given} is not a "
                f"multiple of it. Resume with a batch size and ranks whose product divides {given}, or from a "
                f"state at the start of an epoch"
            )
        return given // together

    def _next(self) -> _Position:
        """Where the next pass starts: only the sampler knows the epoch, users set it there."""
        epoch = self.sampler.epoch
        resumed = self._resumed
        return _Position(epoch, resumed.batches if resumed is not None and resumed.epoch == epoch else 0)

    def _samples(self) -> int | None:
        return None if self._iterable else len(cast(Sized, self.dataset))

    def _indexed(self, start: int) -> Iterator[Any]:
        """Skipped where indices are made, so that what is skipped is not loaded."""
        indices = list(cast("DistributedSampler[Any]", self.sampler))[start * self.batch_size :]
        chosen = BatchSampler(indices, self.batch_size, self.drop_last)
        return iter(DataLoader(self.dataset, batch_sampler=chosen, **self._loading))

    def _stream(self, start: int) -> Iterator[Any]:
        batches = iter(DataLoader(self.dataset, self.batch_size, drop_last=self.drop_last, **self._loading))
        if start:
            log.warning("resuming an iterable dataset: reading past %d batches", start)
            read = sum(1 for _ in islice(batches, start))
            if read < start:
                raise StateError(
                    f"the loader's state is after {start} batches, and the iterable dataset ended after {read}. "
                    f"Resume with the same data"
                )
        return batches

    def _give(self, position: _Position, batches: Iterator[Any]) -> Iterator[Any]:
        last = None if self._iterable else len(self)
        for batch in self._timed(batches):
            position.batches += 1
            if position.batches == last:
                self._end(position)
            yield batch
        self._end(position)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        while True:
            with contextlib.nullcontext() if self.clock is None else self.clock.phase("data"):
                batch = next(batches, nothing)
            if batch is nothing:
                return
            yield batch

    def _end(self, position: _Position) -> None:
        if self._now is position:  # an older pass says nothing about where the newest is
            self._now = None


class RepeatingLoader:
    """An iterator without an end: when `loader` ends, a new pass over it begins.

    Raises ConfigError when a new pass gives nothing, as that of an empty loader, or of an iterator that was
    handed in where what it iterates over was meant.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._pass: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches of one pass."""
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # Twice: the pass at hand may be at its end, and so may one that was resumed.
        for _ in range(2):
            if self._pass is None:
                self._pass = iter(self.loader)
            try:
                return next(self._pass)
            except StopIteration:
                self._pass = None
        raise ConfigError(
            f"RepeatingLoader: a new pass over {type(self.loader).__name__} gives no batch. It is empty, or an "
            f"iterator that can be used once; pass a loader with batches in it"
        )

    def state_dict(self) -> dict[str, Any]:
        """That of the loader."""
        state: dict[str, Any] = cast(Any, self.loader).state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the loader; the pass at hand is left."""
        cast(Any, self.loader).load_state_dict(state)
        self._pass = None


def _described(samples: int | None) -> str:
    return "an iterable dataset" if samples is None else f"a dataset of {samples} samples"
