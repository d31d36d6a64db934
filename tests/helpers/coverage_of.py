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
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from vision_encoders import ENCODERS, Encoder
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
    gradients, relative to the library's largest number. failure: why there are no results.
    """

    attention: tuple[int, int] = (0, 0)
    mlp: tuple[int, int] = (0, 0)
    besides: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether it ran, and gave the library's numbers."""
        return not self.failure and self.error <= SAME


def accelerated(encoder: Encoder) -> Coverage:
    """An encoder of which a copy is accelerated in place."""

    def replace(model: nn.Module) -> tuple[nn.Module, Callable[[], list]]:
        model = accelerate(copy.deepcopy(model))
        return model, lambda: [(entry.part, entry.why) for entry in acceleration_report(model)]

    return _covered(encoder, replace)


def compiled(encoder: Encoder) -> Coverage:
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


def _covered(encoder: Encoder, replace: Callable) -> Coverage:
    quiet = mock.patch.object(logging.getLogger("vitfast"), "disabled", True)
    try:
        torch._dynamo.reset()
        with torch.random.fork_rng(), quiet, exact_fp32(torch.backends.cuda.matmul):
            torch.manual_seed(0)
            original, batch = randomised(encoder.family.make()), encoder.family.batch()
            theirs, (model, entries) = run(encoder.family, original, batch), replace(original)
            error = max(error_of(a, b) for a, b in zip(run(encoder.family, model, batch), theirs))
    except Exception as error:  # a library of another version: a row says so, and the others follow
        return Coverage(failure=f"{type(error).__name__}: {error}".split("\n")[0])
    done = Counter(SAME_KIND.get(kind, kind) for kind, why in entries() if why is None)
    halves = {name: (sum(done.pop(k, 0) for k in kinds), getattr(encoder, name)) for name, kinds in HALVES.items()}
    left = Counter(
        f"{kind}: {re.sub(r' [(]the nearest.*', '', why)}" for kind, why in entries() if why is not None and kind
    )
    why = {encoder.why: 1} if encoder.why else {}  # which a person wrote
    return Coverage(**halves, besides=dict(sorted(done.items())), left=why | left, error=error)


def row(encoder: Encoder) -> list[str]:
    """The cells of an encoder; raises AssertionError if it has other numbers than the library's."""
    doors = accelerated(encoder), compiled(encoder)
    assert all(door.right for door in doors), (encoder.family.name, doors)
    counts = lambda found: ", ".join(f"{n} x {name}" if n > 1 else name for name, n in found.items())  # noqa: E731
    halves = lambda half: f"{half[0]} of {half[1]}" if half[1] else ""  # noqa: E731
    texts = ([halves(d.attention), halves(d.mlp), counts(d.besides), "below 0.00001", counts(d.left)] for d in doors)
    same = (a if a == b else f"{a or 'nothing'}; compiled: {b or 'nothing'}" for a, b in zip(*texts))
    return [encoder.family.name, *same]


def page(encoders: Iterable[Encoder] = ENCODERS) -> str:
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


def run(family: Family, model: nn.Module, batch: dict) -> tuple[list[Tensor], list[Tensor]]:
    """(a training model's floating outputs, the parameters' gradients for random upstream gradients)."""
    torch.manual_seed(1)
    leaves = [t for t in tree_leaves(model.train()(**batch)) if isinstance(t, Tensor) and t.is_floating_point()]
    if family.valid:  # in tokens (B, N, D), padding is left out
        leaves = [t[batch[family.valid].bool()] if t.dim() == 3 else t for t in leaves]
    leaves = [t for t in leaves if t.requires_grad]
    upstream = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)).to(t) for t in leaves]
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(leaves, wanted, upstream, allow_unused=True)
    return [t.detach() for t in leaves], [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, gradients)]


def error_of(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference relative to the library's largest number; infinite for NaN or other shapes."""
    pairs = list(zip(ours, theirs, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    size = max(b.abs().max().item() for _, b in pairs if b.numel())
    error = max((a - b).abs().max().item() for a, b in pairs if b.numel()) / size
    return error if error == error else float("inf")


if __name__ == "__main__":
    print(page([e for e in ENCODERS if e.library in (sys.argv[1:] or {e.library})]))
