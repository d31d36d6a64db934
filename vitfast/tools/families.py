"""Runs a small model of each family with and without vitfast, and compares them: a row of numbers."""

import copy
import dataclasses
import importlib.util
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import backend
from ..adapters import accelerate, acceleration_report
from ..adapters.families import Family
from ..errors import InputError
from ..ops._dispatch import counting
from .encoders import Encoder
from .verify import exact_fp32

SAME = 1e-4  # the largest relative error that passes in fp32, where TF32 is switched off
HALVES = {"attention": ("attention block",), "mlp": ("MLP block", "gated MLP block")}


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one family.

    parts: how many parts of the small model run on vitfast, by kind. operations: their calls in one forward. logits,
    gradients: the largest errors against the untouched library, relative to its largest number. left: how many parts
    stay the library's, by reason. failure: why there are no results. seconds: CPU time to build the model.
    """

    library: str
    family: str
    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    operations: dict[str, int] = dataclasses.field(default_factory=dict)
    logits: float = 0.0
    gradients: float = 0.0
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether something ran on vitfast, and gave the library's numbers."""
        return not self.failure and bool(self.operations) and max(self.logits, self.gradients) <= SAME


@dataclasses.dataclass(frozen=True)
class Coverage:
    """The results of one encoder, compiled with the backend.

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


def judge(family: Family, device: str = "cpu") -> Row:
    """The row of one family whose library is installed; an error becomes the row's `failure`."""

    def results() -> dict:
        family.make()  # imports the library
        start = time.process_time()
        original = family.make()
        seconds = time.process_time() - start
        accelerated = lambda model: accelerate(copy.deepcopy(model))  # noqa: E731
        model, called, errors = _compared(family, original, device, accelerated)
        report = acceleration_report(model)
        parts, left = Counter(e.part for e in report.replaced), Counter(e.why for e in report.left)
        numbers = dict(zip(("logits", "gradients"), errors), seconds=seconds)
        return dict(parts=dict(parts), operations=dict(called), left=dict(left), **numbers)

    return _row(Row, family, results)


def cover(encoder: Encoder, device: str = "cpu") -> Coverage:
    """The same of one encoder, which the backend compiles."""
    family, entries = encoder.family, []

    def compile_graph(graph, inputs):
        compiled = backend.compile_graph(graph, inputs, options={"inner": "eager"})
        report = backend.report()

        def call(*arguments):
            entries.extend(report)  # whenever it runs: for many layers, where graph breaks cut a model
            return compiled(*arguments)

        return call

    def results() -> dict:
        torch._dynamo.reset()
        compiled = lambda model: torch.compile(model, backend=compile_graph)  # noqa: E731
        *_, errors = _compared(family, family.make(), device, compiled)
        done = Counter(e.kind for e in entries if e.why is None)
        halves = {name: (sum(done.pop(k, 0) for k in kinds), getattr(encoder, name)) for name, kinds in HALVES.items()}
        left = Counter(f"{e.kind}: {re.sub(r' [(]the nearest.*', '', e.why)}" for e in entries if e.why is not None)
        why = {encoder.why: 1} if encoder.why else {}  # which a person wrote
        return dict(**halves, besides=dict(done), left=why | left, error=max(errors))

    return _row(Coverage, family, results)


def _row(kind: type, family: Family, results: Callable[[], dict]):
    """A row of this kind with these results, or with the error in their place."""
    named = dict(library=family.library, family=family.name)
    quiet = mock.patch.object(logging.getLogger("vitfast"), "disabled", True)  # the table says the same
    try:
        with torch.random.fork_rng(), quiet, exact_fp32(torch.backends.cuda.matmul):
            torch.manual_seed(0)
            return kind(**named, **results())
    except Exception as error:  # a library of another version: a row says so, and the others follow
        return kind(**named, failure=f"{type(error).__name__}: {error}".split("\n")[0])


def _compared(
    family: Family, model: nn.Module, device: str, replace: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, dict[str, int], list[float]]:
    """(the model that replaces one, its calls of operations, the errors of outputs and gradients)."""
    original = randomised(model).to(device)
    batch = {name: value.to(device) for name, value in family.batch().items()}
    theirs, replaced = run(family, original, batch), replace(original)
    with counting() as called:
        ours = run(family, replaced, batch)
    return replaced, called, [error_of(a, b) for a, b in zip(ours, theirs)]


def installed(found: Iterable, library: str | None) -> list:
    """Those whose library is installed, of one library or of all. Raises InputError if there are none."""
    known = sorted({each.library for each in found})
    if library is not None and library not in known:
        raise InputError(f"families: library must be one of {', '.join(known)}, got {library!r}")
    found = [f for f in found if library in (None, f.library) and importlib.util.find_spec(f.library) is not None]
    if not found:
        raise InputError(f"families: {library or 'none of ' + ', '.join(known)} is not installed")
    return found


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
