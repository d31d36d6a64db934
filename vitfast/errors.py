"""Errors of wrong input (exit 2) and failed training (exit 1), and values that several rooms check.

The command line shows these errors in one line. PyTorch is not imported: model/config.py is read without it.
"""

import difflib
from collections.abc import Iterable
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]  # timm's names

# The least `std`, and the largest `mean` and `std`, on the 0..1 scale; within them float32 holds the results.
LEAST_STD, MOST_PIXEL = 1e-6, 1e6


class InputError(ValueError):
    """An input is wrong; the message names it and says what to do."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stopped and what is kept."""


class Diverged(TrainingError):
    """A loss, a gradient or a weight is not finite."""


def unknown(kind: str, name: object, known: Iterable[str]) -> InputError:
    """An InputError for a name that does not exist, which says the nearest names that do."""
    known, name = list(known), both_ends(str(name), 80)
    lower = {k.lower(): k for k in known}
    near = [lower[k] for k in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.4)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return InputError(f"unknown {kind} {name!r}; {hint}")


def install(extra: str) -> str:
    """How to install vitfast with an extra: from a checkout, since it is not on PyPI yet."""
    return f"pip install '.[{extra}]' in a checkout of vitfast (once it is on PyPI: pip install 'vitfast[{extra}]')"


def both_ends(text: str, limit: int = 400) -> str:
    """Returns `text` in one line of at most `limit` characters: its start, " ... " and its end.

    Both ends are kept, because compilers say what is wrong at the end.
    """
    text, gap = " ".join(text.split()), " ... "
    if len(text) <= limit:
        return text
    tail = max(0, limit - len(gap)) // 2
    return text[: limit - len(gap) - tail] + gap + text[len(text) - tail :]
