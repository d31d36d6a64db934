"""The fields of settings: what kinds of values they take, and how text becomes such a value."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import field

from ..errors import InputError, both_ends

_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def plain(default, meaning: str):
    """A field of any value of its type."""
    return field(default=default, metadata=dict(meaning=meaning))


def rule(default, holds: Callable[[object], bool], text: str, meaning: str):
    """A field whose values other than None must fulfil `holds`; `text` completes "FIELD must ..."."""
    return field(default=default, metadata=dict(meaning=meaning, holds=holds, text=text))


def choice(names: tuple[str, ...], meaning: str):
    """A field with one of these values, the first by default."""
    text = f"be one of {', '.join(name or repr(name) for name in names)}"
    return rule(names[0], lambda value: value in names, text, meaning)


def positive(default, meaning: str):
    return rule(default, lambda value: value > 0, "be positive", meaning)


def count(default: int | None, most: int, meaning: str):
    """A field of a whole number from 1 to `most`, so that no slip of the finger takes the machine down."""
    return rule(default, lambda value: 1 <= value <= most, f"be positive, and at most {most:,}", meaning)


def within(default: float | None, interval: str, meaning: str):
    """A field of a number in an interval such as "[0, 1)", which includes the end at a square bracket."""
    low, high = map(float, interval[1:-1].split(","))
    ends = {low} if interval[0] == "[" else set()
    ends |= {high} if interval[-1] == "]" else set()
    return rule(default, lambda value: low < value < high or value in ends, f"lie in {interval}", meaning)


def natural(default, meaning: str):
    return rule(default, lambda value: value >= 0, "be at least 0", meaning)


def span(default: tuple[float, float], high: float, meaning: str):
    """A field of two positive numbers up to `high`, the smaller first."""
    text = f"be two numbers, the smaller first, above 0 and at most {high:g}"
    return rule(default, lambda value: 0 < value[0] <= value[1] <= high, text, meaning)


def is_none(value) -> bool:
    """Whether a value, perhaps as text, says that an optional field is unset."""
    return value is None or str(value).lower() in ("none", "null", "")


def allowed(each: dataclasses.Field, type_of, value):
    """Returns `value`, which may be text, in the field's type `type_of`.

    Raises InputError if the field forbids it.
    """
    options = typing.get_args(type_of) if isinstance(type_of, types.UnionType) else ()
    if type(None) in options and is_none(value):
        return None
    kind = next((option for option in options if option is not type(None)), type_of)
    shown = both_ends(repr(value), 80)
    try:
        parsed = _parse(kind, value)
    except (TypeError, ValueError, KeyError, OverflowError):
        expected = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
        text = expected.get(kind, "numbers, such as 0.9,0.999")
        raise InputError(f"{each.name} must be {text}, got {shown}") from None
    if "holds" in each.metadata and not each.metadata["holds"](parsed):
        raise InputError(f"{each.name} must {each.metadata['text']}, got {shown}")
    return parsed


def _parse(kind, value):
    """Converts one value to `kind`; raises a built-in exception of Python where that is impossible."""
    if kind is bool:
        return _TRUTH[str(value).lower()]
    if kind is str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise ValueError("text")
        return str(value)
    if typing.get_origin(kind) is tuple:
        items = value.strip("()[] ").split(",") if isinstance(value, str) else list(value)
        numbers = tuple(_parse(float, item) for item in items if str(item).strip())
        lengths = typing.get_args(kind)
        if Ellipsis not in lengths and len(numbers) != len(lengths):
            raise ValueError(f"{len(lengths)} numbers")
        return numbers
    if isinstance(value, bool):
        raise ValueError("a number")
    if kind is int and re.fullmatch(r"\s*[+-]?\d+\s*", str(value)):  # not by way of float, which holds 53 bits
        return int(value)
    number = float(value)
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError("a number")
    return kind(number)
