from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeroshard.data import RepeatingLoader, TrainingLoader
from zeroshard.errors import ConfigError, StateError

Batches = list[list[int]]


class Numbers(Dataset[int]):
    """0, 1, 2, ...; remembers what was loaded."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def make(size: int, batch: int = 2, rank: int = 0, world: int = 1, **named: Any) -> TrainingLoader:
    return TrainingLoader(Numbers(size), batch, rank, world, collate_fn=list, **named)


def stream(size: int, batch: int = 2, world: int = 1, **named: Any) -> TrainingLoader:
    return TrainingLoader(Stream(size), batch, 0, world, collate_fn=list, **named)


def flat(batches: Batches) -> list[int]:
    return [sample for batch in batches for sample in batch]


def epoch_of(loader: TrainingLoader, epoch: int) -> Batches:
    loader.set_epoch(epoch)
    return list(loader)


def resumed(loader: TrainingLoader, state: dict[str, Any]) -> TrainingLoader:
    """By way of JSON: a state is plain numbers."""
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


SIZES = st.integers(0, 40)
SMALL = st.integers(1, 5)


@given(SIZES, SMALL, SMALL, st.booleans(), st.booleans(), st.integers(0, 3))
def test_an_epoch_covers_the_dataset(
    size: int, batch: int, world: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    named = {"shuffle": shuffle, "drop_last": drop_last}
    loaders = [make(size, batch, rank, world, **named) for rank in range(world)]
    parts = [epoch_of(loader, epoch) for loader in loaders]
    assert {len(part) for part in parts} == {len(loaders[0])}
    seen = Counter(sample for part in parts for group in part for sample in group)
    if drop_last:
        assert set(seen.values()) <= {1}
        assert seen.total() == size // (world * batch) * world * batch
    else:
        assert set(seen) == set(range(size))
        assert seen.total() == math.ceil(size / world) * world


@given(SIZES, SMALL, SMALL, st.booleans(), st.integers(0, 9))
def test_the_order_is_that_of_torch(size: int, batch: int, world: int, drop_last: bool, seed: int) -> None:
    dataset = Numbers(size)
    for rank in range(world):
        sampler = DistributedSampler(dataset, world, rank, seed=seed, drop_last=drop_last)
        theirs = DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=drop_last, collate_fn=list)
        ours = make(size, batch, rank, world, seed=seed, drop_last=drop_last)
        assert len(ours) == len(theirs)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            assert list(ours) == list(theirs)


def test_each_pass_has_an_order_of_its_own() -> None:
    loader = make(50)
    first, second = list(loader), list(loader)
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(50))
    assert list(make(50, shuffle=False)) == list(make(50, shuffle=False))
    assert epoch_of(loader, 1) == second
    loader.sampler.set_epoch(0)
    assert list(loader) == first


def test_a_pass_that_is_left_is_over() -> None:
    loader = make(10)
    expected = epoch_of(make(10), 1)
    next(iter(loader))
    assert list(loader) == expected


@settings(max_examples=300)
@given(st.integers(1, 40), st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL), st.booleans(), st.data())
def test_resuming_gives_what_an_uninterrupted_run_gives(
    size: int, then: tuple[int, int], now: tuple[int, int], drop_last: bool, data: st.DataObject
) -> None:
    """On the same and on other numbers of ranks and batch sizes, at any batch of any epoch."""
    (batch, world), (new_batch, new_world) = then, now
    before = make(size, batch, 0, world, drop_last=drop_last)
    taken = data.draw(st.integers(0, 3 * len(before)))
    for _ in islice((sample for _ in range(3) for sample in before), taken):
        pass
    state = before.state_dict()
    epoch, batches = divmod(taken, len(before)) if len(before) else (state["epoch"], 0)
    assert (state["epoch"], state["batches"]) == (epoch, batches)
    given = batches * batch * world
    for rank in range(new_world):
        loader = make(size, new_batch, rank, new_world, drop_last=drop_last)
        if given % (new_batch * new_world):
            with pytest.raises(StateError, match=f"= {given} samples"):
                resumed(loader, state)
            assert loader.state_dict()["batches"] == 0
            continue
        uninterrupted = make(size, new_batch, rank, new_world, drop_last=drop_last)
        skip = given // (new_batch * new_world)
        rest = epoch_of(uninterrupted, epoch)[skip:]
        resumed(loader, state)
        if rest or not skip:  # otherwise nothing is left of that epoch on these ranks
            assert list(loader) == rest
        assert list(loader) == epoch_of(uninterrupted, epoch + 1)


@given(st.integers(1, 30), SMALL, SMALL, SMALL, st.data())
def test_no_sample_is_repeated_or_left_out(
    size: int, batch: int, world: int, new_world: int, data: st.DataObject
) -> None:
    """The same claim without another loader as its measure: the ranks of two runs together."""
    length = len(make(size, batch, 0, world))
    taken = data.draw(st.integers(0, length - 1))
    seen: Counter[int] = Counter()
    for rank in range(world):
        loader = make(size, batch, rank, world)
        seen.update(sample for group in islice(loader, taken) for sample in group)
        state = loader.state_dict()
    try:
        rest = [resumed(make(size, batch, rank, new_world), state) for rank in range(new_world)]
    except StateError:
        assert taken * world % new_world
        return
    if taken:
        assert set(seen.values()) == {1}
    seen.update(sample for loader in rest for group in loader for sample in group)
    assert set(seen) == set(range(size))
    assert seen.total() == math.ceil(size / new_world) * new_world


def test_larger_batches_that_leave_nothing_of_an_epoch_resume_at_the_next() -> None:
    before = make(10, 2, drop_last=True)
    for _ in islice(before, 4):
        pass
    after = resumed(make(10, 4, 0, 2, drop_last=True), before.state_dict())
    assert (after.state_dict()["epoch"], after.state_dict()["batches"]) == (1, 0)
    assert list(after) == epoch_of(make(10, 4, 0, 2, drop_last=True), 1)


def test_what_is_skipped_is_not_loaded() -> None:
    before = make(20)
    for _ in islice(before, 4):
        pass
    after = resumed(make(20), before.state_dict())
    assert flat(list(after)) == after.dataset.loaded  # type: ignore[attr-defined]
    assert len(after.dataset.loaded) == 12  # type: ignore[attr-defined]


def test_a_state_counts_the_batch_in_hand() -> None:
    loader = make(6)
    states = [(0, 0)]
    for _ in range(2):
        for _ in loader:
            state = loader.state_dict()
            states.append((state["epoch"], state["batches"]))
    assert states == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_batches_that_workers_have_ready_are_not_given() -> None:
    loader = make(40, num_workers=2)
    batches = iter(loader)
    given = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    assert state["batches"] == 3
    del batches
    assert given + list(resumed(make(40), state)) == list(make(40))
    assert given + list(resumed(make(40, num_workers=1), state)) == list(make(40))


def test_a_state_survives_several_resumes() -> None:
    loader, got = make(20), []
    for _ in range(5):
        got += list(islice(loader, 2))
        assert loader.state_dict() == resumed(make(20), loader.state_dict()).state_dict()
        loader = resumed(make(20), loader.state_dict())
    assert got == list(make(20))
    assert list(loader) == epoch_of(make(20), 1)


def test_the_state_is_that_of_the_newest_pass() -> None:
    loader = make(10)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 0)
    next(newer)
    list(older)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 1)


def test_set_epoch_of_the_resumed_epoch_keeps_the_position(caplog: pytest.LogCaptureFixture) -> None:
    before = make(20)
    next(iter(before))
    loader = resumed(make(20), before.state_dict())
    loader.sampler.set_epoch(0)
    assert list(loader) == list(make(20))[1:]
    assert not caplog.records
    loader = resumed(make(20), before.state_dict())
    loader.set_epoch(2)
    assert loader.state_dict()["batches"] == 0
    assert list(loader) == epoch_of(make(20), 2)
    (record,) = caplog.records
    assert "set_epoch(2) after a resume in the middle of epoch 0" in record.getMessage()


def state_within(loader: TrainingLoader) -> dict[str, Any]:
    for _ in islice(loader, 3):
        pass
    return loader.state_dict()


def test_states_that_do_not_fit_are_refused() -> None:
    state = state_within(make(40, 4, 0, 2))
    cases = [
        (make(41, 4, 0, 2), "of a dataset of 40 samples, this loader has a dataset of 41 samples"),
        (stream(40), "this loader has an iterable dataset"),
        (
            make(40, 5, 0, 2),
            r"3 batches of 4 samples on 2 ranks = 24 samples; here 5 samples on 2 ranks are 10",
        ),
        (make(40, 4, 0, 4), r"here 4 samples on 4 ranks are 16 at a time, and 24 is not a multiple"),
        (make(40, 4, 0, 2, seed=7), "with seed = 0; here it is 7"),
        (make(40, 4, 0, 2, shuffle=False), "with shuffle = True; here it is False"),
    ]
    for loader, message in cases:
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert loader.state_dict()["epoch"] == loader.state_dict()["batches"] == 0
    with pytest.raises(StateError, match="not the state of a TrainingLoader: without batch_size, batches"):
        make(4).load_state_dict({"world": 1})


def test_at_the_start_of_an_epoch_only_the_dataset_has_to_be_the_same() -> None:
    before = make(40, 4, 0, 2)
    list(before)
    after = resumed(make(40, 3, 1, 5, seed=7, shuffle=True, num_workers=0), before.state_dict())
    assert list(after) == epoch_of(make(40, 3, 1, 5, seed=7), 1)
    with pytest.raises(StateError, match="of a dataset of 40 samples"):
        make(41, 4, 0, 2).load_state_dict(before.state_dict())


@given(st.integers(0, 12), st.integers(1, 4), st.data())
def test_an_iterable_dataset_is_read_up_to_the_position(size: int, batch: int, data: st.DataObject) -> None:
    whole = list(stream(size, batch))
    assert flat(whole) == list(range(size))
    taken = data.draw(st.integers(0, len(whole)))
    before = stream(size, batch)
    for _ in islice(before, taken):
        pass
    after = resumed(stream(size, batch), before.state_dict())
    assert list(after) == whole[taken:]
    assert after.state_dict()["epoch"] == 1
    assert list(after) == whole


def test_what_an_iterable_dataset_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    state = state_within(stream(20))
    list(resumed(stream(20), state))
    assert [record.getMessage() for record in caplog.records] == [
        "resuming an iterable dataset: reading past 3 batches"
    ]
    for other, name in ((stream(20, 3), "batch_size"), (stream(20, world=2), "world")):
        with pytest.raises(StateError, match=f"with {name} = "):
            other.load_state_dict(state)
    with pytest.raises(StateError, match="with num_workers = 0; here it is 1"):
        stream(20, num_workers=1).load_state_dict(state)
    shorter = resumed(stream(2), state)
    with pytest.raises(StateError, match="ended after 1"):
        iter(shorter)
    stream(20).sampler.set_epoch(3)
    with pytest.raises(TypeError, match="no len"):
        len(stream(20))


def test_a_dataset_with_tensors_is_collated_by_torch() -> None:
    loader = TrainingLoader([torch.ones(3)] * 4, 2, 0, 1)  # type: ignore[arg-type]
    assert [batch.shape for batch in loader] == [(2, 3), (2, 3)]
    assert (loader.batch_size, len(loader.dataset), len(loader.sampler)) == (2, 4, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Numbers(3), 0, 0, 1), "batch_size is a number of samples from 1 on; got 0"),
        ((Numbers(3), 1, 2, 2), "got rank 2 of 2"),
        ((iter([1]), 1, 0, 1), "got list_iterator"),
    ],
)
def test_what_cannot_be_loaded_from(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingLoader(*arguments)


def test_repeating_goes_on_with_the_next_epoch() -> None:
    loader = RepeatingLoader(make(6))
    assert len(loader) == 3
    assert list(islice(loader, 7)) == [
        *epoch_of(make(6), 0),
        *epoch_of(make(6), 1),
        *epoch_of(make(6), 2)[:1],
    ]
    assert list(islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("taken", range(8))
def test_repeating_resumes(taken: int) -> None:
    expected = list(islice(RepeatingLoader(make(6)), 12))
    before = RepeatingLoader(make(6))
    assert list(islice(before, taken)) == expected[:taken]
    after = RepeatingLoader(make(6))
    assert next(after) == expected[0]  # what it had begun is left
    after.load_state_dict(before.state_dict())
    assert list(islice(after, 12 - taken)) == expected[taken:]


def test_repeating_an_iterable_dataset_that_was_read_to_its_end() -> None:
    before = RepeatingLoader(stream(4))
    list(islice(before, 2))
    after = RepeatingLoader(stream(4))
    after.load_state_dict(before.state_dict())
    assert next(after) == [0, 1]


def test_repeating_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a new pass over list gives no batch"):
        next(RepeatingLoader([]))
    once = RepeatingLoader(iter([1]))
    assert next(once) == 1
    with pytest.raises(ConfigError, match="that can be used once"):
        next(once)
    with pytest.raises(AttributeError, match="state_dict"):
        RepeatingLoader([1]).state_dict()
