"""Every error the package raises. All derive from `LockstepKVError`; a call that raises one has changed nothing."""

from __future__ import annotations

__all__ = [
    "ArgumentTypeError",
    "ConfigError",
    "DoubleFreeError",
    "InvariantError",
    "LockstepKVError",
    "PoolExhaustedError",
    "StaleHitError",
    "UnknownRequestError",
]


class LockstepKVError(Exception):
    """Base of all errors of this package."""


class ConfigError(LockstepKVError, ValueError):
    """A configuration or an argument has a value that cannot be used; the message names it."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has the wrong type; the message names the argument and what was given."""


class PoolExhaustedError(LockstepKVError):
    """More blocks were asked for than are free."""


class StaleHitError(LockstepKVError):
    """A prefix hit was used after one of its blocks lost the content it was found under."""


class UnknownRequestError(LockstepKVError):
    """The request holds no blocks: it was never allocated, or it was freed."""


class DoubleFreeError(LockstepKVError):
    """A reference, a pin or a transfer was given back that is not held."""


class InvariantError(LockstepKVError):
    """`audit` found a broken invariant: a bug in this package, never a caller's fault."""
