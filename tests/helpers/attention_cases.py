"""Attention by its launchers, on either path, beside plain PyTorch; float64 as the judge."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitfast.kernels import launch, tiles
from vitfast.kernels.attention import launchers
from vitfast.kernels.attention.launchers import attention_bwd, attention_fwd
from vitfast.kernels.attention.options import PLAIN
from vitfast.ops import reference as ref

interpreted = pytest.mark.skipif(
    not launch.INTERPRETED, reason="our kernels run interpreted here; the gpu tests run the real ones"
)
MODES = ["off", pytest.param("on", marks=interpreted)]  # of use_kernels
# Added to twice PyTorch's own error, relative to the largest value where that is above 1: some ulp of sums in another
# order (fp32), one rounding of values up to 4 (fp16) or 2 (bf16), which PyTorch may do luckily on few elements.
ATOL = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES = [pytest.param(d, id=str(d)[6:]) for d in ATOL]
HALVES = DTYPES[1:]
SCALE = 0.19  # not one over the root of a head size

WHOLE = {
    "attention_fwd": tiles.config(4, 1, "single_pass", BLOCK_M=64),
    "attention_bwd": tiles.config(4, 1, "resident", BLOCK_N=32, STAGES=1),
}
TILED = {
    "attention_fwd": tiles.config(4, 1, "tiled", BLOCK_M=64, BLOCK_N=64),
    "attention_bwd": tiles.config(4, 1, "tiled"),
    "attention_bwd_dq": tiles.config(4, 1, BLOCK_M=64, BLOCK_N=32),
    "attention_bwd_dkdv": tiles.config(4, 1, BLOCK_M=32, BLOCK_N=64),
    "column_sums": tiles.config(8, 1, BLOCK_P=256, BLOCK_D=1024),  # the interpreter pays per program
}
BOXES = WHOLE | {"attention_fwd": tiles.config(4, 1, "single_pass_tma", BLOCK_M=64)}
PATHS = {"whole": WHOLE, "boxes": BOXES, "tiled": TILED}


@contextlib.contextmanager
def path(name):
    with contextlib.ExitStack() as stack:
        for op, config in PATHS[name].items():
            stack.enter_context(tiles.using(op, config))
        if name == "boxes":
            stack.enter_context(mock.patch.object(launchers, "MANY_HEADS", 1))
        yield


def random(B, N, H, D, dtype=torch.float32, device="cpu"):
    """qkv and the gradient of o."""
    return torch.randn(B, N, 3, H, D, device=device).to(dtype), torch.randn(B, N, H, D, device=device).to(dtype)


def by_autograd(qkv, do, scale=SCALE, **options):
    """o, dqkv and the bias gradient in qkv's dtype, by plain PyTorch; the gradients of tables and of a bias too."""
    leaves = {
        key: t.detach().requires_grad_() for key, t in options.items() if torch.is_tensor(t) and t.is_floating_point()
    }
    qkv, given = qkv.detach().requires_grad_(), options | leaves
    if "cos" in given:
        given["rope"] = given.pop("cos"), given.pop("sin")
    # On an H200, cuDNN's gave NaN for some strides, and flash attention a misaligned address.
    with sdpa_kernel([SDPBackend.MATH, *([] if qkv.is_cuda else [SDPBackend.FLASH_ATTENTION])]):
        o = ref.attention(*qkv.unbind(2), scale=scale, **given)
    dqkv, *more = torch.autograd.grad(o, (qkv, *leaves.values()), do)
    return {"o": o.detach(), "dqkv": dqkv, "bias gradient": dqkv.sum((0, 1)).flatten()} | dict(zip(leaves, more))


def by_launchers(qkv, do, scale=SCALE, options=PLAIN):
    """The same, and lse."""
    o, lse = attention_fwd(*qkv.unbind(2), scale, options)
    dqkv, total = attention_bwd(*qkv.unbind(2), o, lse, do, scale, True, options)
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
        allowed = 2 * judge + ATOL[dtype] * max(1.0, exact.abs().max().item())
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"  # a NaN fails too


def check_attention(qkv, do, scale=SCALE, peer=by_autograd):
    truth = by_autograd(qkv.double(), do.double(), scale)
    actual = by_launchers(qkv, do, scale)
    compare(actual, peer(qkv, do, scale), truth, qkv.dtype)
    q, k, _ = qkv.double().unbind(2)
    exact = (torch.einsum("bnhd,bmhd->bhnm", q, k) * scale).logsumexp(-1)
    torch.testing.assert_close(actual["lse"].double(), exact, atol=1e-4, rtol=1e-5)


def any_strides(kind, B=2, N=21, H=2, D=32):
    """qkv and do that lie in memory as callers may have them."""
    wide = torch.randn(B, N + 3, 3, H + 1, D + 8, **kind)[:, 2:-1, :, 1:, 8:]
    plain, qkv = torch.randn(B, N, H, D, **kind), torch.randn(B, N, 3, H, D, **kind)
    yield wide, torch.randn(B, H, N, D, **kind).transpose(1, 2)
    yield torch.randn(N, B, 3, H, D, **kind).transpose(0, 1), plain
    yield torch.randn(B, N, H, 3, D, **kind).transpose(2, 3), plain
    yield qkv.flip(2), plain
    yield torch.randn(B, N, 3, H, D + 3, **kind)[..., 3:], plain  # rows that start anywhere: no 16-byte loads
    yield qkv, torch.randn(B, 1, 1, D, **kind).expand(B, N, H, D)
    yield qkv, torch.randn(B, N, H, D + 3, **kind)[..., :D]
