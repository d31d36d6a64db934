"""The activations and their slopes, interpreted, against float64, erf's formula and PyTorch's own results."""

import gelu_polynomial
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from vitfast.kernels.matmul import activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, INF, NAN = 4096, float("inf"), float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EDGES = torch.tensor([0.0, 1e-45, 1e-38, 15.9, 16.0, 100.0, 65504.0, 3e38])
EDGES = torch.cat([EDGES, -EDGES])
BOUNDS = [-6, -5, -4, -3, -2, -1, -0.25, 0, 0.25, 1, 2, 4, 8, 4e38]
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda p: F.gelu(p, approximate="tanh"),
    "quick_gelu": lambda p: p * torch.sigmoid(1.702 * p),
    "silu": F.silu,
}
GATES = list(ACTIVATIONS)[1:]


@triton.jit
def _kernel(p_ptr, dact_ptr, outputs, ACT: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + at)
    wide, wide_slope = activations.wide_activate_and_slope(p, ACT, PLAIN)
    again, slope = activations.activate_and_slope(p, ACT, PLAIN)
    kept_act, kept = activations.activate_and_kept_slope(p, ACT, PLAIN)
    dpre = activations.times_slope(tl.load(dact_ptr + at), kept, PLAIN)
    tl.store(outputs[0] + at, activations.activate(p, ACT, PLAIN))
    tl.store(outputs[1] + at, slope)
    tl.store(outputs[2] + at, kept)
    tl.store(outputs[3] + at, dpre)
    tl.store(outputs[4] + at, again)
    tl.store(outputs[5] + at, kept_act)
    tl.store(outputs[6] + at, activations.wide_activate(p, ACT, PLAIN))
    tl.store(outputs[7] + at, wide)
    tl.store(outputs[8] + at, wide_slope)
    tl.store(outputs[9] + at, activations.activate_and_slope(p, ACT, PLAIN, ALONE=True)[1])


@triton.jit
def _by_erf(p_ptr, value_ptr, slope_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + at)
    gate = 0.5 + 0.5 * tl.erf(p * 0.7071067811865476)
    tl.store(value_ptr + at, p * gate)
    tl.store(slope_ptr + at, gate + p * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * p * p))


def computed(
    p: torch.Tensor, activation: str = "gelu", dact: torch.Tensor | None = None, plain: bool = DEVICE == "cpu"
) -> tuple[torch.Tensor, ...]:
    """(activation, slope in fp32, kept slope, kept slope times dact), of p in its dtype.

    Checks that all functions give the same bits: backward writes again what forward wrote.
    """
    padding = (0, -p.numel() % BLOCK)
    padded, dact = F.pad(p, padding), F.pad(torch.ones(p.shape) if dact is None else dact, padding)
    kinds = (p.dtype, torch.float32, *[p.dtype] * 4, *[torch.float32] * 4)
    results = [torch.full(padded.shape, NAN, dtype=dtype, device=DEVICE) for dtype in kinds]
    grid = (padded.numel() // BLOCK,)
    _kernel[grid](padded.to(DEVICE), dact.to(DEVICE), tuple(results), ACT=activation, PLAIN=plain, BLOCK=BLOCK)
    results = [r[: p.numel()].cpu() for r in results]
    value, slope, kept, dpre, again, kept_value, wide, wide_again, wide_slope, alone = results
    same = ((value, again), (value, kept_value), (value, wide.to(p.dtype)), (wide, wide_again), (slope, wide_slope))
    same += ((slope, alone), (kept, slope.to(p.dtype)), (dpre, dact[: p.numel()].to(p.dtype) * kept))
    for one, other in same:
        assert torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))
    return value, slope, kept, dpre


def truth(p: torch.Tensor, activation: str = "gelu") -> tuple[torch.Tensor, torch.Tensor]:
    """(activation, its slope) in float64, gelu's without cancellation in the tail."""
    p = p.double()
    if activation == "gelu":
        phi = torch.special.log_ndtr(p).exp()
        return p * phi, phi + p * (-p * p / 2).exp() / (2 * torch.pi) ** 0.5
    leaf = p.clone().requires_grad_()
    value = ACTIVATIONS[activation](leaf)
    value.sum().backward()
    return value.detach(), leaf.grad


