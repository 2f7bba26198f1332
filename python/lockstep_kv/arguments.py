"""Checks of Python arguments: what does not fit is refused with the argument's name and the value given."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep_kv.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_INT64", "checked_int", "flat_ints", "host_ints"]

MAX_INT64 = 2**63 - 1
# Products of two sizes must fit in 64 bits.
_MAX_SIZE = 2**31 - 1
_SHOWN = 80


def checked_int(name: str, value: Any, *, low: int, high: int = _MAX_SIZE) -> int:
    """Return the argument as an int between `low` and `high`."""
    if isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an int, got {_shown(value)}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} must be an int, got {_shown(value)}") from None
    if not low <= number <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {_text(number)}")
    return number


def host_ints(name: str, values: Any) -> NDArray[np.int64]:
    """Return the argument as an int64 numpy array. Bools, floats and ints over 64 bits are refused."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(f"{name} must be ints in a regular shape, got {_shown(values)}") from None
    if array.size == 0 and not hasattr(values, "dtype"):
        return array.astype(np.int64)
    if array.dtype.kind in "Of" and not hasattr(values, "dtype"):
        # Ints that do not fit in one integer type: numpy makes them objects, or floats.
        array = np.asarray(values, dtype=object)
        if all(type(item) is int for item in array.flat):
            raise ConfigError(f"{name} must fit in 64 bits, got {_shown(values)}")
    if array.dtype.kind not in "iu" or (isinstance(values, list | tuple) and _holds_bool(values)):
        raise ArgumentTypeError(f"{name} must be ints, got {_shown(values)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > MAX_INT64:
        raise ConfigError(f"{name} must fit in 64 bits, got {array.max()}")
    return array.astype(np.int64, copy=False)


def flat_ints(name: str, values: Any, *, low: int, high: int) -> NDArray[np.int64]:
    """Return the argument as a 1-D array of ints between `low` and `high`."""
    ints = host_ints(name, values)
    if ints.ndim != 1:
        raise ConfigError(f"{name} must be a flat sequence, got shape {ints.shape}")
    wrong = ints[(ints < low) | (ints > high)]
    if wrong.size:
        raise ConfigError(f"{name} must be between {low} and {high}, got {wrong[0]}")
    return ints


def _holds_bool(values: list[Any] | tuple[Any, ...]) -> bool:
    """Tell whether a nested sequence holds a bool; numpy turns a bool among ints into an int."""
    kinds = set(map(type, values))
    if bool in kinds or np.bool_ in kinds:
        return True
    return bool(kinds & {list, tuple}) and any(_holds_bool(item) for item in values if isinstance(item, list | tuple))


def _shown(value: Any) -> str:
    """Show the value's type and the start of its text on one line."""
    return f"{type(value).__name__} {_text(value)}"


def _text(value: Any) -> str:
    """Show the start of the value's text on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        # Python does not print ints of thousands of digits.
        text = "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
