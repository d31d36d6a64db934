"""The implementation for torch.nn.attention's registry, through PyTorch's dispatcher.

A CPU has no kernels of its own for the operations that CUDA has, so that stand-ins are PyTorch's part here.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from attention_cases import interpreted, path, providers
from checks import assert_close
from torch.library import Library
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitfast import ops
from vitfast.kernels.configs import tiles
from vitfast.kernels.launch import launches_made, record
from vitfast.ops import sdpa
from vitfast.tools.machine_code.model_launches import launching_on_meta

HEADS, TOKENS, SIZE = 3, 19, 16
FORWARD = {
    "flash": lambda q, k, v, **o: aten._scaled_dot_product_flash_attention(q, k, v, **o),
    "cudnn": lambda q, k, v, bias=None, **o: aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, **o),
    "efficient": lambda q, k, v, bias=None, **o: aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, **o),
}
each = pytest.mark.parametrize("name", sdpa.FUSED)
aten = torch.ops.aten


def tensors(layout: str, size: int = SIZE, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    """q, k and v (B, H, N, Dh): slices of one tensor, or each on its own."""
    if layout == "packed":
        qkv = torch.randn(2, TOKENS, 3, HEADS, size, dtype=dtype, device=device)
        return list(qkv.permute(2, 0, 3, 1, 4).unbind(0))
    return [torch.randn(2, HEADS, TOKENS, size, dtype=dtype, device=device) for _ in range(3)]


def outputs_and_gradients(call, qkv, **options) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = call(*leaves, **options)
    out = out if isinstance(out, torch.Tensor) else out[0]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.fixture
def theirs():
    """Calls of PyTorch's kernels, which the stand-ins only count."""
    calls, library = [], Library("aten", "IMPL")
    for name in sdpa.FUSED:
        for suffix in ("", "_backward"):
            operation = f"_scaled_dot_product_{name}_attention{suffix}"

            def stand_in(*args, operation=operation, **_):
                calls.append(operation)
                results = len(getattr(aten, operation).default._schema.returns)
                return tuple(1 if 4 <= i < 6 and results == 9 else torch.zeros_like(args[0]) for i in range(results))

            library.impl(operation, stand_in, "CPU")
    yield calls
    library._destroy()


@interpreted
@each
@pytest.mark.parametrize("layout", ["packed", "single"])
def test_calls_that_ours_covers_are_ours(theirs, name, layout):
    qkv, handle, before = tensors(layout), sdpa.activate("CPU"), launches_made()
    try:
        with ops.use_kernels("on"):
            found = outputs_and_gradients(FORWARD[name], qkv, scale=0.3)
    finally:
        handle.remove()
    assert not theirs and launches_made() - before >= 2
    with sdpa_kernel(SDPBackend.MATH):
        expected = outputs_and_gradients(F.scaled_dot_product_attention, [x.double() for x in qkv], scale=0.3)
    for what, ours, exact in zip(("out", "dq", "dk", "dv"), found, expected):
        assert_close(ours.double(), exact, atol=1e-5, rtol=1e-5, name=what)


@interpreted
@each
def test_other_calls_are_pytorchs(theirs, name):
    q, k, v = tensors("packed")
    few, bias = [x[..., :12] for x in (q, k, v)], dict(bias=torch.zeros(2, HEADS, TOKENS, TOKENS))
    cases = [((q, k, v), dict(is_causal=True)), ((q, k, v), dict(dropout_p=0.1)), (few, {})]
    cases += [((q, k[:, :, :5], v[:, :, :5]), {}), ((q.double(), k.double(), v.double()), {})]
    cases += [((q, k, v), bias)] if name != "flash" else []
    handle = sdpa.activate("CPU")
    try:
        outputs_and_gradients(FORWARD[name], (q, k, v), is_causal=True)
        assert len(theirs) == 2 and theirs[1] == f"{theirs[0]}_backward"
        theirs.clear()
        for inputs, options in cases:
            with ops.use_kernels("on"):
                FORWARD[name](*inputs, **options)
            assert len(theirs) == 1, (inputs[1].shape, options)
            theirs.clear()
        FORWARD[name](q, k, v)  # in mode "auto" a CPU has no kernels
        assert len(theirs) == 1
    finally:
        handle.remove()
    with ops.use_kernels("on"):
        FORWARD[name](q, k, v)
    assert len(theirs) == 2


@each
@pytest.mark.parametrize("layout", ["packed", "single"])
def test_results_have_the_layout_that_compiled_code_reckons_with(name, layout):
    def described():
        leaves = [x.requires_grad_() for x in tensors(layout, 64, torch.bfloat16, "meta")]
        given = FORWARD[name](*leaves)
        gradients = torch.autograd.grad(given[0], leaves, torch.empty_like(given[0]))
        return [(x.shape, x.stride(), x.dtype) for x in (*given, *gradients) if isinstance(x, torch.Tensor)]

    expected, found = described(), []
    sdpa._cudnn_lse_axes()
    handle = sdpa.activate("Meta")
    try:
        with tiles.using(sm=90), launching_on_meta():
            launches = record(lambda: found.extend(described()))
    finally:
        handle.remove()
    assert found == expected and len(launches) >= 2


def test_pytorch_knows_it_by_its_name():
    attention.activate_flash_attention_impl("vitfast")
    try:
        assert attention.current_flash_attention_impl() == "vitfast"
        q, k, v = tensors("packed")
        found = F.scaled_dot_product_attention(q, k, v)
    finally:
        attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["packed", "single"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"])
def test_on_a_gpu_either_backward_reads_what_either_forward_kept(backend, layout):
    dtype = torch.float32 if backend == "EFFICIENT_ATTENTION" else torch.bfloat16
    qkv = [x.requires_grad_() for x in tensors(layout, 64, dtype, "cuda")]
    with sdpa_kernel(SDPBackend.MATH):
        expected = outputs_and_gradients(F.scaled_dot_product_attention, [x.double() for x in qkv])
    upstream = torch.randn(expected[0].shape, generator=torch.Generator().manual_seed(5)).to(qkv[0])

    def launches(ours: bool, call) -> tuple:
        before = launches_made()
        if ours:
            attention.activate_flash_attention_impl("vitfast")
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)), path("tiled"):
                return call(), launches_made() - before
        finally:
            if ours:
                attention.restore_flash_attention_impl()

    for forward, backward in itertools.product((False, True), repeat=2):
        out, first = launches(forward, lambda: F.scaled_dot_product_attention(*qkv))
        found, second = launches(backward, lambda out=out: torch.autograd.grad(out, qkv, upstream))
        assert (first > 0, second > 0) == (forward, backward)
        for ours, exact in zip((out, *found), expected):
            assert (ours.double() - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.gpu
def test_on_a_gpu_compiled_code_and_libraries_run_under_it():
    qkv = tensors("single", 64, torch.bfloat16, "cuda")
    expected = outputs_and_gradients(F.scaled_dot_product_attention, qkv)
    attention.activate_flash_attention_impl("vitfast")
    try:
        with path("tiled"):
            compiled = outputs_and_gradients(torch.compile(F.scaled_dot_product_attention, fullgraph=True), qkv)
        with providers(attention_fwd="flash", attention_bwd="flash"):
            library = outputs_and_gradients(lambda *x: ops.attention(*x), [x.transpose(1, 2) for x in qkv])
    finally:
        attention.restore_flash_attention_impl()
    assert_close(library[0].transpose(1, 2), expected[0], atol=2e-2, rtol=2e-2)
    for ours, exact in zip(compiled, expected):
        assert_close(ours, exact, atol=2e-2, rtol=2e-2)
