"""Every operation, a row of OPS, against eager PyTorch, torch.compile and the libraries that have it.

Functions and inputs are those of vitfast.tools.verify.cases where that has them, without layer scale and drop path.
"attention" takes qkv in one tensor, as a linear layer leaves it; transposes and the stacking of gradients count on all
sides. Peers do rotary positions and a bias as timm and Hugging Face do: they rotate q and k in PyTorch, and the bias is
SDPA's mask. Each peer of the attention block runs on the fastest backend of SDPA. For uint8 images the patch
embedding's peers normalise first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from harness import DTYPE, Case, Operation, bench, compiled
from peers import BACKENDS, FLASH, best_backend, forced, library_function, sdpa
from shapes import Shape, grid, patch_embed_work, shape_of

from vitfast import ops
from vitfast.ops import reference as ref
from vitfast.tools.cost import work
from vitfast.tools.verify import cases
from vitfast.tools.verify.draw import Input

EAGER = ("vitfast", "eager", "compile", "max-autotune")
SDPA = ("vitfast", *(f"sdpa {name}" for name in BACKENDS), *FLASH)
PREFIX = 1  # tokens that rotary positions do not rotate


@dataclass(frozen=True)
class Op:
    """A row: the function, its inputs, its work and its peers.

    case: (ops or its twin `reference`, Shape) -> the function and its inputs. work: (Shape, bytes of an element) ->
    Work. batched: how many inputs have the batch as their first axis. peers: implementation -> a function of its own,
    or None where it is ours or the formula; "compile" and "max-autotune" compile it.
    """

    case: Callable[[ModuleType, Shape], tuple[Callable, list[Input]]]
    work: Callable[[Shape, int], work.Work]
    impls: tuple[str, ...] = EAGER
    batched: int = 1
    peers: Callable[[str], Callable | None] = lambda impl: None


def verified(name: str) -> Callable[[ModuleType, Shape], tuple[Callable, list[Input]]]:
    """A case of vitfast.tools.verify, without layer scale and drop path."""

    def case(place: ModuleType, s: Shape) -> tuple[Callable, list[Input]]:
        function, inputs = cases(s.sizes, place)[name]
        if ("factor", (s.batch,)) not in inputs:
            return function, inputs
        return lambda *tensors: function(*tensors, None, None), inputs[:-2]

    return case


def rows_work(name: str, *sizes: str) -> Callable[[Shape, int], work.Work]:
    """A count of vitfast.tools.cost.work that takes the rows, these sizes and the bytes of an element."""
    return lambda s, size: getattr(work, name)(s.rows, *(getattr(s, of) for of in sizes), size)


def row(name: str, *sizes: str, **more) -> Op:
    """An Op of the case and the count that are called `name`; the count takes the rows and these sizes."""
    return Op(verified(name), rows_work(name, *sizes), **more)


def qkv(s: Shape) -> Input:
    return "values", (s.batch, s.tokens, 3, s.heads, s.head)


def packed(place: ModuleType, s: Shape) -> tuple[Callable, list[Input]]:
    return (lambda qkv: sdpa(*qkv.unbind(2))) if place is ref else ops.attention, [qkv(s)]


def rotary(place: ModuleType, s: Shape) -> tuple[Callable, list[Input]]:
    """Attention with rotary tables in which each pair of columns shares an entry."""
    function = lambda qkv, cos, sin: place.attention(*qkv.unbind(2), rope=(cos, sin), num_prefix=PREFIX)  # noqa: E731
    return function, [qkv(s), *[("factor", (s.tokens - PREFIX, s.head // 2))] * 2]


def biased(place: ModuleType, s: Shape) -> tuple[Callable, list[Input]]:
    """Attention with a bias that the batch shares and a layer learns."""
    function = lambda qkv, bias: place.attention(*qkv.unbind(2), bias=bias)  # noqa: E731
    return function, [qkv(s), ("values", (s.heads, s.tokens, s.tokens))]


def attention_peer(impl: str) -> Callable | None:
    """A peer's attention as a function of qkv; None for ours."""
    if impl == "vitfast":
        return None
    flash = impl in FLASH
    function = library_function(*FLASH[impl], "flash_attn_func") if flash else forced(sdpa, impl.removeprefix("sdpa "))
    return lambda qkv: function(*qkv.unbind(2))


