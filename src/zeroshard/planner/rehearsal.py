"""The real engine as rank 0 of N, with collectives that move nothing and tensors that have no memory.

So there is no second model of what a run plans or takes that could drift from the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.assembly import build_engine, policy_of
from zeroshard.comm import FakeCollectives
from zeroshard.config import RawConfig, parse, require_supported
from zeroshard.engine import Engine
from zeroshard.initialization import facts_of
from zeroshard.materialize import Groups
from zeroshard.world import World

__all__ = ["rehearse"]


@contextlib.contextmanager
def rehearse(
    build: Callable[[], nn.Module], raw: Mapping[str, Any] | RawConfig, ranks: int, **assumed: Any
) -> Iterator[Engine]:
    """The engine of `raw`, a config, over what `build` returns, as rank 0 of `ranks`; inside the block all tensors
    are fake. `assumed`: fields of `AutoFacts` for what the config leaves to "auto" and the model does not tell.

    Raises ConfigError or ModelError as `initialize` does.
    """
    device = torch.device("cpu")
    world = World(rank=0, size=ranks, size_origin="--ranks", device=device, group=None)
    with _Fakes():
        model = build()
        config = parse(raw, facts=replace(facts_of(model, None, world), **assumed))
        require_supported(config)
        batch = config.batch_on(ranks, world.size_origin)
        policy = policy_of(config, batch, ranks)
        sharded = FakeCollectives(0, policy.shard_size)
        second = FakeCollectives(0, policy.secondary_size) if policy.secondary_size > 1 else None
        replicate = FakeCollectives(0, policy.replicate_size, ranks)
        groups = Groups(gather=sharded, reduce=sharded, replicate=replicate, secondary=second)
        yield build_engine(model, config, batch, groups, device)


class _Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that `module.to(dtype)` can convert.

    torch's mode remembers the tensors it has made by weak references, and a module exchanges its parameters for
    those of another dtype only where nothing refers to them. The memory is for real tensors that come back, and
    here are none.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.fake_tensor_converter.tensor_memo.clear()
