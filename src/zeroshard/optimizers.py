"""Optimizers that torch.optim lacks: ordinary `torch.optim.Optimizer`s over whole parameters or slices.

Each class says by `needs_whole(group)` whether its update of one element reads others: then a rank must hold
the whole parameter, in its true shape. As in torch.optim, a parameter without a gradient is left alone, state
is made at a parameter's first gradient and in its dtype, and so is the maths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from zeroshard.errors import ConfigError, ModelError
from zeroshard.precision import squared_norm

__all__ = ["AdamWithoutBiasCorrection", "Lamb", "Lion", "Muon", "muon_groups", "orthogonalize"]

BATCH = 1 << 22
"""Elements that are updated together, which bounds temporary memory; a larger parameter is a batch alone."""

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: the steepest at zero that stays bounded (Jordan et al., Muon, 2024)."""
NS_STEPS = 5
NS_EPS = 1e-7
MUON_LR = 0.02
ADAM_LR = 3e-4

Batch = list[tuple[Tensor, Tensor, dict[str, Any]]]
"""(parameter, its gradient, its state)."""


class _Batched(Optimizer):
    """A step that goes group by group, in batches of parameters that have elements and a gradient."""

    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns what `closure` returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in self._batches(group):
                self._update(batch, group)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[Batch]:
        batch: Batch = []
        size = 0
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or not parameter.numel():
                continue
            if batch and size + parameter.numel() > BATCH:
                yield batch
                batch, size = [], 0
            batch.append((parameter, gradient, self.state[parameter]))
            size += parameter.numel()
        if batch:
            yield batch


def _moments(batch: Batch, *names: str) -> list[list[Tensor]]:
    """State tensors like the parameters, by name; zeros where there are none yet."""
    for parameter, _, state in batch:
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return [[state[name] for _, _, state in batch] for name in names]


def _check(name: str, betas: tuple[float, float], **at_least_zero: float) -> None:
    for option, value in at_least_zero.items():
        if not value >= 0:
            raise ConfigError(f"{name}: {option} = {value} is below 0; give 0 or more")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"{name}: betas = {betas} must be two numbers from 0 to below 1, such as (0.9, 0.999)"
        )


class Lion(_Batched):
    """Sign of an interpolated momentum, with decoupled decay (arXiv 2302.06675, algorithm 2).

        u = sign(b1 m + (1 - b1) g);  p -= lr (u + weight_decay p);  m = b2 m + (1 - b2) g

    State `exp_avg`, 1 element per element. The paper's betas are (0.9, 0.99); the default is DeepSpeed's.
    Raises ConfigError for an option out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        _check("Lion", betas, lr=lr, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @staticmethod
    def needs_whole(group: Mapping[str, Any]) -> bool:
        """Whether an element's update reads other elements: no."""
        return False

    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter, _, _ in batch]
        gradients = [gradient for _, gradient, _ in batch]
        (momenta,) = _moments(batch, "exp_avg")
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        update = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(update)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, update, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class Lamb(_Batched):
    """Adam's update, decay included, scaled per parameter by a trust ratio (arXiv 1904.00962, algorithm 2).

        u = m^ / (sqrt(v^) + eps) + weight_decay p;  p -= lr clip(|p| / |u|, min_coeff, max_coeff) u

    The ratio is 1 when either norm is 0; norms are at least fp32. State `exp_avg`, `exp_avg_sq`, 2 elements
    per element, and `step`.

    Args:
        bias_correction: False leaves m and v as they are.
        eps_inside_sqrt: sqrt(v^ + eps) instead of sqrt(v^) + eps.

    Raises ConfigError for an option out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        _check("Lamb", betas, lr=lr, eps=eps, weight_decay=weight_decay, min_coeff=min_coeff)
        if max_coeff < min_coeff:
            raise ConfigError(
                f"Lamb: max_coeff = {max_coeff} is below min_coeff = {min_coeff}; they clip the trust ratio from "
                f"above and below"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "eps_inside_sqrt": eps_inside_sqrt,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    @staticmethod
    def needs_whole(group: Mapping[str, Any]) -> bool:
        """Whether an element's update reads other elements: yes, through the norms."""
        return True

    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter, _, _ in batch]
        update = _lamb_update(batch, group)
        if group["weight_decay"]:
            torch._foreach_add_(update, parameters, alpha=group["weight_decay"])
        for parameter, change in zip(parameters, update, strict=True):
            change.mul_(_trust_ratio(parameter, change, group["min_coeff"], group["max_coeff"]))
        torch._foreach_add_(parameters, update, alpha=-float(group["lr"]))


