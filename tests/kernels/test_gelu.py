"""GELU and its slope, interpreted, against float64 and erf's formula."""

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
RANGES = [(-12, -6), (-6, -4), (-4, -2), (-2, 2), (2, 4), (4, 12)]
EDGES = torch.tensor([0.0, 1e-45, 1e-38, 15.9, 16.0, 100.0, 65504.0, 3e38])
EDGES = torch.cat([EDGES, -EDGES])
GATES = {
    "gelu_tanh": lambda p: F.gelu(p, approximate="tanh"),
    "quick_gelu": lambda p: p * torch.sigmoid(1.702 * p),
    "silu": F.silu,
}


@triton.jit
def _kernel(p_ptr, value_ptr, again_ptr, slope_ptr, erf_ptr, erf_slope_ptr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + at)
    tl.store(value_ptr + at, activations.activate(p, ACT))
    again, slope = activations.activate_and_slope(p, ACT)
    tl.store(again_ptr + at, again)
    tl.store(slope_ptr + at, slope)
    gate = 0.5 + 0.5 * tl.erf(p * 0.7071067811865476)
    tl.store(erf_ptr + at, p * gate)
    tl.store(erf_slope_ptr + at, gate + p * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * p * p))


def computed(p: torch.Tensor, activation: str = "gelu") -> tuple[torch.Tensor, ...]:
    """(activation, its slope, gelu by erf, its slope by erf) of fp32 p."""
    programs = -(-p.numel() // BLOCK)
    padded = F.pad(p, (0, programs * BLOCK - p.numel())).to(DEVICE)
    results = [torch.empty_like(padded) for _ in range(5)]
    _kernel[(programs,)](padded, *results, ACT=activation, BLOCK=BLOCK)
    value, again, *rest = (r[: p.numel()].cpu() for r in results)
    assert torch.equal(value.nan_to_num(), again.nan_to_num())  # dgelu_matmul rewrites what linear_gelu wrote
    return value, *rest


def truth(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gelu, its slope) in float64, without cancellation in the tail."""
    p = p.double()
    phi = torch.special.log_ndtr(p).exp()
    return p * phi, phi + p * (-p * p / 2).exp() / (2 * torch.pi) ** 0.5


@pytest.fixture(scope="module")
def on_a_grid():
    """(value, by erf, exact) of gelu and of its slope."""
    p = torch.linspace(-12, 12, 2**17, dtype=torch.float64).float()
    value, slope, erf, erf_slope = computed(p)
    exact, exact_slope = truth(p)
    return p, ((value, erf, exact), (slope, erf_slope, exact_slope))


def test_no_range_has_a_larger_error_than_with_erf(on_a_grid):
    """The largest errors: 2.5e-7 of gelu, 1.2e-7 of its slope; erf's formula has 4.5e-7 and 1.4e-7."""
    p, both = on_a_grid
    for largest, (value, by_erf, exact) in zip((2.7e-7, 1.3e-7), both):
        for low, high in RANGES:
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


def test_gelu_at_the_ends_of_the_polynomial():
    """The limits at infinity, where x Phi(x) as PyTorch computes it is NaN on the left; NaN stays NaN."""
    for found, exact in zip(computed(EDGES), truth(EDGES)):
        torch.testing.assert_close(found.double(), exact.nan_to_num(), atol=1e-38, rtol=1e-6)
    value, slope, *_ = computed(torch.tensor([INF, -INF, NAN]))
    assert value.tolist()[:2] == [INF, 0] and slope.tolist()[:2] == [1, 0] and value[2].isnan() and slope[2].isnan()


@pytest.mark.parametrize("activation", GATES)
def test_gates_are_pytorchs(activation):
    """On the grid, and far from zero, where the gate is 0 or 1 and exp2 over- or underflows; NaN stays NaN."""
    p = torch.cat([torch.linspace(-12, 12, 4096), EDGES])
    value, slope, *_ = computed(p, activation)
    leaf = p.double().requires_grad_()
    exact = GATES[activation](leaf)
    exact.sum().backward()
    torch.testing.assert_close(value.double(), exact.detach(), atol=1e-6, rtol=1e-6)
    # tanh's slope has a cube in it, which PyTorch's own overflows too
    near = p.abs() <= (100 if activation == "gelu_tanh" else INF)
    torch.testing.assert_close(slope.double()[near], leaf.grad[near], atol=3e-6, rtol=0)
    value, slope, *_ = computed(torch.tensor([INF, NAN]), activation)
    assert value[0] == INF and value[1].isnan() and slope[1].isnan()


@pytest.mark.parametrize("activation", ["gelu", *GATES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pytorchs_own_are_the_same_functions(activation, dtype):
    """After cuBLAS's product: rounded once, where PyTorch's formula rounds after each step."""
    p = torch.linspace(-9, 9, 1000).to(dtype)
    found = activations.activated(p, activation)
    assert found.dtype == dtype
    exact = GATES.get(activation, F.gelu)(p.double())
    torch.testing.assert_close(found.double(), exact, atol=3e-6, rtol=torch.finfo(dtype).eps)


def test_the_coefficients_are_the_fits():
    """Within half of the fit's error in its own units, and one more unit for the rounding to fp32."""
    kernels = np.array(activations.UPPER_TAIL.value, dtype=np.float32).astype(np.float64)
    assert gelu_polynomial.largest_error(kernels) < 1.5 * gelu_polynomial.largest_error(gelu_polynomial.fit(50)) + 1
    tail = np.polynomial.Polynomial(kernels)
    assert (tail.deriv()(np.linspace(0, activations.LARGE.value, 10_000)) < 0).all()
    assert tail(activations.LARGE.value) < -150  # 2^-150 is zero in fp32
