"""Who runs: each contestant is built from the same decoder and trains with the same AdamW, fp32, no clipping.

A contestant is four methods. `step` is one whole optimizer step; the rest is asked outside the clock.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from decoder import Decoder
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LR = 1e-4  # the batches are noise: at 1e-3 the loss runs away, and rounding with it


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)


def resting_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes on this rank between two steps, of plain PyTorch's objects."""
    parameters = list(model.parameters())
    states = (value for state in optimizer.state.values() for value in state.values())
    return {
        "parameters": local_bytes(parameters),
        "gradients": local_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer state": local_bytes(value for value in states if isinstance(value, Tensor)),
    }


def local_bytes(tensors: Iterable[Tensor]) -> int:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


class Contestant:
    """Plain PyTorch without communication: the base class, and the floor of the overhead table."""

    theory: float | None = 0.0  # elements moved per step, in multiples of the number of parameters

    def __init__(self, model: Decoder) -> None:
        self.model: nn.Module = model
        self.optimizer = adamw(model)

    def step(self, ids: Tensor) -> Tensor:
        loss = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def bytes_by_category(self) -> dict[str, int]:
        return resting_bytes(self.model, self.optimizer)

    def elements_sent(self) -> Mapping[str, int] | None:
        """Of all steps so far, by collective, where this contestant's traffic does not pass through torch."""
        return None

    def close(self) -> None:
        return None


class DDP(Contestant):
    theory = 2.0

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def bytes_by_category(self) -> dict[str, int]:
        # The buckets outlive `zero_grad`, inside the reducer.
        return super().bytes_by_category() | {"gradients": local_bytes(self.model.parameters())}


class FSDP2(Contestant):
    theory = 3.0

    def __init__(self, model: Decoder) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        super().__init__(model)


class DeepSpeed(Contestant):
    def __init__(self, model: Decoder, stage: int, batch: int) -> None:
        import deepspeed

        self.theory = 3.0 if stage == 3 else 2.0
        config = zero_config(stage, batch) | {"zero_allow_untested_optimizer": True}
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=adamw(model), config=config, dist_init_required=False
        )

    def step(self, ids: Tensor) -> Tensor:
        loss = self.model(ids)
        self.model.backward(loss)
        self.model.step()
        return loss.detach()

    def bytes_by_category(self) -> dict[str, int]:
        return {}


class ZeroShard(Contestant):
    """As `zeroshard.initialize` makes it, with counters around its collectives: they need not pass torch."""

    def __init__(self, model: Decoder, stage: int, batch: int) -> None:
        from zeroshard.assembly import build_engine, policy_of
        from zeroshard.comm import CountingCollectives
        from zeroshard.config import parse, resolve_batch
        from zeroshard.initialization import open_groups
        from zeroshard.materialize import Groups
        from zeroshard.world import join

        self.theory = 3.0 if stage == 3 else 2.0
        world = join()
        config = parse(zero_config(stage, batch))
        plan = resolve_batch(None, batch, None, world.size, world.size_origin)
        groups = open_groups(policy_of(config, plan, world.size), world)
        self.counters = {
            name: CountingCollectives(getattr(groups, name)) for name in ("gather", "reduce", "replicate")
        }
        self.engine: Any = build_engine(
            model, config, plan, Groups(**self.counters), world.device, adamw(model)
        )

    def step(self, ids: Tensor) -> Tensor:
        loss = self.engine(ids)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def bytes_by_category(self) -> dict[str, int]:
        return {category: measured for category, _, measured in self.engine.memory()}

    def elements_sent(self) -> Mapping[str, int]:
        """fp32 elements; an all-reduce counts twice. `agreement`: the norm and one flag per parameter."""
        kinds = {"all_reduce": ("all-reduce", 2), "sum_to_host": ("agreement", 4)}
        sent: Counter[str] = Counter()
        for counter in self.counters.values():
            if counter.size > 1:
                for verb, traffic in counter.counts().items():
                    kind, passes = kinds.get(verb, (verb.replace("_", "-"), 1))
                    sent[kind] += passes * traffic.buffer_bytes // 4
        return sent

    def close(self) -> None:
        self.engine.close()


def zero_config(stage: int, batch: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1.0
        # Nothing persists and nothing is kept from forward to backward, as in FSDP2: gathered twice, 3P in all.
        "zero_optimization": {
            "stage": stage,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        },
    }


def known(batch: int) -> dict[str, Callable[[Decoder], Contestant]]:
    """Every contestant that can run here, in the order of the tables. `batch` is per rank."""
    found: dict[str, Callable[[Decoder], Contestant]] = {"plain": Contestant, "ddp": DDP, "fsdp2": FSDP2}
    engines: dict[str, type[DeepSpeed] | type[ZeroShard]] = {"deepspeed": DeepSpeed, "zeroshard": ZeroShard}
    for package, engine in engines.items():
        if importlib.util.find_spec(package) is None:
            continue
        for stage in (1, 2, 3) if engine is DeepSpeed else (0, 1, 2, 3):
            found[f"{package}-{stage}"] = bind(engine, stage, batch)
    return found


def bind(
    engine: type[DeepSpeed] | type[ZeroShard], stage: int, batch: int
) -> Callable[[Decoder], Contestant]:
    return lambda model: engine(model, stage, batch)
