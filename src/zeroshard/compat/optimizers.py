"""DeepSpeed's optimizer classes: torch's and zeroshard's under those names, and classes to ask `isinstance` for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.errors import NotYetError
from zeroshard.optimizer import can_fuse
from zeroshard.optimizers import Lamb, Lion

__all__ = [
    "BF16_Optimizer",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "DeepSpeedOptimizer",
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "ZeROOptimizer",
    "compatible_ops",
]

compatible_ops: dict[str, bool] = {}
"""DeepSpeed's extensions that can be built: none, and none is needed."""


class FusedAdam(torch.optim.Adam):
    """torch's AdamW, or Adam without `adam_w_mode`, fused where torch has it."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        **kwargs: Any,
    ) -> None:
        if not bias_correction:
            raise NotYetError(
                f"{type(self).__name__}(bias_correction=False): the config's optimizer section has it; use that"
            )
        params = list(params)
        kwargs.setdefault("fused", can_fuse(torch.optim.Adam, kwargs, params) or None)
        super().__init__(
            params,
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adam_w_mode,
            **kwargs,
        )


class DeepSpeedCPUAdam(FusedAdam):
    """The same, in the order of arguments that DeepSpeed's has."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


class FusedLion(Lion):
    """zeroshard's Lion."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


DeepSpeedCPULion = FusedLion


class FusedLamb(Lamb):
    """zeroshard's Lamb."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad or max_grad_norm:
            raise NotYetError(
                f"FusedLamb(amsgrad={amsgrad}, max_grad_norm={max_grad_norm}): it has neither; clip with the "
                f"config's gradient_clipping"
            )
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )


# ---- what isinstance is asked for -----------------------------------------------------------------------


class _Asked(type):
    """Of a class that no object is made of: an optimizer that an engine of certain stages holds is one."""

    stages: frozenset[int]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Optimizer) and _stage_of(instance) in cls.stages


def _stage_of(optimizer: Optimizer) -> int | None:
    """The stage of the engine that holds it, None without one."""
    stage: int | None = optimizer.__dict__.get("_zeroshard_stage")
    return stage


class DeepSpeedOptimizer(metaclass=_Asked):
    """Any optimizer of an engine."""

    stages = frozenset({0, 1, 2, 3})


class ZeROOptimizer(metaclass=_Asked):
    """One whose states are sharded."""

    stages = frozenset({1, 2, 3})


class DeepSpeedZeroOptimizer(metaclass=_Asked):
    """One of stages 1 and 2."""

    stages = frozenset({1, 2})


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Asked):
    """One of stage 3."""

    stages = frozenset({3})


class BF16_Optimizer(metaclass=_Asked):
    """None: bf16 needs no wrapper of its own here."""

    stages: frozenset[int] = frozenset()
