"""Running operations and launchers on random inputs, and judging what they return against float64."""

import contextlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from .launchers import Draw, Launcher, Sizes, outputs

# What rounding the result alone may cost: half a unit in the last place, of numbers just above a power of two.
EPS = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What several roundings one after the other may cost a whole model or a training step, where benchmarks compare them.
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ELEMENT = 10  # times what a row may be off by its norm, a single number may be off by the sum of its size and the row's average


def errors(actual: Tensor, truth: Tensor) -> tuple[float, float]:
    """The largest errors of any row (of the first axis) and of any number, infinite where not finite.

    Of a row by norm, relative to its own or to the average one; of a number relative to its size plus the average size in its row. Not of the
    whole, whose norm hardly changes at full size when a tile is lost.
    """
    if actual.shape != truth.shape or not actual.isfinite().all():
        return math.inf, math.inf
    rows = 1 if truth.dim() == 1 else truth.shape[0]
    a, t = actual.reshape(rows, -1), truth.reshape(rows, -1)
    norms = t.norm(dim=1, dtype=torch.float64)
    norms = norms.clamp_min(norms.square().mean().sqrt().clamp_min(1e-30))
    by_row = by_number = 0.0
    for x, y, norm in zip(a.split(4096), t.split(4096), norms.split(4096)):
        off = (x.double() - y.double()).abs()
        by_row = max(by_row, (off.norm(dim=1) / norm).max().item())
        by_number = max(by_number, (off / (y.double().abs() + norm[:, None] / t.shape[1] ** 0.5)).max().item())
    return by_row, by_number


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """PyTorch's own fp32 results are fp32 inside: by default its convolutions may take TF32, and so would any error judged by theirs."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN inside: what a candidate does not write is found out, and not taken for what another has left there."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(math.nan) if x.is_floating_point() and x.device.type != "meta" else x

    torch.empty, torch.empty_like = (lambda *a, **k: fill(empty(*a, **k))), (lambda *a, **k: fill(empty_like(*a, **k)))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


# What a random input is: its kind ("values", "weight" scaled by its fan-in, "factor" in fp32 without a gradient, "uint8") and its shape.
Input = tuple[str, tuple[int, ...]]


class Wrong(Exception):
    """A candidate does not compute what it should. error: its largest, of a row."""

    def __init__(self, text: str, error: float = math.inf):
        super().__init__(text)
        self.error = error


class Judge:
    """The inputs of a launcher and their truth in float64, made once; judges results by PyTorch's own in the same dtype."""

    def __init__(
        self, launcher: Launcher, dtype: torch.dtype, device: torch.device, layout: str = "contiguous", seed: int = 0
    ):
        generator = torch.Generator(device).manual_seed(seed)
        self.inputs = launcher.make(Draw(dtype, device, generator, layout))
        doubles = [t.double() if t.is_floating_point() else t for t in self.inputs]
        with torch.no_grad(), exact_fp32():
            self.truth = outputs(launcher.formula(*doubles))
            plain = outputs(launcher.formula(*self.inputs))
        self.plain = [errors(result, truth) for result, truth in zip(plain, self.truth, strict=True)]
        self.limits = []
        for by_row, by_number in self.plain:
            by_row = max(2 * by_row, EPS[dtype])
            self.limits.append((by_row, max(2 * by_number, ELEMENT * by_row)))

    def judge(self, results: list[Tensor]) -> tuple[float, float]:
        """The error of a row and PyTorch's own, of the result that comes nearest to its limit. Raises Wrong beyond: twice
        PyTorch's own, or what one rounding costs where PyTorch has none."""
        if len(results) != len(self.truth):
            raise Wrong(f"{len(results)} results in place of {len(self.truth)}")
        found = []
        for result, truth, limits, plain in zip(results, self.truth, self.limits, self.plain):
            of_result = errors(result, truth)
            for error, limit, of in zip(of_result, limits, ("a row", "a number")):
                if not error <= limit:
                    raise Wrong(f"error of {of} {error:.1e} against float64, limit {limit:.1e}", of_result[0])
            found.append((of_result[0] / limits[0], of_result[0], plain[0]))
        return max(found)[1:]


