"""Builds a small model of each family and runs it with and without `accelerate`: a row of numbers."""

import copy
import dataclasses
import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Iterable
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..adapters import accelerate, acceleration_report
from ..adapters.families import FAMILIES, Family
from ..errors import InputError
from ..ops._dispatch import counting
from .verify import exact_fp32

SAME = 1e-4  # the largest relative error that passes in fp32, where TF32 is switched off


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


def judge(family: Family, device: str = "cpu") -> Row:
    """The row of one family whose library is installed; an error becomes the row's `failure`."""
    named = dict(library=family.library, family=family.name)
    try:
        quiet = mock.patch.object(logging.getLogger("vitfast"), "disabled", True)  # the table says the same
        with torch.random.fork_rng(), quiet, exact_fp32(torch.backends.cuda.matmul):
            torch.manual_seed(0)
            family.make()  # imports the library
            start = time.process_time()
            model = family.make()
            seconds = time.process_time() - start
            original = randomised(model).to(device)
            batch = {name: value.to(device) for name, value in family.batch().items()}
            model = accelerate(copy.deepcopy(original))
            with counting() as called:
                ours = run(family, model, batch)
            theirs, report = run(family, original, batch), acceleration_report(model)
            errors = [error_of(a, b) for a, b in zip(ours, theirs)]
    except Exception as error:  # a library of another version: a row says so, and the others follow
        return Row(**named, failure=f"{type(error).__name__}: {error}".split("\n")[0])
    parts, left = (dict(Counter(of)) for of in ((e.part for e in report.replaced), (e.why for e in report.left)))
    return Row(
        **named, parts=parts, operations=dict(called), logits=errors[0], gradients=errors[1], left=left, seconds=seconds
    )


def chosen(library: str | None = None) -> list[Family]:
    """The installed families, of one library or of all. Raises InputError where there are none."""
    return installed(FAMILIES, library)


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
