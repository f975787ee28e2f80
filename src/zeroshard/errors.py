"""The errors zeroshard raises, drawn as a tree.

    ZeroShardError
    ├── ConfigError            a key, value or combination of the config
    │   ├── UnknownKeyError    a key nobody knows; carries the nearest known one
    │   └── NotYetError        a key that is known but not implemented in this release
    ├── ModelError             the model handed to `initialize` (no parameters, foreign optimizer, ...)
    ├── ShardedAccessError     a sharded parameter was read where it cannot be gathered
    ├── ScheduleError          a schedule that breaks a rule, or ranks whose schedules differ
    ├── CommError              a collective failed
    │   ├── RankLostError      a peer went away; names the rank
    │   └── DivergedError      ranks launched different collectives, or wait for each other
    ├── CheckpointError        a checkpoint that cannot be written, read, or does not fit
    ├── LaunchError            a command line, hostfile or host that ranks cannot be started with
    ├── StateError             an illegal move of a bucket or of the engine's life cycle
    └── NonFiniteError         steps go on giving NaN or infinity, and nothing can adapt to it

Each message names the value, where it came from, the rule it broke, and the cure.
Asserts are kept for our own mistakes.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DivergedError",
    "LaunchError",
    "ModelError",
    "NonFiniteError",
    "NotYetError",
    "RankLostError",
    "ScheduleError",
    "ShardedAccessError",
    "StateError",
    "UnknownKeyError",
    "ZeroShardError",
]


class ZeroShardError(Exception):
    """Root of everything zeroshard raises on purpose."""


class ConfigError(ZeroShardError, ValueError):
    """A config file, key, value or combination that cannot be used."""


class UnknownKeyError(ConfigError):
    """A key that no version of the config has; the message carries the nearest known name."""


class NotYetError(ConfigError, NotImplementedError):
    """A key that zeroshard knows and will implement, but not in this release."""


class ModelError(ZeroShardError, ValueError):
    """The model, or the optimizer that came with it, cannot be trained as it is."""


class ShardedAccessError(ZeroShardError, RuntimeError):
    """A sharded parameter was touched outside a forward; the message names it and the cure."""


class ScheduleError(ZeroShardError, RuntimeError):
    """A schedule that breaks a rule (use before gather, budget, leftovers) or differs between ranks."""


class CommError(ZeroShardError, RuntimeError):
    """A collective could not be completed."""


class RankLostError(CommError):
    """A peer rank closed its end; the message names it."""


class DivergedError(CommError):
    """Ranks launched different collectives, or wait for each other; the message says who is where."""


class CheckpointError(ZeroShardError, RuntimeError):
    """A checkpoint cannot be written or read, is damaged, or belongs to another model."""


class LaunchError(ZeroShardError, ValueError):
    """Ranks cannot be started as asked: an option, a line of the hostfile, a host, a missing program."""


class StateError(ZeroShardError, RuntimeError):
    """An illegal move: names the object, the state it is in and the state it was asked to enter."""


class NonFiniteError(ZeroShardError, ArithmeticError):
    """Gradients that are not finite, step after step; names the module or parameter where it began."""
