"""Running operations and launchers on random inputs, and judging what they return against float64."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch.utils._pytree import tree_map_only

from ...kernels import tiles
from .draw import Draw, Input, Sizes
from .launcher import Launcher, outputs

# The relative error that rounding the result alone may cost: half a unit in the last place, just above a power of two.
EPS = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What several roundings one after the other may cost a whole model or a training step, where benchmarks compare them.
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# The limit for a single number, relative to its size plus its row's average size, is ELEMENT times that for a row.
ELEMENT = 10


def errors(actual: Tensor, truth: Tensor) -> tuple[float, float]:
    """(the largest error of a row of the first axis, the largest error of a number).

    A row's error is the norm of its difference, relative to the row's norm or to the average one if that is larger. A
    number's is relative to its size plus the average size in its row. The norm of the whole is not used, as it hardly
    changes when a tile is lost. Both are infinite where one has an infinity that the other lacks, or actual has NaN.
    """
    finite = truth.isfinite()
    same = actual.shape == truth.shape and torch.equal(actual[~finite].double(), truth[~finite].double())
    if not same or not actual[finite].isfinite().all():
        return math.inf, math.inf
    if not finite.all():
        actual, truth = (t.where(finite, torch.zeros_like(t)) for t in (actual, truth))
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
def exact_fp32(backend=torch.backends.cudnn.conv) -> Iterator[None]:
    """Keeps PyTorch's fp32 convolutions, by whose errors ours are judged, from their default of TF32.

    backend: torch.backends.cuda.matmul does so for products, ours too, which use TF32 if the user has asked for it.
    """
    before, backend.fp32_precision = backend.fp32_precision, "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before


def settle_lookups() -> None:
    """Makes torch look up its own functions, which it does once, before any of them is replaced.

    If Dynamo looked first while torch.empty was replaced, it would not know the true one later.
    """
    with torch.device("cpu"):
        torch.empty(0)
    trace_rules.get_torch_obj_rule_map()  # torch.distributed.init_process_group clears this cache


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills fresh memory with NaN, so that what a candidate leaves unwritten is wrong."""

    def filling(allocate: Callable) -> Callable:
        def filled(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return filled

    settle_lookups()
    patched = mock.patch.multiple(torch, empty=filling(torch.empty), empty_like=filling(torch.empty_like))
    with patched, tiles.using():  # without earlier plans, which allocate by themselves
        yield


class Wrong(Exception):
    """A candidate computes wrong results."""


class Judge:
    """A launcher's inputs and true results in float64; judges results by PyTorch's error in that dtype.

    draw: what makes the inputs from dtype, device and generator.
    """

    def __init__(self, launcher: Launcher, dtype: torch.dtype, device: torch.device, draw: Callable[..., Draw] = Draw):
        self.inputs = launcher.make(draw(dtype, device, torch.Generator(device).manual_seed(0)))
        doubles = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, self.inputs)
        with torch.no_grad(), exact_fp32():
            self.truth = outputs(launcher.formula(*doubles))
            plain = outputs(launcher.formula(*self.inputs))
        self.plain = [errors(result, truth) for result, truth in zip(plain, self.truth, strict=True)]
        self.limits = []
        for by_row, by_number in self.plain:
            by_row = max(2 * by_row, EPS[dtype])
            self.limits.append((by_row, max(2 * by_number, ELEMENT * by_row)))

    def judge(self, results: list[Tensor]) -> tuple[float, float]:
        """(the largest error of a row, PyTorch's own) for the result that comes nearest to its limit.

        Raises Wrong beyond a limit: the larger of twice PyTorch's own error and the cost of one rounding.
        """
        if len(results) != len(self.truth):
            raise Wrong(f"{len(results)} results in place of {len(self.truth)}")
        found = []
        for result, truth, limits, plain in zip(results, self.truth, self.limits, self.plain):
            of_result = errors(result, truth)
            for error, limit, of in zip(of_result, limits, ("a row", "a number")):
                if not error <= limit:
                    raise Wrong(f"error of {of} {error:.1e} against float64, limit {limit:.1e}")
            found.append((of_result[0] / limits[0], of_result[0], plain[0]))
        return max(found)[1:]


# The most tokens of packed samples: the reference pads each sample to `longest` tokens, and its float64 logits are the
# square of that, 30 GB for the tokens of 32 images.
PACKED_TOKENS = 1024


def scaled(operation: Callable, **fixed) -> Callable:
    """The operation as a function whose last two tensors are the layer scale and the drop path."""
    return lambda *t: operation(*t[:-2], layer_scale=t[-2], drop_path=t[-1], **fixed)