def unfold(images, weight, bias, cls_token, pos_embed):
    """The patch embedding as one product over patches in memory, often faster than a convolution."""
    images = ref.normalize(images, 0.5, 0.5, weight.dtype) if images.dtype == torch.uint8 else images
    b, c, h, w = images.shape
    p, q = weight.shape[2:]
    patches = images.view(b, c, h // p, p, w // q, q).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * q)
    tokens = F.linear(patches, weight.flatten(1), bias)
    return torch.cat([cls_token.expand(b, -1, -1), tokens], 1) + pos_embed


def pixels(case: str, pixel_size: int | None = None) -> Op:
    """The patch embedding of uint8 (of one byte) or floating images."""
    count = lambda s, size: patch_embed_work(s, size, pixel_size or size)  # noqa: E731
    impls = (*EAGER[:3], "compile unfold", "max-autotune")
    return Op(verified(case), count, impls, peers=lambda impl: unfold if impl.endswith(" unfold") else None)


MLP = ("width", "hidden")
ATTENTION = rows_work("attention", "tokens", "width")
OPS = {
    "attention": Op(packed, ATTENTION, SDPA, peers=attention_peer),
    "attention rotary": Op(rotary, ATTENTION),
    "attention bias": Op(biased, rows_work("biased_attention", "tokens", "width", "heads")),
    "layer_norm": row("layer_norm", "width"),
    "rms_norm": row("rms_norm", "width"),
    "add_layer_norm": row("add_layer_norm", "width", batched=2),
    "patch_embed uint8": pixels("patch_embed, uint8", pixel_size=1),
    "patch_embed float": pixels("patch_embed"),
    "attention_block": row("attention_block", "tokens", "width"),
    "mlp_block": row("mlp_block", *MLP),
    "gated_mlp_block": row("gated_mlp_block", *MLP),
    "linear_gelu": row("linear_gelu", *MLP),
    "mlp": row("mlp", *MLP),
    "gated_mlp": row("gated_mlp", *MLP),
}


def case_of(name: str, s: Shape) -> Case:
    """The Case of a row of OPS at a shape."""
    formula, inputs = OPS[name].case(ref, s)
    return Case(name, s.name, formula, inputs, OPS[name].batched, OPS[name].work(s, DTYPE.itemsize))


def function_of(name: str, s: Shape, impl: str) -> Callable:
    """The function of an implementation: ours, a peer's or the formula, which may be compiled."""
    function = OPS[name].peers(impl) or OPS[name].case(ops if impl == "vitfast" else ref, s)[0]
    how = impl.split()[0]
    return compiled(function, how, fullgraph=True) if how in ("compile", "max-autotune") else function


def timed(name: str, direction: str, shape: str, impl: str) -> Operation:
    """An implementation as it is timed; skips what is not installed."""
    if impl not in OPS[name].impls:
        raise ValueError(f"{name} has no implementation {impl!r}, only {', '.join(OPS[name].impls)}")
    s, facts = shape_of(shape), {}
    function = function_of(name, s, impl)
    if name == "attention_block" and impl != "vitfast":
        facts["attention"] = best_backend(s, direction != "forward")
        function = forced(function, facts["attention"])
    return Operation(case_of(name, s), impl, function, direction, **facts)


def _test(name: str):
    @pytest.mark.parametrize("shape, direction, impl", grid(OPS[name].impls))
    def test(benchmark, shape, direction, impl):
        bench(benchmark, timed(name, direction, shape, impl))

    return test


for _name in OPS:
    globals()[f"test_{_name.replace(' ', '_')}"] = _test(_name)
