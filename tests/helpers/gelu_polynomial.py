"""The fits of the coefficients of kernels/matmul/activations.py's `upper_tail`; run as a script it prints them.

log2 of Q(z) = 1 - Phi(z) is nearly a parabola, where Q itself falls by twelve orders of magnitude. Weighted minimax fit
(Lawson, 1961: least squares, reweighted by the errors) on [0, 7]. An error is weighed by what it costs. Past 7 the
polynomial goes on falling, so that Q becomes zero.

For fp32 that is an absolute error of Q and of z Q in GELU's slope and in GELU, and a relative one in their negative
tails. Degree 8 is the least whose error, 3e-8, is lost among the roundings; 10 would have 1e-8, and two more
instructions an element.
For bf16 and fp16 it is the relative error of GELU and of its slope, both of which are rounded to few digits; less in
the tail, where PyTorch's 1 + erf loses digits or fp16 ends. Degree 5 is the least that keeps within 1.1 times PyTorch's
largest errors (tests/kernels/test_gelu.py); 4 has six times the error.
"""

import math

import numpy as np
import torch

LAST = 7.0
DEGREE = {torch.float32: 8, torch.bfloat16: 5, torch.float16: 5}
ABSOLUTE = 2.5e-8  # of max(z, 1) Q(z), for fp32
RELATIVE = {  # at these z, its logarithm linear between
    torch.float32: ([0.0, 5.0, 7.0], [1.5e-3, 1.5e-3, 0.15]),
    torch.bfloat16: ([0.0, 3.5, 7.0], [3e-4, 3e-4, 3e-2]),
    torch.float16: ([0.0, 3.0, 7.0], [7e-5, 7e-5, 0.7]),
}


def tail(z: np.ndarray) -> np.ndarray:
    """log2 Q(z) in float64."""
    return torch.special.log_ndtr(-torch.as_tensor(z)).numpy() / math.log(2)


def allowed(z: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The error of log2 Q(z) that counts as 1."""
    q = np.exp2(tail(z))
    relative = np.exp(np.interp(z, RELATIVE[dtype][0], np.log(RELATIVE[dtype][1])))
    if dtype == torch.float32:
        return np.minimum(relative, ABSOLUTE / (np.maximum(z, 1) * q)) / math.log(2)
    # The same error is one of the slope's tail Q - z density, which is zero at 0.75: there Q must be all but exact.
    slope = q - z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return relative * np.clip(np.abs(slope) / q / 2, 1e-3, 1) / math.log(2)


def nodes() -> np.ndarray:
    return LAST * (1 - np.cos(np.linspace(0, math.pi, 2000))) / 2


def largest_error(coefficients, dtype: torch.dtype) -> float:
    """Of a polynomial, lowest power first, in units of `allowed`."""
    z = nodes()
    return float((np.abs(np.polynomial.Polynomial(coefficients)(z) - tail(z)) / allowed(z, dtype)).max())


def fit(dtype: torch.dtype, rounds: int = 300) -> np.ndarray:
    """The coefficients, lowest power first."""
    z = nodes()
    basis, target = (
        np.polynomial.chebyshev.chebvander(2 * z / LAST - 1, DEGREE[dtype]) / allowed(z, dtype)[:, None],
        tail(z) / allowed(z, dtype),
    )
    weight, best, least = np.full(len(z), 1 / len(z)), None, math.inf
    for _ in range(rounds):
        root = np.sqrt(weight)
        solution = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs(basis @ solution - target)
        if error.max() < least:
            best, least = solution, error.max()
        weight *= error / error.max()
        weight /= weight.sum()
    return np.polynomial.Chebyshev(best, [0, LAST]).convert(kind=np.polynomial.Polynomial).coef


if __name__ == "__main__":
    for dtype in DEGREE:
        found = fit(dtype)
        print(dtype, *(f"{c:.9g}" for c in found), sep=", ")
        rounded = found.astype(np.float32).astype(np.float64)
        print(f"largest error {largest_error(found, dtype):.3f}, in fp32 {largest_error(rounded, dtype):.3f}")
