"""Libraries in place of our kernels: providers for a test, random inputs, float64 as the judge."""

import contextlib

import pytest
import torch

from vitfast import ref
from vitfast.kernels import launch, tiles
from vitfast.kernels.attention import (
    attention_bwd,
    attention_fwd,
)

interpreted = pytest.mark.skipif(
    not launch.INTERPRETED, reason="our kernels run interpreted here; the gpu tests run the real ones"
)


# Added to twice PyTorch's own error, relative to the largest value where that is above 1: some ulp of sums in another
# order (fp32), one rounding of values up to 4 (fp16) or 2 (bf16), which PyTorch may do luckily on few elements.
ATOL = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}


DTYPES = [pytest.param(d, id=str(d)[6:]) for d in ATOL]


HALVES = [pytest.param(d, id=str(d)[6:]) for d in (torch.float16, torch.bfloat16)]


SCALE = 0.19  # not the one that a library would take by itself


OURS = {
    "attention_fwd": tiles.tile(4, 1, "tiled", BLOCK_M=64, BLOCK_N=64),
    "attention_bwd": tiles.tile(4, 1, "tiled"),
    "attention_bwd_dq": tiles.tile(4, 1, BLOCK_M=64, BLOCK_N=64),
    "attention_bwd_dkdv": tiles.tile(4, 1, BLOCK_M=64, BLOCK_N=64),
    "column_sums": tiles.tile(8, 1, BLOCK_P=256, BLOCK_D=1024),  # the interpreter pays per program
}


@contextlib.contextmanager
def providers(**chosen):
    """Ours for what is not named: providers(attention_fwd="flash")."""
    with contextlib.ExitStack() as stack:
        for op, tile in OURS.items():
            stack.enter_context(tiles.override(op, tile))
        for op, provider in chosen.items():
            stack.enter_context(tiles.override(op, OURS[op] if provider == "ours" else tiles.tile(provider=provider)))
        yield


def random(B, N, H, D, dtype, device="cpu"):
    return torch.randn(B, N, 3, H, D, device=device).to(dtype), torch.randn(B, N, H, D, device=device).to(dtype)


def by_autograd(qkv, do):
    """o, dqkv and the bias gradient in qkv's dtype, by plain PyTorch."""
    qkv = qkv.detach().requires_grad_()
    o = ref.attention(*qkv.unbind(2), scale=SCALE)
    (dqkv,) = torch.autograd.grad(o, qkv, do)
    return {"o": o.detach(), "dqkv": dqkv, "bias gradient": dqkv.sum((0, 1)).flatten()}


def by_launchers(qkv, do):
    """The same, and lse."""
    o, lse = attention_fwd(*qkv.unbind(2), SCALE)
    dqkv, total = attention_bwd(*qkv.unbind(2), o, lse, do, SCALE, want_bias_grad=True)
    for t in (o, lse, dqkv):
        assert t.is_contiguous()
        assert all(t.untyped_storage().data_ptr() != given.untyped_storage().data_ptr() for given in (qkv, do))
    assert lse.dtype == total.dtype == torch.float32 and o.dtype == dqkv.dtype == qkv.dtype
    return {"o": o, "dqkv": dqkv, "bias gradient": total, "lse": lse}


def compare(actual, theirs, truth, dtype):
    """Every result's error against float64 is at most twice PyTorch's, and an atol."""
    assert truth and actual.keys() >= truth.keys()
    for name, exact in truth.items():
        assert actual[name].shape == exact.shape, name
        if exact.numel() == 0:
            continue
        error, judge = ((t[name].double() - exact).abs().max().item() for t in (actual, theirs))
        scale = max(1.0, exact.abs().max().item())
        # On a CPU PyTorch's LayerNorm sums columns in 16 bit: what that costs excuses nothing.
        if dtype != torch.float32:
            judge = min(judge, torch.finfo(dtype).eps * scale)
        allowed = 2 * judge + ATOL[dtype] * scale
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"  # a NaN fails too


def check_attention(qkv, do, run=by_launchers):
    actual, theirs, truth = run(qkv, do), by_autograd(qkv, do), by_autograd(qkv.double(), do.double())
    compare(actual, theirs, truth, qkv.dtype)
    q, k, _ = qkv.double().unbind(2)
    exact = (torch.einsum("bnhd,bmhd->bhnm", q, k) * SCALE).logsumexp(-1)
    torch.testing.assert_close(actual["lse"].double(), exact, atol=1e-4, rtol=1e-5)


@contextlib.contextmanager
def on_gpu(**chosen):
    """The shipped tiles for what is not named."""
    with contextlib.ExitStack() as stack:
        for op, provider in chosen.items():
            if provider != "ours":
                stack.enter_context(tiles.override(op, tiles.tile(provider=provider)))
        yield
