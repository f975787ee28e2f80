"""The seams that need no second process: local, fake, counting; and blocks, sums, argument checks."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.comm import (
    Collectives,
    CountingCollectives,
    FakeCollectives,
    LocalCollectives,
    SharedMemoryCollectives,
    TorchCollectives,
    Traffic,
    open_collectives,
)
from zeroshard.comm.blocks import Block, BlockPool
from zeroshard.comm.reduction import sum_in_rank_order
from zeroshard.errors import CommError

CPU = torch.device("cpu")


def test_all_seams_have_the_whole_protocol() -> None:
    for seam in (LocalCollectives(), FakeCollectives(0, 2), CountingCollectives(LocalCollectives())):
        assert isinstance(seam, Collectives)
    wanted = {name for name in vars(Collectives) if not name.startswith("_")} - {"size", "rank"}
    for kind in (TorchCollectives, SharedMemoryCollectives):
        assert wanted <= set(dir(kind))


def test_one_rank_needs_no_process_group() -> None:
    seam = open_collectives(None, CPU)
    assert isinstance(seam, LocalCollectives)
    assert (seam.rank, seam.size) == (0, 1)
    full, shard = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    seam.all_gather(full, shard).wait()
    assert full.tolist() == [1.0, 2.0, 3.0]
    seam.reduce_scatter(shard, full.mul_(2), average=True).wait()
    assert shard.tolist() == [2.0, 4.0, 6.0]
    seam.all_reduce(shard, average=True).wait()
    seam.broadcast(shard, 0)
    assert seam.sum_to_host(shard.double()) == [2.0, 4.0, 6.0]
    seam.close()


def test_wrong_arguments_are_named() -> None:
    seam = LocalCollectives()
    with pytest.raises(CommError, match=r"full has 4 elements and shard 3"):
        seam.all_gather(torch.zeros(4), torch.zeros(3))
    with pytest.raises(CommError, match=r"float64"):
        seam.all_gather(torch.zeros(4), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(CommError, match=r"contiguous 1-D"):
        seam.all_reduce(torch.zeros(2, 2), average=False)
    with pytest.raises(CommError, match=r"source is 1"):
        seam.broadcast(torch.zeros(2), 1)


def test_the_fake_works_without_data() -> None:
    seam = FakeCollectives(3, 64)
    with FakeTensorMode():
        full = seam.empty(640, dtype=torch.bfloat16, device=CPU)
        seam.all_gather(full, full[30:40]).wait()
        seam.reduce_scatter(full[30:40], full, average=True).wait()
        assert seam.sum_to_host(torch.zeros(2, dtype=torch.float64)) == [64.0, 64.0]
    assert seam.calls == [
        ("all_gather", 640, torch.bfloat16),
        ("reduce_scatter", 640, torch.bfloat16),
        ("sum_to_host", 2, torch.float64),
    ]


def test_counting_follows_the_ring_formulas() -> None:
    seam = CountingCollectives(FakeCollectives(0, 4))
    full = torch.zeros(1000, dtype=torch.uint8)
    seam.all_gather(full, full[:250]).wait()
    seam.all_gather(full, full[:250]).wait()
    seam.reduce_scatter(full[:250], full, average=False).wait()
    seam.all_reduce(full, average=False).wait()
    seam.broadcast(full, 0)
    assert seam.counts() == {
        "all_gather": Traffic(2, 2000, 1500),
        "reduce_scatter": Traffic(1, 1000, 750),
        "all_reduce": Traffic(1, 1000, 1500),
        "broadcast": Traffic(1, 1000, 1000),
    }
    seam.reset()
    assert seam.counts() == {}


def test_lent_memory_comes_back_with_its_last_view() -> None:
    dropped: list[Block] = []
    pool = BlockPool(dropped.append)
    tensor = pool.lend(100_000, torch.float32)
    found = pool.find(tensor[10:])
    assert found is not None
    assert found[1] == 40
    view = tensor.view(1000, 100)[5]
    del tensor
    gc.collect()
    assert pool.take(400_000) is not found[0]  # the view keeps it
    address = view.untyped_storage().data_ptr()
    del view, found
    assert pool.take(400_000).address == address


def test_the_pool_neither_grows_nor_maps_in_a_steady_state() -> None:
    pool = BlockPool(lambda block: None)
    pool.give(pool.take(1 << 20))
    mapped = pool.mapped_bytes
    for nbytes in [1 << 20, (1 << 20) - 5, 1 << 20] * 20:
        pool.give(pool.take(nbytes))
    assert pool.mapped_bytes == mapped


def test_free_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroshard.comm.blocks._KEPT_FREE", 4 << 20)
    dropped: list[Block] = []
    pool = BlockPool(dropped.append)
    for nbytes in range(1 << 20, 20 << 20, 1 << 20):
        pool.give(pool.take(nbytes))
    assert dropped
    assert pool.mapped_bytes <= (4 << 20) + (19 << 20) * 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("own", [0, 1, -1])
def test_sums_may_be_in_place_of_any_part(dtype: torch.dtype, ranks: int, own: int) -> None:
    parts = [torch.randint(-50, 50, (200_001,)).to(dtype) for _ in range(ranks)]
    wide = torch.float64 if dtype.is_floating_point else dtype
    wanted = torch.stack(parts).to(wide).sum(0)
    wanted = wanted.div(ranks, rounding_mode=None if dtype.is_floating_point else "trunc").to(dtype)
    also = torch.empty_like(wanted)
    sum_in_rank_order(parts[own], parts, ranks, also)
    assert torch.equal(parts[own], also)
    torch.testing.assert_close(parts[own], wanted)
