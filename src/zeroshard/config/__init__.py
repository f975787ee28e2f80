"""The config: a DeepSpeed JSON file (or dict) becomes one frozen tree, in two steps.

    config = parse("ds_config.json")   # what was asked for: every key known, every value checked
    require_supported(config)          # and this release can do it

No key is ignored in silence: `explain_config(config)` says what happens with each, `config.notes` has a line
for each that has no effect or an old name, and `iter_keys()` lists them all. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from zeroshard.config.aliases import canonical
from zeroshard.config.auto import AutoFacts, resolve_auto
from zeroshard.config.batch import BatchPlan, resolve_batch
from zeroshard.config.keys import GivenKey, KeyRow, explain_config, iter_keys, render_keys
from zeroshard.config.nearest import unknown_key_cure
from zeroshard.config.optimizer import OptimizerChoice, torch_optimizer
from zeroshard.config.parsing import RawConfig, read_config
from zeroshard.config.problems import findings_of, raise_findings
from zeroshard.config.rules import combination_findings, no_effect_notes, require_supported
from zeroshard.config.scalars import FrozenMapping
from zeroshard.config.tree import Config

__all__ = [
    "AutoFacts",
    "BatchPlan",
    "Config",
    "FrozenMapping",
    "GivenKey",
    "KeyRow",
    "OptimizerChoice",
    "RawConfig",
    "explain_config",
    "iter_keys",
    "parse",
    "read_config",
    "render_keys",
    "require_supported",
    "resolve_auto",
    "resolve_batch",
    "torch_optimizer",
]


def parse(
    config: Mapping[str, Any] | str | os.PathLike[str] | RawConfig | Config, *, facts: AutoFacts | None = None
) -> Config:
    """Read and check a config; see `read_config` for the accepted forms. A `Config` is returned as it is.

    Args:
        config: the config. A dict is not changed and not kept.
        facts: what "auto" is resolved from; None knows nothing.

    Raises:
        UnknownKeyError: a key does not exist, at any depth; the nearest known one is named.
        ConfigError: the config cannot be read, or a value or combination breaks a rule, or an "auto" cannot
            be resolved. One error lists every problem.
    """
    if isinstance(config, Config):
        return config
    read = read_config(config)
    resolved = resolve_auto(read.data, facts or AutoFacts(), source=read.source)
    spelt = canonical(resolved)
    findings = list(spelt.findings)
    try:
        tree = Config.model_validate(spelt.data)
    except ValidationError as error:
        findings += findings_of(error, unknown_key_cure)
    else:
        findings += combination_findings(tree)
    raise_findings(findings, read.source)
    tree._source = read.source
    tree._raw = FrozenMapping(resolved)
    tree._notes = (*spelt.notes, *no_effect_notes(tree))
    return tree
