"""The rules that join several keys, and what of a config this release can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zeroshard.config.keys import GivenKey, asks, given_keys, parameter_keys, switch_of
from zeroshard.config.nearest import closest
from zeroshard.config.optimizer import class_name, parameters_of, unsupported
from zeroshard.config.problems import Finding, shown
from zeroshard.config.sections import LOGGED_AS
from zeroshard.config.status import Status
from zeroshard.config.tree import Config
from zeroshard.errors import ConfigError, NotYetError

__all__ = ["SCHEDULE_TYPES", "combination_findings", "no_effect_notes", "require_supported"]

SCHEDULE_TYPES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def combination_findings(config: Config) -> Iterator[Finding]:
    """What single values do not show: keys that exclude or need one another."""
    yield from _precision(config)
    yield from _offload(config)
    yield from _groups(config)
    yield from _parameters(config, "optimizer")
    yield from _amsgrad(config)
    yield from _parameters(config, "scheduler")
    yield from _logged(config)


def _precision(config: Config) -> Iterator[Finding]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Finding(
            path="fp16.enabled",
            value=True,
            rule="bf16.enabled is true too, and a model computes in one dtype",
            cure="set one of the two to false",
        )
        return
    yield from _sixteen_bit_states(config)
    cast = config.torch_autocast
    if cast.enabled and config.compute_dtype != "fp32":
        yield Finding(
            path="torch_autocast.enabled",
            value=True,
            rule=f"{config.compute_dtype}.enabled is true too, and casts all parameters",
            cure="set one of the two to false",
        )
    if cast.enabled and cast.dtype == "fp32":
        yield Finding(
            path="torch_autocast.dtype",
            value="fp32",
            rule="autocast is to a lower precision",
            cure="write bfloat16 or float16, or set torch_autocast.enabled to false",
        )
    if config.gradient_clipping > 0 and not config.zero_optimization.compute_grad_norm:
        yield Finding(
            path="zero_optimization.compute_grad_norm",
            value=False,
            rule=f"gradient_clipping is {config.gradient_clipping:g}, and clipping needs the norm",
            cure="set gradient_clipping to 0 as well, or remove compute_grad_norm",
        )
    dtype = config.data_types.param_dtype
    if dtype is not None and dtype != config.compute_dtype:
        yield Finding(
            path="data_types.param_dtype",
            value=dtype,
            rule=f"the fp16 and bf16 sections make the parameters {config.compute_dtype}",
            cure=f"enable {dtype}, or remove param_dtype" if dtype != "fp32" else "remove param_dtype",
        )


def _sixteen_bit_states(config: Config) -> Iterator[Finding]:
    masters, states = config.bf16.bf16_master_weights_and_grads, config.bf16.bf16_optimizer_states
    if states and not masters:
        yield Finding(
            path="bf16.bf16_optimizer_states",
            value=True,
            rule="moments have the dtype of the masters, and these are fp32",
            cure="set bf16.bf16_master_weights_and_grads to true as well, or remove it",
        )
    if masters and not states:
        yield Finding(
            path="bf16.bf16_master_weights_and_grads",
            value=True,
            rule="fp32 moments over bf16 masters need the offloaded optimizer",
            cure="set bf16.bf16_optimizer_states to true as well, or remove it",
        )
    if masters and not config.bf16.enabled:
        yield Finding(
            path="bf16.bf16_master_weights_and_grads",
            value=True,
            rule="bf16.enabled is false",
            cure="set bf16.enabled to true, or remove it",
        )


def _offload(config: Config) -> Iterator[Finding]:
    zero = config.zero_optimization
    for name, device, path, least in (
        ("offload_param", zero.offload_param.device, zero.offload_param.nvme_path, 3),
        (
            "offload_optimizer",
            zero.offload_optimizer.device,
            zero.offload_optimizer.nvme_path,
            3 if zero.offload_optimizer.device == "nvme" else 1,
        ),
    ):
        if device == "none":
            continue
        key = f"zero_optimization.{name}.device"
        if zero.stage < least:
            rule = f"needs zero_optimization.stage {least} or more, and the stage is {zero.stage}"
            yield Finding(path=key, value=device, rule=rule, cure=f"set stage to {least}, or device to none")
        if device == "nvme" and path is None:
            rule = f"needs zero_optimization.{name}.nvme_path"
            yield Finding(path=key, value=device, rule=rule, cure="name a directory on the NVMe drive")


def _groups(config: Config) -> Iterator[Finding]:
    zero = config.zero_optimization
    for name, size, least in (
        ("mics_shard_size", zero.mics_shard_size, 1),
        ("zero_hpz_partition_size", zero.zero_hpz_partition_size - 1, 3),
    ):
        if size > 0 and zero.stage < least:
            yield Finding(
                path=f"zero_optimization.{name}",
                value=getattr(zero, name),
                rule=f"needs zero_optimization.stage {least} or more, and the stage is {zero.stage}",
                cure=f"set stage to {least}, or remove {name}",
            )


def _parameters(config: Config, section: str) -> Iterator[Finding]:
    type_: str | None = getattr(config, section).type
    rows = parameter_keys(section, type_)
    own = {name for name, key in rows.items() if "(" in key.path}
    names: set[str] | None = None
    if section == "optimizer" and type_ is not None:
        common = parameters_of(type_)
        names = None if common is None else own | common
    if type_ in SCHEDULE_TYPES:
        names = own | {"last_batch_iteration"}
    for name, value in getattr(config, section).params.items():
        path = f"{section}.params.{name}"
        if section == "optimizer" and name == "max_grad_norm":
            cure = f"remove it and write gradient_clipping: {shown(value)} at the top level"
            yield Finding(path=path, value=value, rule="the norm is not an optimizer's matter", cure=cure)
        elif names is not None and name not in names:
            near = closest(name, names)
            cure = (
                f"did you mean {section}.params.{near}?"
                if near
                else f"{type_} has {', '.join(sorted(names))}"
            )
            yield Finding(path=path, value=value, rule=f"{type_} has no such key", cure=cure, unknown=True)
        elif name in rows:
            yield from _parameter_value(path, value, rows[name].type or "")


def _logged(config: Config) -> Iterator[Finding]:
    for name in config.comms_logger.prof_ops:
        if name not in LOGGED_AS:
            near = closest(name, LOGGED_AS)
            cure = f"did you mean {near}?" if near else f"known are {', '.join(sorted(LOGGED_AS))}"
            yield Finding(
                path="comms_logger.prof_ops", value=name, rule="is not the name of a collective", cure=cure
            )


def _amsgrad(config: Config) -> Iterator[Finding]:
    type_, params = class_name(config.optimizer.type or ""), config.optimizer.params
    if params.get("amsgrad") is not True:
        return
    if type_ == "Lamb" or (type_ in ("Adam", "AdamW") and params.get("bias_correction") is False):
        which = "Lamb" if type_ == "Lamb" else f"{type_} without bias correction"
        rule, cure = f"{which} has no AMSGrad variant", "remove it or set it to false"
        yield Finding(path="optimizer.params.amsgrad", value=True, rule=rule, cure=cure)


def _parameter_value(path: str, value: Any, type_: str) -> Iterator[Finding]:
    if type_ == "bool" and not isinstance(value, bool) and value is not None:
        yield Finding(path=path, value=value, rule="must be true or false", cure="write true or false")
    choices = type_.removeprefix("enum ").split("|") if type_.startswith("enum ") else None
    if choices is not None and value not in choices:
        rule = f"must be one of {', '.join(choices)}"
        yield Finding(path=path, value=value, rule=rule, cure="write one of those")
    numeric = type_ in ("int", "float", "float|list")
    if numeric and isinstance(value, (str, bool)):
        cure = "remove the quotes" if isinstance(value, str) else "write a number"
        yield Finding(path=path, value=value, rule="must be a number", cure=cure)
    if type_.startswith("enum ") and value not in (allowed := type_.removeprefix("enum ").split("|")):
        rule = f"must be one of {', '.join(map(shown, allowed))}"
        yield Finding(path=path, value=value, rule=rule, cure="write one of those")
    if type_ == "[float,float]" and not (
        isinstance(value, tuple) and len(value) == 2 and not any(isinstance(v, (str, bool)) for v in value)
    ):
        yield Finding(
            path=path, value=value, rule="must be a list of two numbers", cure="write it as [0.9, 0.999]"
        )


def no_effect_notes(config: Config) -> Iterator[str]:
    """One line for each key that asks for something and has no effect here."""
    for given in given_keys(config):
        key = given.key
        if key is None or key.status.kind != "no effect" or not asks(key, given.value, given.default):
            continue
        if switch_of(config, given.path)[0]:
            yield f"{given.path} = {shown(given.value)} has no effect here, because {key.status.text}"
    yield from _logged_in_vain(config)


def _logged_in_vain(config: Config) -> Iterator[str]:
    section = config.comms_logger
    if not section.enabled or not section.prof_ops:
        return
    start = f"comms_logger.prof_ops = {shown(section.prof_ops)}"
    if section.prof_all:
        yield f"{start} has no effect, because prof_all is true, which is the default"
        return
    never = [name for name in section.prof_ops if LOGGED_AS[name] is None]
    if never:
        yield f"{start}: an engine launches no {', '.join(never)}, so there is nothing to log of it"


def require_supported(config: Config) -> None:
    """Return if this release can do all that `config` asks for.

    Raises:
        NotYetError: it asks for something that is known and not there yet.
        ConfigError: it asks for something that is refused for good (what is not yet there is listed too).
    """
    findings = list(_unsupported_keys(config))
    if not findings:
        return
    kind = ConfigError if any(status.kind == "refused" for status, _ in findings) else NotYetError
    if len(findings) == 1:
        raise kind(f"{config.source}: {findings[0][1]}")
    lines = "".join(f"\n  {text}" for _, text in findings)
    raise kind(f"{config.source}: {len(findings)} keys ask for what this release does not do{lines}")


def _unsupported_keys(config: Config) -> Iterator[tuple[Status, str]]:
    for given in given_keys(config):
        status = _unsupported_status(config, given)
        if status is not None:
            not_yet = status.kind == "not yet"
            reason = f"not in this release ({status.text})" if not_yet else str(status)
            yield status, f"{given.path} = {shown(given.value)}: {reason}; {_cure(given)}"


def _unsupported_status(config: Config, given: GivenKey) -> Status | None:
    key = given.key
    if given.path == "optimizer.type" and given.value is not None:
        return unsupported(given.value)
    if key is None or not asks(key, given.value, given.default):
        return None
    on, switches = switch_of(config, given.path)
    # Of a section that is off nothing is asked; of one whose switch is reported, the switch is enough.
    if not on or any(switch.status.kind in ("not yet", "refused") for switch in switches):
        return None
    if key.path.startswith("optimizer.params (") and unsupported(config.optimizer.type or "") is not None:
        return None
    if key.status.kind in ("not yet", "refused"):
        return key.status
    return None


def _cure(given: GivenKey) -> str:
    if given.path == "optimizer.type":
        return "choose AdamW, Adam, SGD, Lion, Lamb, Muon, Adafactor or another class of torch.optim"
    if given.default is None or given.key is None or isinstance(given.value, dict):
        return "remove it"
    plain_default = isinstance(given.default, (bool, int, float, str))
    return f"remove it or set it to {shown(given.default)}" if plain_default else "remove it"