def _lamb_update(batch: Batch, group: dict[str, Any]) -> list[Tensor]:
    gradients = [gradient for _, gradient, _ in batch]
    first, second = _moments(batch, "exp_avg", "exp_avg_sq")
    for _, _, state in batch:
        state.setdefault("step", torch.tensor(0.0, dtype=torch.float32)).add_(1)
    beta1, beta2 = group["betas"]
    torch._foreach_lerp_(first, gradients, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
    # Parameters may have missed different steps, so each has its own correction.
    steps = [state["step"].item() if group["bias_correction"] else math.inf for _, _, state in batch]
    denominators = torch._foreach_div(second, [1 - beta2**step for step in steps])
    if group["eps_inside_sqrt"]:
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_sqrt_(denominators)
    else:
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
    update = torch._foreach_div(first, [1 - beta1**step for step in steps])
    torch._foreach_div_(update, denominators)
    return list(update)


def _trust_ratio(parameter: Tensor, update: Tensor, low: float, high: float) -> Tensor:
    """|parameter| / |update| in [low, high], 1 when either is 0; a scalar on the device, nobody waits for it."""
    weight, change = squared_norm(parameter.reshape(-1)).sqrt(), squared_norm(update.reshape(-1)).sqrt()
    usable = (weight > 0) & (change > 0)
    return torch.where(usable, (weight / change).clamp(low, high), torch.ones_like(weight))


class AdamWithoutBiasCorrection(_Batched):
    """Adam or AdamW whose moments are used as they are: `bias_correction: false` in a config.

    State as torch's: `exp_avg`, `exp_avg_sq`, `step` (counted, and not used). Runs torch's fused kernel.

    Args:
        decoupled: decay as AdamW does; False adds it to the gradient as Adam does.

    Raises ConfigError for an option out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        _check("Adam", betas, lr=lr, eps=eps, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled": decoupled,
        }
        super().__init__(params, {**defaults, "fused": True})

    @staticmethod
    def needs_whole(group: Mapping[str, Any]) -> bool:
        """Whether an element's update reads other elements: no."""
        return False

    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        _adam(batch, group, decoupled=group["decoupled"], bias_correction=False)


def _adam(batch: Batch, group: dict[str, Any], *, decoupled: bool, bias_correction: bool) -> None:
    """torch's fused Adam over `batch`. The group says `fused` too: torch then loads `step` where it must be."""
    first, second = _moments(batch, "exp_avg", "exp_avg_sq")
    for parameter, _, state in batch:
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    steps = [state["step"] for _, _, state in batch]
    if not bias_correction:
        torch._foreach_add_(steps, 1.0)
        # The kernel divides by 1 - beta**step, which is exactly 1 at this step.
        steps = [torch.full_like(step, math.inf) for step in steps]
    beta1, beta2 = group["betas"]
    adam(
        [parameter for parameter, _, _ in batch],
        [gradient for _, gradient, _ in batch],
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        decoupled_weight_decay=decoupled,
    )


class Muon(_Batched):
    """Orthogonalised momentum for groups with `use_muon=True`, AdamW for those with `use_muon=False`.

        m = lerp(m, g, 1 - momentum);  u = orthogonalize(lerp(g, m, momentum))
        p -= lr (sqrt(max(1, rows / columns)) u + weight_decay p)

    (Jordan et al., Muon, 2024; the same update as `torch.optim.Muon`.) A parameter of more dimensions than two
    is a matrix of shape (shape[0], -1). State: `momentum_buffer`, 1 element per element; AdamW's is torch's.
    `muon_groups` makes the groups.

    Args:
        lr: of groups that give none; None is 0.02 for matrices and 3e-4 for AdamW.
        momentum: of matrices.
        ns_method: "gram" and "standard" name two orders of the same products; the standard one is computed.
        betas, eps: of AdamW.

    Raises ConfigError for an option out of range, ModelError for a parameter of less than 2 dimensions in a
    group with `use_muon=True`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        ns_method: str = "gram",
        use_muon: bool = True,
    ) -> None:
        _check("Muon", betas, lr=lr or 0, eps=eps, weight_decay=weight_decay, momentum=momentum)
        if momentum >= 1:
            raise ConfigError(f"Muon: momentum = {momentum} must be below 1, such as 0.95")
        if ns_method not in ("gram", "standard"):
            raise ConfigError(f"Muon: ns_method = {ns_method!r} is not known; write 'gram' or 'standard'")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ns_method": ns_method,
            "use_muon": use_muon,
            "fused": True,
        }
        super().__init__(params, defaults)

    @staticmethod
    def needs_whole(group: Mapping[str, Any]) -> bool:
        """Whether an element's update reads other elements: of matrices it does."""
        return bool(group["use_muon"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if param_group["lr"] is None:
            param_group["lr"] = MUON_LR if param_group["use_muon"] else ADAM_LR
        for place, parameter in enumerate(param_group["params"]):
            if param_group["use_muon"] and parameter.dim() < 2:
                raise ModelError(
                    f"Muon's group {len(self.param_groups) - 1} has use_muon=True and holds a parameter of shape "
                    f"{tuple(parameter.shape)} (entry {place}), and only matrices can be orthogonalised. Put it "
                    f"in a group with use_muon=False; muon_groups makes such groups."
                )

    def _update(self, batch: Batch, group: dict[str, Any]) -> None:
        if not group["use_muon"]:
            _adam(batch, group, decoupled=True, bias_correction=True)
            return
        lr, momentum = float(group["lr"]), group["momentum"]
        (buffers,) = _moments(batch, "momentum_buffer")
        for (parameter, gradient, _), buffer in zip(batch, buffers, strict=True):
            buffer.lerp_(gradient, 1 - momentum)
            matrix = gradient.lerp(buffer, momentum).reshape(parameter.shape[0], -1)
            rows, columns = matrix.shape
            parameter.mul_(1 - lr * group["weight_decay"])
            update = orthogonalize(matrix).reshape(parameter.shape)
            parameter.add_(update, alpha=-lr * math.sqrt(max(1, rows / columns)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """`matrix` (2-D) with all singular values brought near 1 (0.7 to 1.2), in bf16 whatever its dtype.

    Newton-Schulz: X <- a X + (b A + c A A) X with A = X X^T, five times, on the side where A is small.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=NS_EPS)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def muon_groups(
    parameters: Iterable[Any],
    name_of: Mapping[int, str],
    lr: float | None = None,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
) -> list[dict[str, Any]]:
    """`parameters` as groups for `Muon`: matrices apart from what AdamW trains, in order.

    A parameter with an attribute `use_muon` is what that says; otherwise it is a matrix if it has two or more
    dimensions and neither "embed" nor "lm_head" in its name. A group that sets `use_muon` stays one group,
    others are split in two, and what is empty is left out.

    Args:
        parameters: parameters, or (name, parameter), or group dicts of those.
        name_of: the names, by `id(parameter)`; a parameter without one goes by its dimensions.
        lr: learning rate of groups that give none, where muon_lr (matrices) or adam_lr (the rest) does not
            say otherwise. None leaves it to `Muon`.
    """
    listed = list(parameters)
    given = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    rates = {True: lr if muon_lr is None else muon_lr, False: lr if adam_lr is None else adam_lr}
    groups = []
    for group in given:
        entries = group["params"]
        entries = [entries] if isinstance(entries, Tensor) else list(entries)
        halves: dict[bool, list[Any]] = {True: [], False: []}
        for entry in entries:
            halves[bool(group["use_muon"]) if "use_muon" in group else _is_matrix(entry, name_of)].append(
                entry
            )
        for use_muon, half in halves.items():
            if half:
                rate = {} if rates[use_muon] is None else {"lr": rates[use_muon]}
                groups.append({**rate, **group, "params": half, "use_muon": use_muon})
    return groups


def _is_matrix(entry: Any, name_of: Mapping[int, str]) -> bool:
    name, parameter = entry if isinstance(entry, tuple) else (name_of.get(id(entry), ""), entry)
    told = getattr(parameter, "use_muon", None)
    if told is not None:
        return bool(told)
    return parameter.dim() >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))
