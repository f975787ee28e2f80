"""The optimizers that torch.optim lacks, against their papers' formulas and against torch's own classes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import zeroshard
from zeroshard import optimizers
from zeroshard.errors import ConfigError, ModelError
from zeroshard.optimizer import build_optimizer, check_parameters, needs_whole, state_elements
from zeroshard.optimizers import AdamWithoutBiasCorrection, Lamb, Lion, Muon, muon_groups, orthogonalize

SHAPES = ((7, 5), (1,), (3,), (2, 3, 2))
STEPS = 6


def parameters(dtype: torch.dtype = torch.float32, shapes: Iterable[tuple[int, ...]] = SHAPES) -> list[Any]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def gradient(step: int, place: int, like: Tensor) -> Tensor | None:
    """Parameter 1 has a gradient at every other step, parameter 2 from the third step on."""
    if (place == 1 and step % 2) or (place == 2 and step < 2):
        return None
    generator = torch.Generator().manual_seed(100 * step + place)
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def train(optimizer: Optimizer, trained: list[Any], steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        for place, parameter in enumerate(trained):
            parameter.grad = gradient(step, place, parameter)
        optimizer.step()


def two_groups(trained: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": trained[::2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": trained[1::2], "lr": 1e-3, "weight_decay": 0.0},
    ]


def reference(
    trained: list[Any],
    update: Callable[[Tensor, Tensor, dict[str, Any], float, float], Tensor],
    states: int,
) -> list[Tensor]:
    """`update(p, g, state, lr, decay)` over the same gradients and groups, one parameter at a time."""
    results = []
    for place, parameter in enumerate(trained):
        value = parameter.detach().double()
        state: dict[str, Any] = {"t": 0, **{f"s{i}": torch.zeros_like(value) for i in range(states)}}
        lr, decay = ((1e-2, 0.1), (1e-3, 0.0))[place % 2]
        for step in range(STEPS):
            found = gradient(step, place, parameter)
            if found is not None:
                state["t"] += 1
                value = update(value, found.double(), state, lr, decay)
        results.append(value)
    return results


def close(trained: list[Any], expected: list[Tensor]) -> None:
    for place, (mine, theirs) in enumerate(zip(trained, expected, strict=True)):
        torch.testing.assert_close(mine.detach().double(), theirs, rtol=1e-6, atol=1e-6, msg=f"{place}")


def test_lion() -> None:
    b1, b2 = 0.9, 0.95

    def update(p: Tensor, g: Tensor, s: dict[str, Any], lr: float, decay: float) -> Tensor:
        u = torch.sign(b1 * s["s0"] + (1 - b1) * g)
        s["s0"] = b2 * s["s0"] + (1 - b2) * g
        return p - lr * (u + decay * p)

    trained = parameters()
    expected = reference(trained, update, 1)
    train(Lion(two_groups(trained), betas=(b1, b2)), trained)
    close(trained, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias_correction": False},
        {"eps": 0.1, "eps_inside_sqrt": True},
        {"max_coeff": 0.5},
        {"min_coeff": 5.0},
    ],
    ids=str,
)
def test_lamb(options: dict[str, Any]) -> None:
    b1, b2, eps = 0.9, 0.99, options.get("eps", 1e-8)

    def update(p: Tensor, g: Tensor, s: dict[str, Any], lr: float, decay: float) -> Tensor:
        s["s0"] = b1 * s["s0"] + (1 - b1) * g
        s["s1"] = b2 * s["s1"] + (1 - b2) * g * g
        corrected = options.get("bias_correction", True)
        m = s["s0"] / (1 - b1 ** s["t"]) if corrected else s["s0"]
        v = s["s1"] / (1 - b2 ** s["t"]) if corrected else s["s1"]
        root = (v + eps) ** 0.5 if options.get("eps_inside_sqrt") else v**0.5 + eps
        u = m / root + decay * p
        ratio = float(p.norm() / u.norm())
        return p - lr * min(max(ratio, options.get("min_coeff", 0.01)), options.get("max_coeff", 10.0)) * u

    trained = parameters()
    expected = reference(trained, update, 2)
    train(Lamb(two_groups(trained), betas=(b1, b2), **options), trained)
    close(trained, expected)


def test_lamb_trusts_a_parameter_or_an_update_of_zeros_as_it_is() -> None:
    zeros, idle = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    zeros.grad, idle.grad = torch.ones(3), torch.zeros(3)
    Lamb([zeros, idle], lr=0.1, eps=0.0).step()
    assert torch.allclose(zeros, torch.full((3,), -0.1))
    idle_again = nn.Parameter(torch.ones(3))
    idle_again.grad = torch.zeros(3)
    Lamb([idle_again], lr=0.1).step()
    assert torch.equal(idle_again, torch.ones(3))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction(decoupled: bool) -> None:
    b1, b2, eps = 0.8, 0.9, 1e-3

    def update(p: Tensor, g: Tensor, s: dict[str, Any], lr: float, decay: float) -> Tensor:
        if not decoupled:
            g = g + decay * p
        s["s0"] = b1 * s["s0"] + (1 - b1) * g
        s["s1"] = b2 * s["s1"] + (1 - b2) * g * g
        return p * (1 - lr * decay * decoupled) - lr * s["s0"] / (s["s1"].sqrt() + eps)

    trained = parameters()
    expected = reference(trained, update, 2)
    optimizer = AdamWithoutBiasCorrection(two_groups(trained), betas=(b1, b2), eps=eps, decoupled=decoupled)
    train(optimizer, trained)
    close(trained, expected)
    assert set(optimizer.state[trained[0]]) == {"exp_avg", "exp_avg_sq", "step"}
    assert [float(optimizer.state[parameter]["step"]) for parameter in trained] == [6, 3, 4, 6]


def test_muon_is_torchs_muon() -> None:
    shapes = ((7, 5), (5, 7), (4, 4), (1, 6))
    trained, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    train(Muon(trained, lr=0.02, momentum=0.9, weight_decay=0.1), trained)
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    train(torch.optim.Muon(theirs, **options), theirs)
    close(trained, [parameter.detach().double() for parameter in theirs])


def test_muon_takes_more_dimensions_as_rows_of_the_first() -> None:
    trained, theirs = parameters(shapes=((4, 3, 2, 2),)), parameters(shapes=((4, 3, 2, 2),))
    flat = [nn.Parameter(theirs[0].detach().reshape(4, 12))]
    optimizer, other = Muon(trained, lr=0.1), torch.optim.Muon(flat, lr=0.1, weight_decay=0.0)
    for step in range(3):
        found = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(step))
        trained[0].grad, flat[0].grad = found, found.reshape(4, 12)
        optimizer.step()
        other.step()
    close([trained[0].reshape(4, 12)], [flat[0].detach().double()])


def test_orthogonalize_brings_singular_values_near_one() -> None:
    for shape in ((20, 6), (6, 20)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
        values = torch.linalg.svdvals(orthogonalize(matrix).float())
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_muon_trains_the_other_groups_with_adamw() -> None:
    trained, theirs = parameters(), parameters()
    groups = [
        {"params": [trained[0]], "use_muon": True},
        {"params": trained[1:], "use_muon": False, "lr": 1e-2, "weight_decay": 0.1},
    ]
    optimizer = Muon(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-10)
    train(optimizer, trained)
    adamw = torch.optim.AdamW(theirs[1:], lr=1e-2, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for step in range(STEPS):
        for place, parameter in enumerate(theirs):
            parameter.grad = gradient(step, place, parameter)
        adamw.step()
    close(trained[1:], [parameter.detach().double() for parameter in theirs[1:]])
    assert set(optimizer.state[trained[0]]) == {"momentum_buffer"}
    assert set(optimizer.state[trained[3]]) == {"exp_avg", "exp_avg_sq", "step"}


def test_muon_has_a_learning_rate_for_each_kind() -> None:
    matrix, vector = parameters(shapes=((2, 2), (2,)))
    groups = [{"params": [matrix]}, {"params": [vector], "use_muon": False}]
    assert [group["lr"] for group in Muon(copy.deepcopy(groups)).param_groups] == [0.02, 3e-4]
    assert [group["lr"] for group in Muon(copy.deepcopy(groups), lr=0.5).param_groups] == [0.5, 0.5]


def test_muon_refuses_a_vector_among_matrices() -> None:
    with pytest.raises(ModelError, match=r"shape \(3,\).*use_muon=False"):
        Muon(parameters(shapes=((2, 2), (3,))))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.told = nn.Linear(4, 4, bias=False)
        self.told.weight.use_muon = False
        self.lm_head = nn.Linear(4, 6, bias=False)


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def test_muon_groups() -> None:
    model = Named()
    name_of = names_of(model)

    def shown(groups: list[dict[str, Any]]) -> list[tuple[bool, float | None, list[str]]]:
        return [
            (group["use_muon"], group.get("lr"), [name_of[id(p)] for p in group["params"]])
            for group in groups
        ]

    rest = ["embed_tokens.weight", "inner.bias", "norm.weight", "norm.bias", "told.weight", "lm_head.weight"]
    groups = muon_groups(list(model.parameters()), name_of, lr=0.1, adam_lr=0.2)
    assert shown(groups) == [(True, 0.1, ["inner.weight"]), (False, 0.2, rest)]
    given = [
        {"params": model.inner.parameters(), "lr": 0.5, "weight_decay": 0.3},
        {"params": model.norm.parameters()},
        {"params": [model.told.weight], "use_muon": True},
    ]
    groups = muon_groups(given, name_of, muon_lr=0.7)
    assert shown(groups) == [
        (True, 0.5, ["inner.weight"]),
        (False, 0.5, ["inner.bias"]),
        (False, None, ["norm.weight", "norm.bias"]),
        (True, 0.7, ["told.weight"]),
    ]
    assert [group.get("weight_decay") for group in groups] == [0.3, 0.3, None, None]


MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "Lion": lambda trained: Lion(two_groups(trained)),
    "Lamb": lambda trained: Lamb(two_groups(trained)),
    "AdamWithoutBiasCorrection": lambda trained: AdamWithoutBiasCorrection(two_groups(trained)),
    "Muon": lambda trained: Muon(muon_groups(two_groups(trained), {})),
}


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest) -> Callable[[list[Any]], Optimizer]:
    return MAKERS[request.param]


def test_no_gradient_leaves_parameter_and_state_alone(maker: Callable[[list[Any]], Optimizer]) -> None:
    trained = parameters()
    optimizer = maker(trained)
    train(optimizer, trained, [0])
    assert trained[2] not in optimizer.state
    before, state = trained[1].detach().clone(), copy.deepcopy(optimizer.state[trained[1]])
    train(optimizer, trained, [1])
    assert torch.equal(trained[1], before)
    assert state.keys() == optimizer.state[trained[1]].keys()
    assert all(torch.equal(state[key], optimizer.state[trained[1]][key]) for key in state)


def test_state_goes_through_a_file(maker: Callable[[list[Any]], Optimizer], tmp_path: Any) -> None:
    trained = parameters()
    optimizer = maker(trained)
    train(optimizer, trained, range(3))
    other = copy.deepcopy(trained)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = maker(other)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    train(optimizer, trained, range(3, STEPS))
    train(resumed, other, range(3, STEPS))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(trained, other, strict=True))


def test_closure_and_parameters_without_elements(maker: Callable[[list[Any]], Optimizer]) -> None:
    trained = parameters(shapes=((2, 2), (2,), (0, 3), (0,)))
    optimizer = maker(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.step(lambda: 3.0 if torch.is_grad_enabled() else 0.0) == 3.0
    assert optimizer.step() is None
    assert all(bool(parameter.isfinite().all()) for parameter in trained)
    assert set(optimizer.state) == set(trained[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit(maker: Callable[[list[Any]], Optimizer], dtype: torch.dtype) -> None:
    trained, exact = parameters(dtype), parameters()
    train(maker(trained), trained)
    train(maker(exact), exact)
    for mine, theirs in zip(trained, exact, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine.float(), theirs, rtol=0.05, atol=0.05)


def test_batches_give_the_same_as_one_batch(
    maker: Callable[[list[Any]], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, other = parameters(), parameters()
    train(maker(trained), trained)
    monkeypatch.setattr(optimizers, "BATCH", 4)
    train(maker(other), other)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(trained, other, strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: Lion(p, lr=-1.0), "Lion: lr = -1.0"),
        (lambda p: Lion(p, betas=(0.9, 1.0)), "Lion: betas"),
        (lambda p: Lamb(p, max_coeff=0.001), "max_coeff = 0.001 is below min_coeff"),
        (lambda p: Lamb(p, weight_decay=-0.1), "weight_decay"),
        (lambda p: Muon(p, momentum=1.0), "momentum = 1.0"),
        (lambda p: Muon(p, ns_method="newton"), "'gram' or 'standard'"),
        (lambda p: AdamWithoutBiasCorrection(p, eps=-1), "eps = -1"),
    ],
)
def test_options_out_of_range(make: Callable[[list[Any]], Optimizer], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(parameters(shapes=((2, 2),)))


def test_slices_of_an_elementwise_optimizer_are_like_the_whole() -> None:
    for make in (Lion, AdamWithoutBiasCorrection):
        whole, parts = parameters(shapes=((10,),)), []
        parts = [nn.Parameter(whole[0].detach()[:3].clone()), nn.Parameter(whole[0].detach()[3:].clone())]
        one, two = make(whole, weight_decay=0.1), make(parts, weight_decay=0.1)
        for step in range(3):
            whole[0].grad = gradient(step, 0, whole[0])
            assert whole[0].grad is not None
            parts[0].grad, parts[1].grad = whole[0].grad[:3], whole[0].grad[3:]
            one.step()
            two.step()
        torch.testing.assert_close(torch.cat([part.detach() for part in parts]), whole[0].detach())


# Building one by name.


def built(name: str, model: nn.Module | None = None, **options: Any) -> Optimizer:
    model = model or nn.Linear(2, 2)
    return build_optimizer(name, options, list(model.parameters()), names_of(model))


@pytest.mark.parametrize(
    ("name", "options", "fused"),
    [
        ("Adam", {}, True),
        ("AdamW", {"amsgrad": True}, True),
        ("AdamW", {"foreach": False}, None),
        ("AdamW", {"differentiable": True}, None),
        ("AdamW", {"fused": False}, False),
        ("SGD", {"lr": 0.1}, True),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, None),
        ("Adagrad", {}, None),
    ],
)
def test_fused_is_the_default_where_it_always_works(name: str, options: dict[str, Any], fused: Any) -> None:
    optimizer = built(name, **options)
    assert type(optimizer) is getattr(torch.optim, name)
    assert optimizer.defaults["fused"] is fused


def test_momentum_of_a_group_rules_the_fused_kernel_out() -> None:
    """It fails when a parameter gets its first gradient later than others."""
    trained = parameters()
    optimizer = build_optimizer("SGD", {"lr": 0.1}, [{"params": trained, "momentum": 0.9}], {})
    train(optimizer, trained)


def test_own_classes_are_found_before_torchs() -> None:
    assert type(built("Lion", lr=0.1)) is Lion
    assert type(built("Lamb", lr=0.1)) is Lamb
    muon = built("Muon", Named(), lr=0.1, adam_lr=0.2, momentum=0.8)
    assert type(muon) is Muon
    assert [(group["use_muon"], group["lr"], group["momentum"]) for group in muon.param_groups] == [
        (True, 0.1, 0.8),
        (False, 0.2, 0.8),
    ]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("FusedAdam", {}, "did you mean Adam"),
        ("DeepSpeedCPUAdagrad", {}, "did you mean Adagrad"),
        ("ADAMAXX", {}, "did you mean Adamax"),
        ("Nothing", {}, "known are ASGD, .*Lion"),
        ("Lion", {"eps": 1e-8}, "'eps', which Lion does not take; it takes lr, betas, weight_decay"),
        ("Muon", {"nesterov": True}, "muon_lr"),
        ("AdamW", {"lr": -1.0}, "AdamW cannot be built.*-1.0"),
    ],
)
def test_what_cannot_be_built(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        built(name, **options)


class MyAdam(torch.optim.AdamW):
    pass


class Unknown(Optimizer):
    pass


def test_needs_whole() -> None:
    trained = parameters(shapes=((2, 2),))

    def asked(optimizer: Optimizer) -> bool | None:
        return needs_whole(optimizer, optimizer.param_groups[0])

    assert asked(torch.optim.Adafactor(trained)) is True
    assert asked(torch.optim.Muon(trained)) is True
    assert asked(Lamb(trained)) is True
    assert asked(Muon(trained)) is True
    assert asked(Muon(trained, use_muon=False)) is False
    assert asked(Lion(trained)) is False
    assert asked(AdamWithoutBiasCorrection(trained)) is False
    assert asked(MyAdam(trained)) is False
    assert asked(torch.optim.SGD(trained, lr=0.1)) is False
    assert asked(Unknown(trained, {})) is None


def test_state_of_a_subclass_is_that_of_its_base() -> None:
    class Mine(torch.optim.AdamW):
        pass

    parameters = [nn.Parameter(torch.zeros(2))]
    makers = (Mine, Lion, torch.optim.Adagrad, torch.optim.SGD)
    assert [state_elements(maker(parameters)) for maker in makers] == [2, 1, 1, None]
    assert state_elements(None) is None


def test_a_parameter_given_twice() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    check_parameters(optimizer, model)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.bias]})
    with pytest.raises(ModelError, match="'bias' in its groups 0 and 1"):
        check_parameters(optimizer, model)
    optimizer.param_groups[:] = [{"params": [model.weight, model.weight]}]
    with pytest.raises(ModelError, match="'weight' twice in its group 0"):
        check_parameters(optimizer, model)


@pytest.mark.parametrize(
    ("type_", "params", "make"),
    [
        ("Lion", {"lr": 1e-2, "weight_decay": 0.1}, lambda p: Lion(p, lr=1e-2, weight_decay=0.1)),
        (
            "Adam",
            {"lr": 1e-2, "bias_correction": False},
            lambda p: AdamWithoutBiasCorrection(p, lr=1e-2),
        ),
        ("adagrad", {"lr": 1e-2}, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    ],
)
def test_from_a_config(type_: str, params: dict[str, Any], make: Callable[[Any], Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    plain = copy.deepcopy(model)
    config = {"optimizer": {"type": type_, "params": params}, "zero_optimization": {"stage": 2}}
    engine, optimizer, _, _ = zeroshard.initialize(model=model, config=config)
    theirs = make(plain.parameters())
    assert type(optimizer) is type(theirs)
    for step in range(4):
        data = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(data).square().mean())
        engine.step()
        theirs.zero_grad()
        plain(data).square().mean().backward()
        theirs.step()
    close(list(model.parameters()), [parameter.detach().double() for parameter in plain.parameters()])
    engine.close()


def test_state_made_with_the_optimizer_gets_the_masters_dtype() -> None:
    model = nn.Linear(3, 2).bfloat16()
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    engine, _, _, _ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)
    sums = [state["sum"] for state in optimizer.state.values()]
    assert [value.dtype for value in sums] == [torch.float32] * 2
    assert all(math.isclose(float(value.mean()), 0.5) for value in sums)
    engine.close()
