"""16-bit training: the numbers of plain PyTorch with a loss scale, whoever calls backward; steps that are not
finite are skipped on all ranks, or end the run with a name."""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

import pytest
import torch
from models import Block, Odd, features, sgd, tokens, two_groups
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import NonFiniteError, StateError
from zeroshard.testing import FP32_TOLERANCE, RankPool, assert_parity

STAGES = (0, 1, 2, 3)


def config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return {
        "gradient_clipping": 0,
        "communication_data_type": "fp32",
        **more,
        "zero_optimization": zero,
    }


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_fp16_equals_plain_pytorch_with_a_loss_scale(ranks2: RankPool, stage: int, accumulation: int) -> None:
    settings = config(
        stage,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.05,
        fp16={"enabled": True, "initial_scale_power": 10},
    )
    assert_parity(Odd, tokens, settings, optimizer_fn=sgd, pool=ranks2, tolerance=FP32_TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", STAGES)
def test_autocast_equals_autocast(ranks2: RankPool, stage: int, dtype: str) -> None:
    settings = config(
        stage,
        gradient_accumulation_steps=2,
        torch_autocast={"enabled": True, "dtype": dtype},
        fp16={"initial_scale_power": 8},
    )
    assert_parity(Net, features, settings, optimizer_fn=sgd, pool=ranks2, tolerance=FP32_TOLERANCE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_everything_in_bf16(ranks2: RankPool, stage: int) -> None:
    """Masters and moments too: as plain bf16 PyTorch, up to the rounding of each step's bf16 gradient."""
    settings = config(
        stage,
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    )
    assert_parity(Net, features, settings, optimizer_fn=two_groups, pool=ranks2)


class Net(nn.Module):
    """Scalar output; `blocks` for the groups of `two_groups`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6, 5) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).float().square().mean()


class Logits(Net):
    def forward(self, x: Tensor) -> Any:
        return {"logits": self.logits(x), "inputs": x}


def memory_of_states(rank: int, world: int, stage: int) -> tuple[int, int, set[str]]:
    torch.manual_seed(0)
    model = Net()
    sixteen = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=config(stage, bf16=sixteen))
    engine.backward(engine(features(0, 0, rank)))
    engine.step()
    bill = {category: measured for category, _, measured in engine.memory()}
    predicted = {category: value for category, value, _ in engine.memory()}
    assert bill == {**predicted, "gathered peak": bill["gathered peak"]}
    dtypes = {str(v.dtype) for s in optimizer.state.values() for v in s.values() if v.dim()}
    engine.close()
    return bill["master"], bill["optimizer state"], dtypes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_states_take_two_bytes(ranks2: RankPool, stage: int) -> None:
    elements = sum(p.numel() for p in Net().parameters())
    results = ranks2.run(memory_of_states, stage)
    assert sum(states for _, states, _ in results) == 2 * 2 * elements
    assert all(master == 0 and dtypes == {"torch.bfloat16"} for master, _, dtypes in results)


# ---- the loss scale without engine.backward ---------------------------------------------------------


def fp16(**more: Any) -> dict[str, Any]:
    return {"enabled": True, "initial_scale_power": 10, **more}


def engine_of(model: nn.Module, stage: int, rate: float = 0.1, **more: Any) -> Any:
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        config=config(stage, **{"fp16": fp16(), **more}),
    )
    return engine


def masters_after(build: type[nn.Module], stage: int, train: Any, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = build()
    engine = engine_of(model, stage)
    for step in range(3):
        train(engine, step, rank)
    values = [engine.full_fp32(p) for p in model.parameters()]
    engine.close()
    return values


def by_engine(engine: Any, step: int, rank: int) -> None:
    out = engine(features(step, 0, rank))
    engine.backward(out["logits"].float().square().mean())
    engine.step()


def by_loss(engine: Any, step: int, rank: int) -> None:
    engine(features(step, 0, rank))["logits"].float().square().mean().backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def by_scaled_loss(engine: Any, step: int, rank: int) -> None:
    engine.scale(engine(features(step, 0, rank))["logits"].float().square().mean()).backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def by_given_gradient(engine: Any, step: int, rank: int) -> None:
    logits = engine(features(step, 0, rank))["logits"]
    logits.backward(2 * logits.detach() / logits.numel())
    engine.step()


def by_parts(engine: Any, step: int, rank: int) -> None:
    """Parts of the model are called from outside: each is a boundary."""
    x = features(step, 0, rank)
    for block in engine.module.blocks:
        x = block(x)
    engine.module.head(x).float().square().mean().backward()
    engine.step()


def scaled_alike(rank: int, world: int, stage: int, how: str) -> float:
    expected = masters_after(Logits, stage, by_engine, rank)
    found = masters_after(Logits, stage, globals()[how], rank)
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("how", ["by_loss", "by_scaled_loss", "by_given_gradient", "by_parts"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_backward_has_the_loss_scale(ranks2: RankPool, stage: int, how: str) -> None:
    # Where the scale goes on decides which fp16 roundings happen: the last bits of fp16 may differ.
    assert max(ranks2.run(scaled_alike, stage, how)) <= 2e-4


def input_gradient(rank: int, world: int, stage: int) -> float:
    """What flows out at the model's inputs has no scale."""
    torch.manual_seed(0)
    model = Logits()
    plain = copy.deepcopy(model)
    engine = engine_of(model, stage)
    x = features(0, 0, rank).requires_grad_()
    engine(x)["logits"].float().square().mean().backward()
    y = features(0, 0, rank).requires_grad_()
    plain(y)["logits"].float().square().mean().backward()
    engine.close()
    return float((x.grad - y.grad).abs().max() / y.grad.abs().max())


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_inputs_are_true(ranks2: RankPool, stage: int) -> None:
    assert max(ranks2.run(input_gradient, stage)) <= 1e-2


def gradient_penalty(rank: int, world: int, stage: int, managed: bool) -> float:
    """A loss over a gradient: what goes through the model twice is scaled once."""
    torch.manual_seed(0)
    model = Logits()
    plain = copy.deepcopy(model)
    engine = engine_of(model, stage)

    def loss_of(call: Any, x: Tensor) -> Tensor:
        out = call(x.requires_grad_())["logits"].float()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + 10 * slope.square().mean()

    loss = loss_of(engine, features(0, 0, rank))
    engine.backward(loss) if managed else loss.backward()
    found = [zeroshard.safe_get_full_grad(p) for p in model.parameters()]
    for other in range(world):
        (loss_of(plain, features(0, 0, other)) / world).backward()
    engine.close()
    expected = [p.grad for p in plain.parameters()]
    scale = max(float(g.abs().max()) for g in expected if g is not None)
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if b is not None) / scale


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_is_scaled_once(ranks2: RankPool, stage: int, managed: bool) -> None:
    assert max(ranks2.run(gradient_penalty, stage, managed)) <= 1e-2


class Maker(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.blocks[0](x)


def two_scales(rank: int, world: int, stage: int, managed: bool) -> tuple[float, float]:
    """One loss through two fp16 engines, one after the other, each with a scale of its own."""
    errors = []
    torch.manual_seed(0)
    maker, judge = Maker(), Logits()
    plain_maker, plain_judge = copy.deepcopy(maker), copy.deepcopy(judge)
    first = engine_of(maker, stage, fp16=fp16(initial_scale_power=4))
    second = engine_of(judge, stage, fp16=fp16(initial_scale_power=12))
    loss = second(first(features(0, 0, rank)))["logits"].float().square().mean()
    second.backward(loss) if managed else loss.backward()
    first.step()
    second.step()
    for other in range(world):
        (plain_judge(plain_maker(features(0, 0, other)))["logits"].square().mean() / world).backward()
    for engine, plain in ((first, plain_maker), (second, plain_judge)):
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        pairs = [
            (engine.full_fp32(p), q)
            for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)
        ]
        moved = max(float((0.1 * q.grad).abs().max()) for _, q in pairs if q.grad is not None)
        errors.append(max(float((p - q).abs().max()) for p, q in pairs) / moved)
        engine.close()
    return errors[0], errors[1]


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_engine_has_its_own_scale(ranks2: RankPool, stage: int, managed: bool) -> None:
    for errors in ranks2.run(two_scales, stage, managed):
        assert max(errors) <= 2e-2


def around_the_outputs(rank: int, world: int, stage: int) -> str:
    model = Net()
    engine = engine_of(model, stage)
    try:
        with engine.gathered():
            model.head.weight.float().square().sum().backward()
    except StateError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_without_scale_is_an_error(ranks2: RankPool, stage: int) -> None:
    for message in ranks2.run(around_the_outputs, stage):
        assert "'head.weight'" in message
        assert "engine.backward(loss)" in message


# ---- gradients that are not finite ------------------------------------------------------------------


def overflow_on_rank_1(rank: int, world: int, stage: int) -> list[Any]:
    """Only rank 1 overflows, at the third of five steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ticks = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    settings = config(stage, fp16=fp16(hysteresis=1, loss_scale_window=2))
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, lr_scheduler=ticks, config=settings)
    seen = []
    for step in range(5):
        loss = engine(features(step, 0, rank))
        engine.backward(loss * (torch.inf if step == 2 and rank == 1 else 1))
        before = engine.full_fp32(model.head.weight)
        result = engine.step()
        moved = not torch.equal(before, engine.full_fp32(model.head.weight))
        assert moved == (not result.skipped) == engine.was_step_applied()
        seen.append((result.skipped, engine.loss_scale(), engine.get_lr()[0]))
    counts = (engine.global_steps, engine.applied_steps, engine.skipped_steps)
    checksum = sum(float(engine.full_fp32(p).double().sum()) for p in model.parameters())
    engine.close()
    return [seen, counts, checksum]


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks2: RankPool, stage: int) -> None:
    first, second = ranks2.run(overflow_on_rank_1, stage)
    assert first == second
    seen, counts, checksum = first
    assert [skipped for skipped, _, _ in seen] == [False, False, True, False, False]
    # Window 2: two clean steps are not enough at the start, an overflow halves, two clean ones later it waits.
    assert [scale for _, scale, _ in seen] == [1024, 1024, 512, 512, 512]
    assert [rate for _, _, rate in seen] == [0.05, 0.025, 0.025, 0.0125, 0.00625]
    assert counts == (5, 4, 1)
    assert checksum == checksum


class Explodes(Net):
    """The second block gives infinity, in forward or only in its gradient."""

    where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.where == "backward":
            x = x + (x * 0).abs().clamp(min=0).sqrt() * 0  # the derivative of sqrt at 0 is infinite
        return self.head(self.blocks[2](x)).float().square().mean()


class ExplodesInBackward(Explodes):
    where = "backward"


def goes_on_failing(
    rank: int, world: int, stage: int, where: str, precision: dict[str, Any]
) -> tuple[str, str, int, int]:
    torch.manual_seed(0)
    model = Explodes() if where == "forward" else ExplodesInBackward()
    if where == "forward":
        with torch.no_grad():
            model.blocks[1].down.weight.fill_(torch.inf if rank >= 0 else 0)
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config(stage, **precision)
    )
    attempts = 0
    try:
        for step in range(15):
            engine.backward(engine(features(step, 0, rank)))
            attempts += 1
            engine.step()
    except NonFiniteError as error:
        return type(error).__name__, str(error), attempts, engine.skipped_steps
    finally:
        engine.close()
    return "", "", attempts, engine.skipped_steps


@pytest.mark.parametrize(
    "precision",
    [{"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}, {}],
    ids=["fp16", "bf16", "fp32"],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_forward_that_is_not_finite_is_named(ranks2: RankPool, stage: int, precision: Any) -> None:
    for kind, message, attempts, skipped in ranks2.run(goes_on_failing, stage, "forward", precision):
        assert kind == "NonFiniteError"
        assert "'blocks.1.down'" in message
        assert "forward was not finite already" in message
        assert attempts == skipped == 10


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_that_is_not_finite_is_named(ranks2: RankPool, stage: int) -> None:
    bf16 = {"bf16": {"enabled": True}}
    for _, message, attempts, _ in ranks2.run(goes_on_failing, stage, "backward", bf16):
        assert "The forward was finite" in message
        assert "'blocks.1." in message
        assert attempts == 10


@pytest.mark.parametrize("stage", [1, 3])
def test_the_end_of_the_loss_scale(ranks2: RankPool, stage: int) -> None:
    """8, 4, 2, 1, and the fifth overflow cannot halve."""
    settings = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    for kind, message, attempts, skipped in ranks2.run(goes_on_failing, stage, "backward", settings):
        assert kind == "NonFiniteError"
        assert "the loss scale 1 cannot fall any more" in message
        assert "'blocks.1." in message
        assert attempts == skipped == 5


def not_checked(rank: int, world: int, stage: int) -> tuple[bool, list[str]]:
    """bf16 with check_grad_overflow false: applied, and said aloud."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    torch.manual_seed(0)
    model = Net()
    settings = config(stage, bf16={"enabled": True, "check_grad_overflow": False})
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    engine.backward(engine(features(0, 0, rank)) * torch.inf)
    engine.step()
    finite = bool(engine.full_fp32(model.head.weight).isfinite().all())
    engine.close()
    logging.getLogger("zeroshard").removeHandler(handler)
    return finite, [line for line in told if "not finite" in line]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_checked_is_said(ranks2: RankPool, stage: int) -> None:
    (finite, told), (_, silent) = ranks2.run(not_checked, stage)
    assert not finite
    assert len(told) == 1
    assert "check_grad_overflow" in told[0]
    assert silent == []  # rank 0 speaks for all


def static_scale(rank: int, world: int, stage: int) -> tuple[float, bool, int]:
    torch.manual_seed(0)
    engine = engine_of(Net(), stage, fp16={"enabled": True, "loss_scale": 128})
    for step in range(3):
        engine.backward(engine(features(step, 0, rank)) * (torch.nan if step == 1 else 1))
        engine.step()
    result = engine.loss_scale(), engine.dynamic_loss_scale(), engine.skipped_steps
    engine.close()
    return result


@pytest.mark.parametrize("stage", STAGES)
def test_a_static_scale_skips_and_stays(ranks2: RankPool, stage: int) -> None:
    assert ranks2.run(static_scale, stage) == [(128.0, False, 1)] * 2


def exchanges(rank: int, world: int, settings: dict[str, Any]) -> tuple[int, Any]:
    """(small sums over all ranks in three steps, the last norm)."""
    torch.manual_seed(0)
    model = Net()
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    group = engine._states.groups.reduce
    count, original = 0, type(group).sum_to_host

    def counted(*args: Any) -> list[float]:
        nonlocal count
        count += 1
        return original(group, *args)

    group.sum_to_host = counted
    for step in range(3):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
    norm = engine.get_global_grad_norm()
    engine.close()
    return count, norm


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norm_and_overflow_cost_no_exchange_of_their_own(ranks2: RankPool, stage: int) -> None:
    bare = config(stage)
    bare["zero_optimization"]["compute_grad_norm"] = False
    assert ranks2.run(exchanges, bare) == [(3, None)] * 2
    full = config(stage, gradient_clipping=0.1, fp16=fp16())
    (count, norm), other = ranks2.run(exchanges, full)
    assert count == 3
    assert norm > 0
    assert other == (count, norm)


# ---- what has which dtype ---------------------------------------------------------------------------


class Kept(nn.Module):
    """One fp32 layer and an fp32 buffer in a 16-bit model; the layer sees fp32 and gives back 16 bit."""

    _keep_in_fp32_modules = ("special",)

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.special = nn.Linear(6, 6)
        self.after = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(6.0) / 3)
        self.seen: list[torch.dtype] = []
        self.special.register_forward_hook(lambda module, args, out: self.seen.append(args[0].dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = self.special(self.before(x))
        self.seen.append(x.dtype)
        return self.after(x + self.table.to(x.dtype)).float().square().mean()


def kept_dtypes(rank: int, world: int, stage: int, data_types: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Kept()
    settings = config(stage, bf16={"enabled": True}, data_types=data_types)
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    for step in range(2):
        engine.backward(engine(features(step, 0, rank)))
        engine.step()
    assert engine.global_steps == 2
    found = (
        [str(dtype) for dtype in model.seen[:2]],
        str(model.special.weight.dtype),
        str(model.after.weight.dtype),
        str(model.table.dtype),
    )
    engine.close()
    return found


@pytest.mark.parametrize(
    ("data_types", "expected"),
    [
        ({}, (["torch.float32", "torch.bfloat16"], "torch.float32", "torch.bfloat16", "torch.float32")),
        (
            {"keep_in_fp32_modules": [], "buffer_dtype": "bf16"},
            (["torch.bfloat16", "torch.bfloat16"], "torch.bfloat16", "torch.bfloat16", "torch.bfloat16"),
        ),
        (
            {"keep_in_fp32_modules": ["after"]},
            (["torch.bfloat16", "torch.bfloat16"], "torch.bfloat16", "torch.float32", "torch.float32"),
        ),
    ],
    ids=["auto", "none", "by name"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_kept_modules_and_buffers(ranks2: RankPool, stage: int, data_types: Any, expected: Any) -> None:
    assert ranks2.run(kept_dtypes, stage, data_types) == [expected] * 2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(x))).float().square().mean()


def normed(rank: int, world: int, stage: int, section: str) -> Any:
    """The first loss, that of plain PyTorch, and the norm's dtypes after a step."""
    torch.manual_seed(0)
    model = Normed()
    plain = copy.deepcopy(model).to(torch.bfloat16 if section == "bf16" else torch.float16)
    plain.norm.float()
    settings = config(stage, **{section: {"enabled": True}})
    engine, *_ = zeroshard.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
    )
    x = features(0, 0, rank)
    expected = float(plain(x.to(plain.layer.weight.dtype)))
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    found = {str(t.dtype) for t in (model.norm.weight, model.norm.running_mean)}
    averages = torch.equal(model.norm.running_mean, plain.norm.running_mean)
    engine.close()
    return float(loss) == expected, averages, found


@pytest.mark.parametrize(("stage", "section"), [(1, "bf16"), (3, "bf16"), (3, "fp16")])
def test_batch_norms_stay_fp32_with_their_averages(ranks2: RankPool, stage: int, section: str) -> None:
    assert ranks2.run(normed, stage, section) == [(True, True, {"torch.float32"})] * 2


def test_errors_about_dtypes_name_buffers() -> None:
    class Shifted(Kept):
        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.before(x) + self.table).float().mean()

    engine, *_ = zeroshard.initialize(model=Shifted(), config=config(1, bf16={"enabled": True}))
    with pytest.raises(RuntimeError, match="dtype") as raised:
        engine(features(0, 0, 0))
    engine.close()
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert "its fp32 buffers (table) is fp32" in note
        assert "data_types.buffer_dtype" in note


@pytest.mark.parametrize("options", [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}])
@pytest.mark.parametrize("stage", STAGES)
def test_dividing_before_the_reduction_changes_nothing(
    ranks2: RankPool, stage: int, options: dict[str, Any]
) -> None:
    settings = config(stage, gradient_accumulation_steps=2, **options)
    assert_parity(Odd, tokens, settings, optimizer_fn=sgd, pool=ranks2)


def summed(rank: int, world: int, stage: int, operation: str) -> Tensor:
    torch.manual_seed(0)
    model = Net()
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=config(stage, gradient_allreduce_op=operation),
    )
    engine.backward(engine(features(0, 0, rank)))
    gradient = zeroshard.safe_get_full_grad(model.head.weight)
    engine.close()
    return gradient


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_can_be_summed(ranks2: RankPool, stage: int) -> None:
    mean, total = (ranks2.run(summed, stage, operation)[0] for operation in ("mean", "sum"))
    assert torch.allclose(2 * mean, total, rtol=1e-6, atol=0)
