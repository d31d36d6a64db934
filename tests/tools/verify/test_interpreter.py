"""bfloat16 in Triton's interpreter, mended: casts, arithmetic and products against PyTorch's, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from processes import Child, done
from tool_children import asks_for_bfloat16_twice, reads_the_environment

from vitfast.kernels import launch

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter alone")

BF16 = torch.bfloat16


@triton.jit
def _cast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs).to(y_ptr.dtype.element_ty))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, f_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    a, b, f = tl.load(a_ptr + offs), tl.load(b_ptr + offs), tl.load(f_ptr + offs)
    tl.store(out_ptr + 0 * N + offs, a + b)
    tl.store(out_ptr + 1 * N + offs, a * b)
    tl.store(out_ptr + 2 * N + offs, a / b)
    tl.store(out_ptr + 3 * N + offs, a * b + f)  # the product is rounded, then the sum is fp32 and rounded at the store
    tl.store(out_ptr + 4 * N + offs, tl.fma(a, b, a))
    tl.store(out_ptr + 5 * N + offs, tl.where(a < b, a, -b))
    tl.store(out_ptr + 6 * N + offs, tl.load(a_ptr + offs, mask=offs < N // 3, other=-7.5))
    tl.store(out_ptr + 7 * N + offs, tl.full((N,), 1 / 3, tl.bfloat16))
    tl.store(out_ptr + 8 * N + offs, offs.to(tl.bfloat16))
    tl.store(out_ptr + 9 * N + offs, tl.exp2(a.to(tl.float32)))
    largest = tl.max(tl.reshape(a, (N // 16, 16)), 1).to(tl.float32)
    tl.store(out_ptr + 10 * N + offs, largest[:, None].broadcast_to(N // 16, 16).reshape(N))


@triton.jit
def _product_kernel(a_ptr, b_ptr, c_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.dot(tl.load(a_ptr + at), tl.trans(tl.load(b_ptr + at)), tl.load(c_ptr + at))
    tl.store(out_ptr + at, acc)


def cast(x, dtype, block=8192):
    y = torch.empty(x.shape, dtype=dtype)
    _cast_kernel[(x.numel() // block,)](x, y, BLOCK=block)
    return y


def arithmetic(a, b, f):
    out = torch.empty(11, len(a), dtype=BF16)
    _arithmetic_kernel[(1,)](a, b, f, out, N=len(a))
    return out


def same(a, b):
    """The same bits, NaN being one number."""
    assert a.dtype == b.dtype
    view = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(view) == b.view(view)) | (a.isnan() & b.isnan())).all())


def test_casts_round_to_nearest_even():
    """Every pattern there and back; a million fp32 ones, NaN and denormals too; every tie and its neighbours."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)
    assert same(cast(patterns, torch.float32), patterns.float())
    assert same(cast(cast(patterns, torch.float32), BF16), patterns)
    assert same(cast(patterns, torch.float16), patterns.half())
    bits = torch.randint(-(2**31), 2**31, (2**20,), dtype=torch.int64).to(torch.int32)
    assert same(cast(bits.view(torch.float32), BF16), bits.view(torch.float32).to(BF16))
    ties = (torch.arange(2**16, dtype=torch.int64) << 16) + 0x8000
    for step in (-1, 0, 1):
        near = (ties + step).to(torch.int32).view(torch.float32)
        assert same(cast(near, BF16), near.to(BF16))
    assert same(cast(torch.full((8192,), 3.4e38), BF16), torch.full((8192,), float("inf"), dtype=BF16))


def test_arithmetic_is_fp32_rounded_once():
    N = 4096
    a, b, f = torch.randn(N).to(BF16), torch.randn(N).to(BF16), torch.randn(N)
    i = torch.arange(N)
    expected = {
        "a + b": a.float() + b.float(),
        "a * b": a.float() * b.float(),
        "a / b": a.float() / b.float(),
        "a * b + fp32": (a * b).float() + f,
        "fma": a.double() * b.double() + a.double(),
        "where": torch.where(a < b, a, -b),
        "other": torch.where(i < N // 3, a, torch.tensor(-7.5, dtype=BF16)),
        "a constant": torch.full((N,), 1 / 3),
        "integers": i,
        "exp2": torch.exp2(a.float()),
        "maximum of 16": a.view(-1, 16).amax(1, keepdim=True).expand(-1, 16).reshape(-1),
    }
    rows = zip(expected.items(), arithmetic(a, b, f), strict=True)
    assert not [name for (name, value), row in rows if not same(row, value.to(BF16))]


def test_fma_is_rounded_once():
    """289 lies half way between 288 and 290: what is added decides, however small."""
    exact = torch.tensor([17.0 * 17 + 2**-30, 17.0 * 17 - 2**-30], dtype=torch.float64)
    assert exact.float().tolist() == [289, 289]
    a, c = torch.tensor([17.0, 17, -17, -17] * 4).to(BF16), torch.tensor([2**-30, -(2**-30)] * 8).to(BF16)
    out = torch.empty(16, dtype=BF16)
    _fma_kernel[(1,)](a, torch.full_like(a, 17), c, out, N=16)
    assert out[:4].tolist() == [290, 288, -288, -290]


@triton.jit
def _fma_kernel(a_ptr, b_ptr, c_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out_ptr + offs, tl.fma(tl.load(a_ptr + offs), tl.load(b_ptr + offs), tl.load(c_ptr + offs)))


def test_products_are_summed_in_fp32():
    """Exact where all partial sums are: small integers. Random ones as near as fp32 gets."""
    integers, out = torch.randint(-8, 9, (2, 64, 64)).to(BF16), torch.empty(64, 64)
    for (a, b), atol in ((integers, 0), (torch.randn(2, 64, 64).to(BF16), 2e-5)):
        c = torch.randint(-8, 9, (64, 64)).float()
        _product_kernel[(1,)](a, b, c, out, N=64)
        torch.testing.assert_close(out.double(), a.double() @ b.double().t() + c.double(), atol=atol, rtol=0)


@pytest.mark.slow
def test_bfloat16_is_refused_until_it_is_mended():
    (said,) = done([Child(asks_for_bfloat16_twice, TRITON_INTERPRET="1")])
    lines = said.splitlines()
    assert (
        "attention: kernels are switched on, but Triton's interpreter computes bfloat16 wrongly (vitfast.tools."
        in lines[0]
    )
    assert lines[1] == "[1.0]"


def test_the_environment_variable_means_what_it_means_to_triton():
    (said,) = done([Child(reads_the_environment)])
    assert said.split() == ["True"] * 10, said