def pytorchs(p: torch.Tensor, activation: str, dact: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(activation, its slope or the gradient from dact) by PyTorch in p's dtype, each rounded once."""
    leaf = (p.float() if activation == "quick_gelu" else p.clone()).requires_grad_()  # it has no kernel of its own
    value = ACTIVATIONS[activation](leaf)
    value.backward(torch.ones_like(value) if dact is None else dact.to(p.dtype).to(value.dtype))
    return value.detach().to(p.dtype), leaf.grad.to(p.dtype)


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every number of 16 bits, finite or not, in ascending order."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).sort().values


@pytest.fixture(scope="module")
def on_a_grid():
    """p, (value, by erf, exact) of gelu and of its slope."""
    p = torch.linspace(-12, 12, 2**17, dtype=torch.float64).float()
    value, slope, *_ = computed(p)
    erf, erf_slope = (torch.empty_like(p, device=DEVICE) for _ in range(2))
    _by_erf[(len(p) // BLOCK,)](p.to(DEVICE), erf, erf_slope, BLOCK=BLOCK)
    erf, erf_slope = erf.cpu(), erf_slope.cpu()
    exact, exact_slope = truth(p)
    return p, ((value, erf, exact), (slope, erf_slope, exact_slope))


def test_no_range_has_a_larger_error_than_with_erf(on_a_grid):
    """The largest errors: 2.5e-7 of gelu, 1.2e-7 of its slope; erf's formula has 4.5e-7 and 1.4e-7."""
    p, both = on_a_grid
    for largest, (value, by_erf, exact) in zip((2.7e-7, 1.3e-7), both):
        for low, high in [(-12, -6), (-6, -4), (-4, -2), (-2, 2), (2, 4), (4, 12)]:
            here = (p >= low) & (p <= high)
            error, before = ((v.double() - exact)[here].abs().max().item() for v in (value, by_erf))
            assert error <= min(before, largest), f"on [{low}, {high}]: {error:.2e}, by erf {before:.2e}"
        for dtype in (torch.bfloat16, torch.float16):  # rounds like the exact value as often
            wrong, before = ((v.to(dtype) != exact.to(dtype)).double().mean() for v in (value, by_erf))
            assert wrong <= before


@pytest.mark.parametrize("least, largest", [(1e-3, 4e-5), (1e-6, 2e-3), (1e-9, 5e-2)])
def test_the_negative_tail_has_digits(on_a_grid, least, largest):
    """Relative to what is at least `least`; erf's formula has 8e-5, 8e-2 and 1: it cancels there."""
    _, ((value, by_erf, exact), _) = on_a_grid
    relative, before = (((v.double() - exact) / exact.abs().clamp(min=least)).abs().max() for v in (value, by_erf))
    assert relative < largest and relative < before


@pytest.mark.quick(3)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_16_bits_are_as_exact_as_pytorchs(dtype, activation):
    """Over all finite numbers, in each range the largest relative error is at most 1.1 times PyTorch's.

    atol: what fp32 rounds off before, 2e-7, shows where a slope is zero. Below -6, where PyTorch's gelu is zero, 1e-8
    of gelu's and what PyTorch's own error is.
    """
    p = all_numbers(dtype)
    p = p[p.isfinite()]
    value, slope, kept, _ = computed(p, activation)
    own, own_slope = pytorchs(p, activation)
    exact, exact_slope = truth(p, activation)
    # Past 1.8e19, p^2 in gelu_tanh's slope is infinite, in PyTorch's too.
    finite = own_slope.isfinite()
    assert not value.isnan().any() and not kept[finite].isnan().any()
    for got, its, true, atol in (
        (value, own, exact, 0),
        (slope, own_slope, exact_slope, 2e-7),
        (kept, own_slope, exact_slope, 2e-7),
    ):
        error, before = (got.double() - true).abs() - atol, (its.double() - true).abs()
        below = (p < -6) & finite
        assert error[below].max() <= 1.1 * before[below].max() + 1e-8
        for low, high in zip(BOUNDS, BOUNDS[1:]):
            here = (p >= low) & (p <= high) & (p.abs() > 1e-30) & finite
            worst, most = ((e[here] / true[here].abs()).max().item() for e in (error, before))
            assert worst <= 1.1 * most + 1e-12, f"on [{low}, {high}]: {worst:.2e}, PyTorch's {most:.2e}"


@pytest.mark.quick(5)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("mean, deviation", [(0.0, 1.0), (-1.0, 1.5)])
def test_gradients_from_the_kept_slope(mean, deviation, dtype, activation):
    """Rounding the slope too makes the error 1.31 times PyTorch's, which rounds dact and the product."""
    p = (mean + deviation * torch.randn(2**16)).to(dtype)
    dact = torch.randn(2**16)
    exact = dact.double() * truth(p, activation)[1]
    dpre, own = computed(p, activation, dact)[3], pytorchs(p, activation, dact)[1]
    assert (dpre.double() - exact).norm() <= 1.5 * (own.double() - exact).norm()


def test_gelu_at_the_ends_of_the_polynomial():
    """The limits at infinity, where x Phi(x) as PyTorch computes it is NaN on the left."""
    for found, exact in zip(computed(EDGES), truth(EDGES)):
        torch.testing.assert_close(found.double(), exact.nan_to_num(), atol=1e-38, rtol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_and_zeros(dtype, activation):
    """Infinity stays, NaN stays NaN, both zeros stay zero."""
    value, slope, kept, _ = computed(torch.tensor([INF, -INF, NAN, 0.0, -0.0], dtype=dtype), activation)
    assert value[0] == INF and value[2].isnan() and slope[2].isnan() and kept[2].isnan()
    assert value.tolist()[3:] == [0, 0] and (slope[3:] - 0.5).abs().max() < 1e-4
    if activation == "gelu":
        assert value[1] == 0 and slope.tolist()[:2] == kept.tolist()[:2] == [1, 0]


@pytest.mark.parametrize("activation", GATES)
def test_gates_are_pytorchs(activation):
    """On the grid, and far from zero, where the gate is 0 or 1 and exp2 over- or underflows."""
    p = torch.cat([torch.linspace(-12, 12, 4096), EDGES])
    value, slope, *_ = computed(p, activation)
    exact, exact_slope = truth(p, activation)
    torch.testing.assert_close(value.double(), exact, atol=1e-6, rtol=1e-6)
    # tanh's slope has a cube in it, which PyTorch's own overflows too
    near = p.abs() <= (100 if activation == "gelu_tanh" else INF)
    torch.testing.assert_close(slope.double()[near], exact_slope[near], atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_coefficients_are_the_fits(dtype):
    """In units of the fit's error: what rounding to fp32 adds is half a unit for fp32, and a tenth for fp16."""
    constants = {torch.bfloat16: activations.UPPER_TAIL_BF16, torch.float16: activations.UPPER_TAIL_FP16}
    kernels = np.array(constants.get(dtype, activations.UPPER_TAIL).value, dtype=np.float32).astype(np.float64)
    fit = gelu_polynomial.largest_error(gelu_polynomial.fit(dtype), dtype)
    assert gelu_polynomial.largest_error(kernels, dtype) < fit + (0.5 if dtype == torch.float32 else 0.1)
    polynomial = np.polynomial.Polynomial(kernels)
    assert (polynomial.deriv()(np.linspace(0, activations.LARGE.value, 10_000)) < 0).all()
    assert polynomial(activations.LARGE.value) < -150  # 2^-150 is zero in fp32


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_pairs_of_bf16_give_the_same_bits(activation):
    """The instructions for two bf16 numbers at a time against those for one, over all numbers."""
    p = all_numbers(torch.bfloat16)
    dact = torch.randn(p.shape)
    for pairs, one in zip(computed(p, activation, dact, plain=False), computed(p, activation, dact, plain=True)):
        assert torch.equal(pairs.nan_to_num(nan=7.0), one.nan_to_num(nan=7.0))
