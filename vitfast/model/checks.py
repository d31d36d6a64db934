"""Checks of single values: what is expected, whether a value is so, and its form in Python's types."""

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
    """Those values that an argument may have; `convert` makes them Python's own type."""

    text: str  # what was expected
    holds: Callable[[object], bool]
    convert: Callable[[object], object] = lambda value: value

    def __call__(self, value):
        """The converted value. Raises ValueError with `text` if it does not hold."""
        if not self.holds(value):
            raise ValueError(self.text)
        return self.convert(value)


def whole(low: int, high: int) -> Check:
    def holds(value) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high

    return Check(f"a whole number from {low} to {high}", holds, int)


def number(text: str, holds: Callable[[float], bool]) -> Check:
    """A check for finite numbers for which `holds` is true; text: their name in messages."""

    def finite(value) -> bool:
        try:
            real = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        except OverflowError:  # a whole number that is too large for a float
            real = math.inf
        return math.isfinite(real) and holds(real)

    return Check(text, finite, float)


def one_of(names: Sequence[str] | Any) -> Check:
    """A check for names, which a Literal may list."""
    names = get_args(names) or names
    return Check(f"one of {', '.join(map(repr, names))}", lambda value: isinstance(value, str) and value in names)


def optional(check: Check) -> Check:
    convert = lambda value: None if value is None else check.convert(value)  # noqa: E731
    return Check(f"None or {check.text}", lambda value: value is None or check.holds(value), convert)


def some(check: Check, lengths: range, text: str) -> Check:
    """A check for lists or tuples of so many values, which become tuples. text: their name in messages."""

    def holds(value) -> bool:
        return isinstance(value, (list, tuple)) and len(value) in lengths and all(map(check.holds, value))

    return Check(text, holds, lambda value: tuple(map(check.convert, value)))


def one_or_some(check: Check, lengths: range, text: str) -> Check:
    every = some(check, lengths, text)
    either = lambda value: every if isinstance(value, (list, tuple)) else check  # noqa: E731
    return Check(text, lambda value: either(value).holds(value), lambda value: either(value).convert(value))


def each_channel(check: Check, text: str) -> Check:
    """A check for one value or one for each channel, also in a tensor or an array."""
    listed = one_or_some(check, range(1, 2**16 + 1), text)
    return Check(text, lambda value: listed.holds(_listed(value)), lambda value: listed.convert(_listed(value)))


def _listed(value):
    """The numbers of a tensor or an array as a list; None if it is sparse or without values (meta)."""
    try:
        return value.reshape(-1).tolist() if hasattr(value, "reshape") else value
    except (RuntimeError, NotImplementedError):
        return None


flag = Check("True or False", lambda value: isinstance(value, bool))


def enforce(check: Check, value, called: str):
    """check(value); raises InputError with the name `called` where it does not pass."""
    try:
        return check(value)
    except ValueError as error:
        raise InputError(f"{called} must be {error}, got {shown(value)}") from None