def cases(s: Sizes, ops: ModuleType) -> dict[str, tuple[Callable, list[Input]]]:
    """Operation -> (function of tensors, its inputs). ops: `vitfast.ops`, or `vitfast.ref`, which has the same functions."""

    def values(*shape: int) -> Input:
        return "values", shape

    def weight(*shape: int) -> Input:
        return "weight", shape

    x, vector, drop, head, grid = (
        values(s.batch, s.tokens, s.width),
        values(s.width),
        ("factor", (s.batch,)),
        s.width // s.heads,
        (s.image // s.patch) ** 2,
    )
    fc1, fc2, square = (
        [weight(s.hidden, s.width), values(s.hidden)],
        [weight(s.width, s.hidden), vector],
        [weight(s.width, s.width), vector],
    )
    pixels = s.batch, 3, s.image, s.image
    embed = [weight(s.width, 3, s.patch, s.patch), vector, values(1, 1, s.width), values(1, 1 + grid, s.width)]
    attention_half = [x, vector, vector, weight(3 * s.width, s.width), values(3 * s.width), *square, vector, drop]
    return {
        "layer_norm": (ops.layer_norm, [x, vector, vector]),
        "add_layer_norm": (
            lambda a, r, w, b, ls, dp: ops.add_layer_norm(a, r, w, b, layer_scale=ls, drop_path=dp),
            [x, x, vector, vector, vector, drop],
        ),
        "attention": (ops.attention, [values(s.batch, s.tokens, 3, s.heads, head)]),
        "attention, N = 300": (ops.attention, [values(2, 300, 3, s.heads, head)]),
        "linear_gelu": (ops.linear_gelu, [x, *fc1]),
        "linear_gelu, tanh": (lambda a, w, b: ops.linear_gelu(a, w, b, approximate="tanh"), [x, *fc1]),
        "linear_residual": (
            lambda a, w, b, r, ls, dp: ops.linear_residual(a, w, b, r, layer_scale=ls, drop_path=dp),
            [x, *square, x, vector, drop],
        ),
        "mlp": (ops.mlp, [x, *fc1, *fc2]),
        "patch_embed": (ops.patch_embed, [values(*pixels), *embed]),
        "patch_embed, uint8": (lambda i, *t: ops.patch_embed(i, *t, mean=0.5, std=0.5), [("uint8", pixels), *embed]),
        "attention_block": (
            lambda *t: ops.attention_block(*t[:7], num_heads=s.heads, layer_scale=t[7], drop_path=t[8]),
            attention_half,
        ),
        "mlp_block": (
            lambda *t: ops.mlp_block(*t[:7], layer_scale=t[7], drop_path=t[8]),
            [x, vector, vector, *fc1, *fc2, vector, drop],
        ),
    }


def make(inputs: list[Input], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """Random leaves; weights are scaled so that products keep the size of what goes in."""
    tensors = []
    for kind, shape in inputs:
        if kind == "uint8":
            tensors.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device))
        elif kind == "factor":
            tensors.append(torch.rand(shape, generator=generator).to(device) + 0.5)
        else:
            scale = math.prod(shape[1:]) ** -0.5 if kind == "weight" else 1.0
            tensors.append((torch.randn(shape, generator=generator) * scale).to(device, dtype).requires_grad_())
    return tensors


def run(function: Callable, tensors: list[Tensor], upstream: list[Tensor] | None = None) -> list[Tensor]:
    """The outputs, and with `upstream` the gradients of every leaf that has one."""
    outputs = function(*tensors)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if upstream is None:
        return outputs
    gradients = torch.autograd.grad(
        outputs, [t for t in tensors if t.requires_grad], [u.to(o.dtype) for u, o in zip(upstream, outputs)]
    )
    return [*outputs, *gradients]


def worst(actual: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative error over pairs of tensors, by norm; infinite where a value is not finite."""
    errors = []
    for a, t in zip(actual, truth, strict=True):
        error = (a.double() - t.double()).norm() / t.double().norm().clamp_min(1e-30)
        errors.append(error.item() if a.isfinite().all() else float("inf"))
    return max(errors)
