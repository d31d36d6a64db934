"""Every operation against eager PyTorch, torch.compile and the libraries that have it.

Each is a row of OPS.

Inputs are those of vitfast.tools.verify.cases where that has them, without layer scale and drop path. "attention": qkv
packed, as a linear layer leaves it, transposes and the stacking of the gradients included on all sides; "attention
separate": q, k and v apart, where nobody has gradients to stack; rotary positions and a bias as timm and Hugging Face
do it, q and k turned in PyTorch, the bias as SDPA's mask. Each peer of the attention block runs on the fastest backend
of SDPA. From uint8 the patch embedding's peers normalise first.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import clock
import peers
import pytest
import torch
import torch.nn.functional as F
from harness import DTYPE, Case, bench, draw, implementation
from peers import BACKENDS, FLASH, FLASH_ATTENTION, best_backend, forced, library_function, sdpa, sdpa_separate
from shapes import FOCUS, MAIN, SHAPES, Shape, grid, patch_embed_work

from vitfast import ops
from vitfast.ops import reference as ref
from vitfast.tools.cost import work
from vitfast.tools.verify import Input, cases

EAGER = ("vitfast", "eager", "compile", "max-autotune")
SDPA = ("vitfast", *(f"sdpa {name}" for name in BACKENDS), *FLASH_ATTENTION)
PREFIX = 1  # tokens that rotary positions do not turn


@dataclass(frozen=True)
class Op:
    """A row: what is called, on what, against whom.

    call: (ops or its twin `reference`, Shape) -> the function. inputs: of vitfast.tools.verify.cases, by name, or a
    function of Shape. work: of (Shape, bytes of a number). batched: how many inputs have the batch as their first axis.
    peers: an implementation's function, or None where it is ours or the formula, eager or compiled.
    """

    call: Callable[[ModuleType, Shape], Callable]
    inputs: str | Callable[[Shape], list[Input]]
    work: Callable[[Shape, int], work.Work]
    impls: tuple[str, ...] = EAGER
    batched: int = 1
    compile_at: tuple[Shape, ...] = (FOCUS,)
    peers: Callable[[str], Callable | None] = lambda impl: None
    forward_only: tuple[str, ...] = ()


def named(name: str, **fixed) -> Callable[[ModuleType, Shape], Callable]:
    return lambda place, s: functools.partial(getattr(place, name), **fixed)


def rotary(place: ModuleType, s: Shape) -> Callable:
    return lambda qkv, cos, sin: place.attention(*qkv.unbind(2), rope=(cos, sin), num_prefix=PREFIX)


def biased(place: ModuleType, s: Shape) -> Callable:
    return lambda qkv, bias: place.attention(*qkv.unbind(2), bias=bias)


def qkv(s: Shape) -> Input:
    return "values", (s.batch, s.tokens, 3, s.heads, s.head)


def attention_peer(impl: str, packed: bool) -> Callable | None:
    if impl in FLASH_ATTENTION:
        function = library_function(*FLASH[impl], "flash_attn_func")
        return (lambda qkv: function(*qkv.unbind(2))) if packed else function
    return forced(sdpa if packed else sdpa_separate, impl.removeprefix("sdpa ")) if impl != "vitfast" else None


def gelu_epilogue(impl: str) -> Callable | None:
    """The product with GELU in cuBLASLt's epilogue: tanh only, and no derivative."""
    if impl != "_addmm_activation":
        return None
    if not clock.GPU:
        pytest.skip("a CPU's _addmm_activation computes another GELU")
    product = torch._addmm_activation
    return lambda x, w, b: product(b, x.flatten(0, 1), w.t(), use_gelu=True).unflatten(0, x.shape[:2])


