"""`zeroshard.Init`: build a model that no rank ever holds as a whole.

    with zeroshard.Init():
        model = Net()                       # any code; weights as in plain PyTorch with rank 0's seed
    engine, *_ = zeroshard.initialize(model=model, ...)

Torch calls hooks when a module gets a parameter or a child. The parameters they show become cut parameters (see
`zeroshard.cut`): open at first, and put away one after the other while others are made. Code that touches one
again (a custom initialiser, a parent that scales its child's weights, a loader) finds it whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from zeroshard.config import AutoFacts, Config, parse, read_config, resolve_auto
from zeroshard.cut import Cuts, can_cut
from zeroshard.errors import CommError, ConfigError, ModelError, NotYetError
from zeroshard.guard import has_engine, home_of
from zeroshard.world import World, join

__all__ = ["Init"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ASYNC = "HF_DEACTIVATE_ASYNC_LOAD"


class Init:
    """A context in which any model code builds, and each rank keeps 1/N of each parameter.

    Inside, what code does to parameters it does to whole ones, with rank 0's values: weights are bit for bit
    those of plain construction with rank 0's seed. All ranks run the same code. Afterwards, and until
    `initialize`, a parameter tells its shape, dtype and device; reading its elements raises, unless in
    `zero.GatheredParameters` or under `Init` again. Buffers are left alone, and so are the originals of
    parametrised weights (`torch.nn.utils.parametrizations`): code computes with them by asking for the weight,
    also on one rank alone. Parameters on `meta` stay there until they get values. A view that is kept
    (`weight.data`) keeps the whole parameter open until the block ends.

    Args (DeepSpeed's, in its order):
        module: cut this one at once; no `with` is needed then.
        data_parallel_group: whom to spread over; default all ranks.
        mem_efficient_linear: no effect: no weight is kept alive by autograd here anyway.
        remote_device: "cpu" keeps the parts in host memory until `initialize`; None where collectives run.
        pin_memory: no effect.
        config_dict_or_path: the config of the run, which may have "auto" in it. Only the stage counts: below 3
            nothing is cut.
        config: its old name.
        enabled: False makes the block do nothing.
        dtype: floating-point parameters end up in this dtype: float16, bfloat16 or float32. By default they keep
            the one they are made in, so that masters can be made from the original values.
        mpu: an object whose `get_data_parallel_group()` is the group.
        zero_param_parallel_group, param_swapper, zero_quantized_weights, zero_quantized_nontrainable_weights:
            not implemented.
        sequence_data_parallel_group: another name of `data_parallel_group`.
        tensor_overrides: no effect: where and in what dtype tensors are made is for the code inside to say.

    On one rank, and below stage 3, only `dtype` has an effect. Raises ConfigError or CommError for arguments that
    contradict one another or the environment.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        self._enabled = enabled
        self._dtype = dtype
        self._cuts: Cuts | None = None
        self._modules: dict[int, nn.Module] = {}
        """Those that were given something since the block began."""
        self._async: str | None = None
        if not enabled:
            return
        _refuse_later(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            param_swapper=param_swapper,
        )
        self._on_host = _on_host(remote_device)
        if dtype is not None and dtype not in _DTYPES:
            raise ConfigError(
                f"Init(dtype={dtype}): it must be one of {', '.join(map(str, _DTYPES))}; leave it out to keep "
                f"what the model's code makes"
            )
        stage = _stage_of(config_dict_or_path, config)
        group = _one_group(data_parallel_group, sequence_data_parallel_group, mpu)
        world = join()
        _check_environment(world, group)
        group = group or world.group
        if stage >= 3 and group is not None and dist.get_world_size(group) > 1:
            self._cuts = Cuts.of(group, world.device)
        if module is not None:
            self._convert(module)

    def __enter__(self) -> None:
        if self._enabled and self._cuts is not None:
            self._cuts.contexts += 1
            # Its loader's threads would read all files ahead of what is put away.
            self._async = os.environ.get(_ASYNC)
            os.environ[_ASYNC] = "1"
        _CONTEXTS.append(self)
        if not _HOOKS:
            _HOOKS.append(register_module_parameter_registration_hook(_saw_parameter))
            _HOOKS.append(register_module_module_registration_hook(_saw_module))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CONTEXTS.remove(self)
        while _HOOKS and not _CONTEXTS:
            _HOOKS.pop().remove()
        try:
            if self._enabled and error is None:
                self._finish()
        finally:
            self._modules.clear()
            if self._enabled and self._cuts is not None:
                self._cuts.contexts -= 1
                _set_environment(self._async)
                if error is not None and not self._cuts.contexts:
                    self._cuts.forget_open()

    def take(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """`module` has `parameter`, or is about to; None is something else."""
        if not self._enabled:
            return
        self._modules.setdefault(id(module), module)
        if self._cuts is not None and parameter is not None:
            self._cut(self._cuts, module, f"{type(module).__name__}.{name}", parameter)

    def _cut(self, cuts: Cuts, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if isinstance(module, ParametrizationList):
            cuts.leave_whole(parameter)
            # One that the module has already was loaded, or is moved about.
            is_made = name.rpartition(".")[2] not in module._parameters
            if is_made and parameter.is_floating_point() and _initialisers_are_off():
                # From memory that nobody wrote. A loader may fill it; if none does, that is to show.
                with torch.no_grad():
                    parameter.fill_(float("nan"))
        else:
            cuts.add(parameter, name, self._dtype, self._on_host)
        cuts.put_away_oldest()

    def _finish(self) -> None:
        for module in list(self._modules.values()):
            for name, parameter in module._parameters.items():
                self.take(module, name, parameter)
        if self._cuts is None:
            for module in self._modules.values():
                self._cast(module)
            return
        if self._cuts.contexts == 1:
            self._cuts.finish()
        for root in self._roots():
            _name_parameters(root)

    def _roots(self) -> Iterator[nn.Module]:
        inside = {id(child) for module in self._modules.values() for child in module.children()}
        return (module for module in self._modules.values() if id(module) not in inside)

    def _convert(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if has_engine(parameter):
                raise ModelError(
                    f"Init(module=...): parameter {name!r} belongs to an engine already; convert a model before "
                    f"`initialize`, or leave it to `initialize`"
                )
        if self._cuts is None:
            for part in module.modules():
                self._cast(part)
            return
        for path, part in module.named_modules():
            for name, parameter in part.named_parameters(recurse=False):
                self._cut(self._cuts, part, f"{path}.{name}" if path else name, parameter)
        self._cuts.put_all_away()
        _name_parameters(module)

    def _cast(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is None or self._dtype is None or has_engine(parameter) or not can_cut(parameter):
                continue
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self._dtype)


_CONTEXTS: list[Init] = []
"""The open blocks; the innermost one decides."""
_HOOKS: list[RemovableHandle] = []


def _saw_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    _CONTEXTS[-1].take(module, name, parameter)


def _saw_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Also finds what came into a module by no hook: copies, `to_empty`."""
    _CONTEXTS[-1].take(module, name, None)
    for part in () if child is None else child.modules():
        for key, parameter in part._parameters.items():
            _CONTEXTS[-1].take(part, key, parameter)


def _initialisers_are_off() -> bool:
    """The code around has switched torch's off, as transformers does where it is going to load weights."""
    probe = torch.zeros((), device="cpu")
    nn.init.constant_(probe, 1.0)
    return not probe.item()


def _name_parameters(root: nn.Module) -> None:
    for name, parameter in root.named_parameters():
        home = home_of(parameter)
        if home is not None and home.buffer is None:
            home.name = name


def _set_environment(value: str | None) -> None:
    if value is None:
        os.environ.pop(_ASYNC, None)
    else:
        os.environ[_ASYNC] = value


def _refuse_later(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotYetError(f"Init({name}={value!r}) is not implemented yet; leave it out")


def _on_host(remote_device: str | None) -> bool:
    if remote_device == "nvme":
        raise NotYetError('Init(remote_device="nvme") is not implemented yet; use "cpu", or leave it out')
    if remote_device not in (None, "none", "cpu"):
        raise ConfigError(f'Init(remote_device={remote_device!r}): it must be None, "none" or "cpu"')
    return remote_device == "cpu"


def _stage_of(config_dict_or_path: Any, config: Any) -> int:
    """The config's; 3 without a config. Asks for nothing that is not known before there is a model."""
    if config_dict_or_path is not None and config is not None:
        raise ConfigError(
            "Init got both config_dict_or_path= and config=, which is its old name; pass the first one"
        )
    given = config if config_dict_or_path is None else config_dict_or_path
    if given is None:
        return 3
    if not isinstance(given, Config):
        raw = read_config(given)
        given = parse(resolve_auto(raw.data, AutoFacts(), source=raw.source, strict=False))
    return given.zero_optimization.stage


def _one_group(
    data_parallel_group: dist.ProcessGroup | None, sequence_group: dist.ProcessGroup | None, mpu: Any
) -> dist.ProcessGroup | None:
    if data_parallel_group is not None and sequence_group is not None:
        raise ConfigError(
            "Init got both data_parallel_group= and sequence_data_parallel_group=; parameters are spread over one "
            "group: pass one of them"
        )
    group = data_parallel_group or sequence_group
    if group is None and mpu is not None:
        group = mpu.get_data_parallel_group()
    return group


def _check_environment(world: World, group: dist.ProcessGroup | None) -> None:
    told = os.environ.get("WORLD_SIZE", "1")
    if group is None and world.size == 1 and told.isdigit() and int(told) > 1:
        raise CommError(
            f"WORLD_SIZE={told} in the environment, but the torch.distributed group has 1 rank, so each process "
            f"would build a whole model. Call torch.distributed.init_process_group with all processes before "
            f"zeroshard.Init, or pass data_parallel_group="
        )
