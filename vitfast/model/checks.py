"""Checks of single values: each says which values it allows, and converts them to Python's own types."""

import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

from ..errors import InputError

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value) -> str:
    """The repr of a value for a message: one line, shortened if it is long."""
    return " ".join(_repr.repr(value).split())


@dataclass(frozen=True)
class Check:
    """The values that an argument may have, and their form in Python's own types."""

    text: str  # what was expected
    convert: Callable[[Any], object]  # raises ValueError or OverflowError for other values

    def __call__(self, value):
        """The converted value. Raises ValueError with `text` for a value that the argument may not have."""
        try:
            return self.convert(value)
        except (ValueError, OverflowError):  # a whole number may be too large for a float
            raise ValueError(self.text) from None


def only(value, allowed: bool):
    """The value. Raises ValueError unless it is allowed."""
    if not allowed:
        raise ValueError(value)
    return value


def whole(low: int, high: int) -> Check:
    in_range = lambda value: _is_number(value, Integral) and low <= value <= high  # noqa: E731
    return Check(f"a whole number from {low} to {high}", lambda value: int(only(value, in_range(value))))


def number(text: str, holds: Callable[[float], bool]) -> Check:
    """A check for finite numbers for which `holds` is true; text: their name in messages."""

    def convert(value) -> float:
        real = float(only(value, _is_number(value, Real)))
        return only(real, math.isfinite(real) and holds(real))

    return Check(text, convert)


def _is_number(value, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def one_of(names: Sequence[str] | Any) -> Check:
    """A check for names, which a Literal may list."""
    names = get_args(names) or names
    listed = ", ".join(map(repr, names))
    return Check(f"one of {listed}", lambda value: only(value, isinstance(value, str) and value in names))


def optional(check: Check) -> Check:
    return Check(f"None or {check.text}", lambda value: None if value is None else check(value))


def some(check: Check, lengths: range, text: str) -> Check:
    """A check for lists and tuples of some lengths; it makes tuples. text: their name in messages."""
    fits = lambda value: isinstance(value, (list, tuple)) and len(value) in lengths  # noqa: E731
    return Check(text, lambda value: tuple(map(check, only(value, fits(value)))))


def one_or_some(check: Check, lengths: range, text: str) -> Check:
    every = some(check, lengths, text)
    return Check(text, lambda value: (every if isinstance(value, (list, tuple)) else check)(value))


def each_channel(check: Check, text: str) -> Check:
    """A check for one value or one for each channel, also in a tensor or an array."""
    listed = one_or_some(check, range(1, 2**16 + 1), text)
    return Check(text, lambda value: listed(_listed(value)))


def _listed(value):
    """The numbers of a tensor or an array as a list; None if it is sparse or on the meta device."""
    try:
        return value.reshape(-1).tolist() if hasattr(value, "reshape") else value
    except (RuntimeError, NotImplementedError):
        return None


flag = Check("True or False", lambda value: only(value, isinstance(value, bool)))


def enforce(check: Check, value, called: str):
    """check(value); raises InputError with the name `called` where it does not pass."""
    try:
        return check(value)
    except ValueError as error:
        raise InputError(f"{called} must be {error}, got {shown(value)}") from None