def unfold(images, weight, bias, cls_token, pos_embed, *, mean=None, std=None):
    """The patch embedding as one product over patches in memory, often faster than a convolution."""
    images = ref.normalize(images, mean, std, weight.dtype) if images.dtype == torch.uint8 else images
    b, c, h, w = images.shape
    p, q = weight.shape[2:]
    patches = images.view(b, c, h // p, p, w // q, q).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * q)
    tokens = F.linear(patches, weight.flatten(1), bias)
    return torch.cat([cls_token.expand(b, -1, -1), tokens], 1) + pos_embed


def pixels(kind: str, **fixed) -> Op:
    """The patch embedding of uint8 or floating images."""

    def peer(impl: str) -> Callable | None:
        of_unfold = impl.removesuffix(" unfold")
        return implementation(of_unfold, unfold, functools.partial(unfold, **fixed)) if of_unfold != impl else None

    count = lambda s, size: patch_embed_work(s, size, 1 if kind == "uint8" else size)  # noqa: E731
    impls = (*EAGER[:3], "compile unfold", "max-autotune")
    inputs = "patch_embed, uint8" if kind == "uint8" else "patch_embed"
    return Op(named("patch_embed", **fixed), inputs, count, impls, peers=peer)


def rows_work(name: str, *sizes: str) -> Callable[[Shape, int], work.Work]:
    """A count of vitfast.tools.cost.work that takes the rows, these sizes and the bytes of a number."""
    return lambda s, size: getattr(work, name)(s.rows, *(getattr(s, of) for of in sizes), size)


def row(name: str, *sizes: str, **more) -> Op:
    """An operation whose inputs and count, of the rows and these sizes, have its name."""
    return Op(named(name), name, rows_work(name, *sizes), **more)


MLP = ("width", "hidden")
ATTENTION = rows_work("attention", "tokens", "width")
OPS = {
    "attention": Op(
        lambda place, s: sdpa if place is ref else ops.attention,
        lambda s: [qkv(s)],
        ATTENTION,
        SDPA,
        peers=functools.partial(attention_peer, packed=True),
    ),
    "attention separate": Op(
        named("attention"),
        lambda s: [("values", (s.batch, s.tokens, s.heads, s.head))] * 3,
        ATTENTION,
        SDPA,
        batched=3,
        peers=functools.partial(attention_peer, packed=False),
    ),
    "attention rotary": Op(  # with tables that pairs of columns share
        rotary, lambda s: [qkv(s), *[("factor", (s.tokens - PREFIX, s.head // 2))] * 2], ATTENTION, compile_at=MAIN
    ),
    "attention bias": Op(  # which the batch shares and a layer learns
        biased,
        lambda s: [qkv(s), ("values", (s.heads, s.tokens, s.tokens))],
        rows_work("biased_attention", "tokens", "width", "heads"),
        compile_at=MAIN,
    ),
    "layer_norm": row("layer_norm", "width"),
    "rms_norm": row("rms_norm", "width"),
    "add_layer_norm": row("add_layer_norm", "width", batched=2, compile_at=MAIN),
    "patch_embed uint8": pixels("uint8", mean=0.5, std=0.5),
    "patch_embed float": pixels("float"),
    "attention_block": Op(
        lambda place, s: functools.partial(place.attention_block, num_heads=s.heads),
        "attention_block",
        rows_work("attention_block", "tokens", "width"),
        compile_at=MAIN,
    ),
    "mlp_block": row("mlp_block", *MLP, compile_at=MAIN),
    "gated_mlp_block": row("gated_mlp_block", *MLP, compile_at=MAIN),
    "linear_gelu": row("linear_gelu", *MLP),
    "mlp": row("mlp", *MLP),
    "gated_mlp": row("gated_mlp", *MLP),
    "linear_gelu gelu_tanh": Op(
        named("linear_gelu", activation="gelu_tanh"),
        "linear_gelu, tanh",
        rows_work("linear_gelu", *MLP),
        ("vitfast", "eager", "compile", "_addmm_activation"),
        peers=gelu_epilogue,
        forward_only=("_addmm_activation",),
    ),
}


def case_of(name: str, s: Shape) -> Case:
    """A row at a shape."""
    op = OPS[name]
    listed = cases(s.sizes, ref)[op.inputs][1] if isinstance(op.inputs, str) else op.inputs(s)
    if ("factor", (s.batch,)) in listed:
        listed = listed[:-2]  # without layer scale and drop path
    return Case(name, s.name, op.call(ref, s), lambda: draw(listed), op.batched, op.work(s, DTYPE.itemsize))


def function_of(name: str, s: Shape, impl: str) -> Callable:
    op = OPS[name]
    return op.peers(impl) or implementation(impl, op.call(ops, s), op.call(ref, s))


def _test(name: str):
    op = OPS[name]

    @pytest.mark.parametrize("shape, direction, impl", grid(op.impls, op.compile_at, op.forward_only))
    def test(benchmark, shape, direction, impl):
        s, facts = SHAPES[shape], {}
        function = function_of(name, s, impl)
        if name == "attention_block" and impl != "vitfast":
            facts["attention"] = best_backend(s.batch, s.tokens, s.heads, s.head, direction != "forward")
            function = peers.forced(function, facts["attention"])
        bench(benchmark, case_of(name, s), impl, function, direction, **facts)

    return test


for _name in OPS:
    globals()[f"test_{_name.replace(' ', '_')}"] = _test(_name)
