"""Compiles a small model of each encoder with the backend, and compares it with the library's code."""

import dataclasses
import logging
import re
from collections import Counter
from unittest import mock

import torch
from torch import nn

from .. import backend
from .encoders import ENCODERS, Encoder
from .families import SAME, error_of, installed, randomised, run
from .verify import exact_fp32

HALVES = {"attention": ("attention block",), "mlp": ("MLP block", "gated MLP block")}


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The results of one encoder.

    attention, mlp: (halves replaced whole, halves that have the operations' mathematics). besides: what else is
    replaced, by kind. left: how many parts stay the library's, by reason. error: the largest one of outputs and
    gradients, relative to the library's largest number. failure: why there are no results.
    """

    library: str
    family: str
    attention: tuple[int, int] = (0, 0)
    mlp: tuple[int, int] = (0, 0)
    besides: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether it was compiled, and gave the library's numbers."""
        return not self.failure and self.error <= SAME


def cover(encoder: Encoder, device: str = "cpu") -> Coverage:
    """The row of one encoder whose library is installed; an error becomes the row's `failure`."""
    family = encoder.family
    named = dict(library=family.library, family=family.name)
    try:
        quiet = mock.patch.object(logging.getLogger("vitfast"), "disabled", True)
        with torch.random.fork_rng(), quiet, exact_fp32(torch.backends.cuda.matmul):
            torch.manual_seed(0)
            model = randomised(family.make()).to(device)
            batch = {name: value.to(device) for name, value in family.batch().items()}
            theirs = run(family, model, batch)
            compiled, entries = _compiled(model)
            ours = run(family, compiled, batch)
            error = max(error_of(a, b) for a, b in zip(ours, theirs))
    except Exception as error:  # a library of another version: a row says so, and the others follow
        return Coverage(**named, failure=f"{type(error).__name__}: {error}".split("\n")[0])
    done = Counter(e.kind for e in entries if e.why is None)
    halves = {name: (sum(done.pop(k, 0) for k in kinds), getattr(encoder, name)) for name, kinds in HALVES.items()}
    return Coverage(**named, **halves, besides=dict(done), left=_left(encoder, entries), error=error)


def _compiled(model: nn.Module) -> tuple[nn.Module, list[backend.Entry]]:
    """(the compiled model, a list that gets the entries of a graph whenever it runs).

    A graph may run for many layers, where graph breaks cut a model.
    """
    entries: list[backend.Entry] = []

    def compile_graph(graph, inputs):
        compiled = backend.compile_graph(graph, inputs, options={"inner": "eager"})
        report = backend.report()

        def call(*arguments):
            entries.extend(report)
            return compiled(*arguments)

        return call

    torch._dynamo.reset()
    return torch.compile(model, backend=compile_graph), entries


def _left(encoder: Encoder, entries: list[backend.Entry]) -> dict[str, int]:
    """How many parts are left, by kind and reason; first the encoder's `why`, which a person wrote."""
    reasons = Counter(f"{e.kind}: {re.sub(r' [(]the nearest.*', '', e.why)}" for e in entries if e.why is not None)
    return ({encoder.why: 1} if encoder.why else {}) | dict(reasons)


def chosen(library: str | None = None) -> list[Encoder]:
    """The installed encoders, of one library or of all. Raises InputError where there are none."""
    return installed(ENCODERS, library)


def whole(rows: list[Coverage]) -> tuple[int, int]:
    """(halves replaced whole, halves that have the operations' mathematics)."""
    return tuple(sum(row.attention[i] + row.mlp[i] for row in rows) for i in range(2))
