"""The page docs/reference/families.md: each encoder accelerated and compiled, beside itself as it is.

python tests/helpers/coverage_of.py > docs/reference/families.md
"""

import copy
import dataclasses
import importlib.util
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from unittest import mock

import torch
from checks import results
from torch import nn
from vision_encoders import ENCODERS
from vision_families import Family

from vitfast import accelerate, acceleration_report, backend
from vitfast.tools.verify import exact_fp32

SAME = 1e-5  # the largest relative error that passes in fp32, where TF32 is switched off
HALVES = {"attention": ("attention block",), "mlp": ("MLP block", "gated MLP block")}
SAME_KIND = {"patch projection": "patch embedding"}  # alone, or with what lays its patches in rows
HEAD = """# Families of models

This page lists the models whose layers vitfast replaces, with a section for each library: in place, with
[`vitfast.accelerate`](accelerate.md), and in compiled code, with the [backend of `torch.compile`](backend.md). Both
find the layers by structure, and know no library. So models that are not on this page are covered too, if their layers
have the same arithmetic.

`python tests/helpers/coverage_of.py` makes this page. It builds a small model of each encoder with random weights, with
two layers if its sizes can be chosen. It runs the model, an accelerated copy and a compiled copy forward and backward
in training, and counts the parts that are replaced. Where the two differ, the cell has both. A test compares the page
with what the script prints.

A block here is a norm, a branch and the residual: the attention block or the MLP block of a layer. The tables count the
blocks that an operation could compute whole, and how many of them are replaced whole. A block that is not replaced
whole is often replaced in pieces, which "also replaced" lists. The error is the larger one of the two copies: the
largest difference from the library's own numbers, over the output and every gradient, relative to the largest number
there, in fp32. PyTorch computed the operations here, because this ran on a CPU. The last column says what stays the
library's own. It begins with blocks that compute something else.
"""


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The results of one encoder through one door.

    attention, mlp: (halves replaced whole, halves that have the operations' mathematics). besides: what else is
    replaced, by kind. left: how many parts stay the library's, by reason. error: the largest one of outputs and
    gradients, relative to the library's largest number.
    """

    attention: tuple[int, int] = (0, 0)
    mlp: tuple[int, int] = (0, 0)
    besides: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float = 0.0


def accelerated(encoder: Family) -> Coverage:
    """An encoder of which a copy is accelerated in place."""

    def replace(model: nn.Module) -> tuple[nn.Module, Callable[[], list]]:
        model = accelerate(copy.deepcopy(model))
        return model, lambda: [(entry.part, entry.why) for entry in acceleration_report(model)]

    return _covered(encoder, replace)


def compiled(encoder: Family) -> Coverage:
    """The same encoder, compiled by the backend."""
    entries = []

    def compile_graph(graph, inputs):
        made = backend.compile_graph(graph, inputs, options={"inner": "eager"})
        report = backend.report()

        def call(*arguments):
            entries.extend(report)  # whenever it runs: for many layers, where graph breaks cut a model
            return made(*arguments)

        return call

    def replace(model: nn.Module) -> tuple[Callable, Callable[[], list]]:
        return torch.compile(model, backend=compile_graph), lambda: [(entry.kind, entry.why) for entry in entries]

    return _covered(encoder, replace)


def _covered(encoder: Family, replace: Callable) -> Coverage:
    quiet = mock.patch.object(logging.getLogger("vitfast"), "disabled", True)
    torch._dynamo.reset()
    with torch.random.fork_rng(), quiet, exact_fp32(torch.backends.cuda.matmul):
        torch.manual_seed(0)
        original, batch = randomised(encoder.make()).train(), (encoder.batch(), encoder.valid)
        theirs, (model, entries) = results(original, original, *batch), replace(original)
        error = error_of(results(model, model, *batch), theirs)
    done = Counter(SAME_KIND.get(kind, kind) for kind, why in entries() if why is None)
    halves = {name: (sum(done.pop(k, 0) for k in kinds), getattr(encoder, name)) for name, kinds in HALVES.items()}
    left = Counter(
        f"{kind}: {re.sub(r' [(]the nearest.*', '', why)}" for kind, why in entries() if why is not None and kind
    )
    why = {encoder.why: 1} if encoder.why else {}  # which a person wrote
    return Coverage(**halves, besides=dict(sorted(done.items())), left=why | left, error=error)


def row(encoder: Family) -> list[str]:
    """The cells of an encoder; raises AssertionError if it has other numbers than the library's."""
    doors = accelerated(encoder), compiled(encoder)
    assert all(door.error <= SAME for door in doors), (encoder.name, doors)  # no NaN either
    counts = lambda found: ", ".join(f"{n} x {name}" if n > 1 else name for name, n in found.items())  # noqa: E731
    halves = lambda half: f"{half[0]} of {half[1]}" if half[1] else ""  # noqa: E731
    texts = ([halves(d.attention), halves(d.mlp), counts(d.besides), "below 0.00001", counts(d.left)] for d in doors)
    same = (a if a == b else f"{a or 'nothing'}; compiled: {b or 'nothing'}" for a, b in zip(*texts))
    return [encoder.name, *same]


def page(encoders: Iterable[Family] = ENCODERS) -> str:
    """The page, with the rows of these encoders."""
    columns = "encoder | attention blocks | MLP blocks | also replaced | error | the library's own code, and why"
    found: dict[str, list[list[str]]] = {}
    for encoder in encoders:
        if importlib.util.find_spec(encoder.library) is not None:
            found.setdefault(encoder.library, []).append(row(encoder))
            print(encoder.library, *found[encoder.library][-1], sep=" | ", file=sys.stderr, flush=True)
    lines = [HEAD]
    for library, rows in found.items():
        lines += [f"## {library}", "", f"| {columns} |", "|" + "---|" * 6]
        lines += [*(f"| {' | '.join(cells)} |" for cells in rows), ""]
    return "\n".join([*lines, shares([cells for rows in found.values() for cells in rows])])


def shares(rows: list[list[str]]) -> str:
    """The last line of the page: how many of the blocks that an operation could compute are replaced whole."""
    texts = []
    for i, door in enumerate(("accelerated", "compiled")):
        halves = [re.findall(r"(\d+) of (\d+)", cell) for cells in rows for cell in cells[1:3] if " of " in cell]
        done, of = (sum(int(each[min(i, len(each) - 1)][j]) for each in halves) for j in range(2))
        texts.append(f"{door} {done} of {of} ({done / of:.1%})")
    return f"Blocks with an operation's mathematics, replaced whole: {', '.join(texts)}."


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """Gives every parameter random values: the zeros and ones of a new model would hide mix-ups."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.normal_(std=0.1)
                if "Norm" in type(module).__name__ and name == "weight":
                    parameter.add_(1.0)
    return model


def error_of(ours: tuple, theirs: tuple) -> float:
    """The largest difference of two `results`, relative to the library's largest output or gradient.

    Infinite for NaN or other shapes; a gradient that is not there is zero.
    """
    errors = []
    for found, truth in zip(ours, (theirs[0], list(theirs[1].values()))):
        found = list(found.values()) if isinstance(found, dict) else found
        pairs = [(a, b) for a, b in zip(found, truth, strict=True) if a is not None or b is not None]
        pairs = [(torch.zeros_like(b) if a is None else a, torch.zeros_like(a) if b is None else b) for a, b in pairs]
        if any(a.shape != b.shape for a, b in pairs):
            return float("inf")
        pairs = [(a, b) for a, b in pairs if b.numel()]
        size = max(b.abs().max().item() for _, b in pairs)
        errors.append(max((a - b).abs().max().item() for a, b in pairs) / size)
    return max(errors) if all(e == e for e in errors) else float("inf")


if __name__ == "__main__":
    print(page([e for e in ENCODERS if e.library in (sys.argv[1:] or {e.library})]))