def packed_offsets(tokens: int, device: torch.device) -> Tensor:
    """The offsets of three samples: two thirds of the tokens, one token, and the rest."""
    return torch.tensor([0, tokens * 2 // 3, tokens * 2 // 3 + 1, tokens], dtype=torch.int32, device=device)


def cases(s: Sizes, ops: ModuleType) -> dict[str, tuple[Callable, list[Input]]]:
    """Operation -> (function of tensors, its inputs). ops: `vitfast.ops`, or its twin, ops.reference."""

    def gated_mlp_inner_norm(*t: Tensor) -> Tensor:
        return ops.gated_mlp(*t[:-2], inner_norm_weight=t[-2], inner_norm_bias=t[-1], activation="gelu")

    def attention_rope(qkv: Tensor, angles: Tensor) -> Tensor:
        return ops.attention(qkv, rope=(angles.cos(), angles.sin()), num_prefix=1)

    def attention_bias(qkv: Tensor, bias: Tensor) -> Tensor:
        lengths = 1 + torch.arange(s.batch, device=qkv.device) * 7 % s.tokens
        return ops.attention(qkv, bias=bias, key_lengths=lengths)

    def attention_packed(qkv: Tensor) -> Tensor:
        return ops.attention(*qkv.unbind(1), offsets=packed_offsets(len(qkv), qkv.device), longest=len(qkv))

    def block_packed(x: Tensor, *t: Tensor) -> Tensor:
        packed = dict(offsets=packed_offsets(len(x), x.device), longest=len(x))
        return scaled(ops.attention_block, num_heads=s.heads, **packed)(x, *t)

    def embed_packed(patches: Tensor, *t: Tensor) -> Tensor:
        return ops.patch_embed(patches, *t, mean=0.5, std=0.5, offsets=packed_offsets(len(patches), patches.device))

    d, f, pixels = s.width, s.hidden, (s.batch, 3, s.image, s.image)
    packed_tokens = min(s.rows, PACKED_TOKENS)
    values, weight = (lambda *shape: ("values", shape)), (lambda *shape: ("weight", shape))
    packed, angles = values(s.batch, s.tokens, 3, s.heads, s.head), (s.tokens - 1, s.head // 2)
    x, one, vector, drop = values(s.batch, s.tokens, d), values(1, s.tokens, d), values(d), ("factor", (s.batch,))
    norm, fc1, fc2 = [vector, vector], [weight(f, d), values(f)], [weight(d, f), vector]
    qkv, proj = [weight(3 * d, d), values(3 * d)], [weight(d, d), vector]
    stream = [("fp32", (s.batch, s.tokens, d)), ("fp32", (d,)), ("fp32", (d,))]  # as autocast leaves it: x and the norm
    embed = [weight(d, 3, s.patch, s.patch), vector, values(1, 1, d), values(1, 1 + (s.image // s.patch) ** 2, d)]
    patches, block = ("uint8", (s.rows, 3, s.patch, s.patch)), functools.partial(ops.attention_block, num_heads=s.heads)
    return {
        "layer_norm": (ops.layer_norm, [x, *norm]),
        "rms_norm": (ops.rms_norm, [x, vector]),
        "add_layer_norm": (scaled(ops.add_layer_norm), [x, x, *norm, vector, drop]),
        "attention": (ops.attention, [packed]),
        "attention, N = 300": (ops.attention, [values(2, 300, 3, s.heads, s.head)]),
        # These are attention too, but have names of their own: the smallest check on a GPU is of attention alone.
        "rope": (attention_rope, [packed, ("factor", angles)]),
        "rope, learned tables": (attention_rope, [packed, values(s.heads, *angles)]),
        "bias, key lengths": (attention_bias, [packed, values(s.heads, s.tokens, s.tokens)]),
        "packed": (attention_packed, [values(packed_tokens, 3, s.heads, s.head)]),
        "linear_gelu": (ops.linear_gelu, [x, *fc1]),
        "linear_gelu, tanh": (lambda a, w, b: ops.linear_gelu(a, w, b, activation="gelu_tanh"), [x, *fc1]),
        "norm_linear": (ops.norm_linear, [values(s.batch, d), *norm, weight(f, d), values(f)]),
        "linear_residual": (scaled(ops.linear_residual), [x, *proj, x, vector, drop]),
        "mlp": (ops.mlp, [x, *fc1, *fc2]),
        "mlp, quick_gelu": (functools.partial(ops.mlp, activation="quick_gelu"), [x, *fc1, *fc2]),
        "gated_mlp": (ops.gated_mlp, [x, *fc1, *fc1, *fc2]),
        "gated_mlp, inner norm": (gated_mlp_inner_norm, [x, *fc1, *fc1, *fc2, values(f), values(f)]),
        "patch_embed": (ops.patch_embed, [values(*pixels), *embed]),
        "patch_embed, uint8": (lambda i, *t: ops.patch_embed(i, *t, mean=0.5, std=0.5), [("uint8", pixels), *embed]),
        "patch_embed, fp32 images": (ops.patch_embed, [("fp32", pixels), *embed]),
        "patch_embed, packed": (embed_packed, [patches, *embed[:3], values(s.rows, d)]),
        "attention_block": (scaled(block), [x, *norm, *qkv, *proj, vector, drop]),
        "attention_block, fp32 stream": (scaled(block, residual_in_fp32=True), [*stream, *qkv, *proj, vector, drop]),
        "attention_block, packed": (
            block_packed,
            [values(packed_tokens, d), *norm, *qkv, *proj, vector, ("factor", (packed_tokens,))],
        ),
        "attention_block, one image": (block, [one, *norm, *qkv, *proj]),
        "mlp_block": (scaled(ops.mlp_block), [x, *norm, *fc1, *fc2, vector, drop]),
        "mlp_block, one image": (ops.mlp_block, [one, *norm, *fc1, *fc2]),
        "mlp_block, fp32 stream": (scaled(ops.mlp_block, residual_in_fp32=True), [*stream, *fc1, *fc2, vector, drop]),
        "gated_mlp_block": (scaled(ops.gated_mlp_block), [x, *norm, *fc1, *fc1, *fc2, vector, drop]),
    }


def run(function: Callable, tensors: list[Tensor], upstream: list[Tensor] | None = None) -> list[Tensor]:
    """The outputs and, with `upstream` gradients, the gradients of every tensor that requires one."""
    outputs = function(*tensors)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if upstream is None:
        return outputs
    leaves = [t for t in tensors if t.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs)])]


def worst(actual: list[Tensor], truth: list[Tensor]) -> float:
    """The largest relative error over pairs of tensors, by norm; infinite where a value is not finite."""
    errors = []
    for a, t in zip(actual, truth, strict=True):
        error = (a.double() - t.double()).norm() / t.double().norm().clamp_min(1e-30)
        errors.append(error.item() if a.isfinite().all() else float("inf"))
    return max(errors)
