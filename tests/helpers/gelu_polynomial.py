"""The fit of the coefficients of kernels/matmul/activations.py's `upper_tail`; run as a script it prints them.

log2 of Q(z) = 1 - Phi(z) is nearly a parabola, where Q itself falls by twelve orders of magnitude. Weighted minimax fit
(Lawson, 1961: least squares, reweighted by the errors) on [0, 7]. An error is weighed by what it costs: an absolute one
of Q and of z Q in GELU's slope and in GELU, a relative one in their negative tails. Past 7 the polynomial goes on
falling, so that Q becomes zero.

Degree 8 is the least whose error, 3e-8, is lost among the roundings of fp32; 10 would have 1e-8, and two more
instructions an element.
"""

import math

import numpy as np
import torch

DEGREE, LAST = 8, 7.0
ABSOLUTE = 2.5e-8  # of max(z, 1) Q(z)
RELATIVE = ([0.0, 5.0, 7.0], [1.5e-3, 1.5e-3, 0.15])  # at these z, its logarithm linear between


def tail(z: np.ndarray) -> np.ndarray:
    """log2 Q(z) in float64."""
    return torch.special.log_ndtr(-torch.as_tensor(z)).numpy() / math.log(2)


def allowed(z: np.ndarray) -> np.ndarray:
    """The error of log2 Q(z) that counts as 1."""
    relative = np.exp(np.interp(z, RELATIVE[0], np.log(RELATIVE[1])))
    return np.minimum(relative, ABSOLUTE / (np.maximum(z, 1) * np.exp2(tail(z)))) / math.log(2)


def nodes() -> np.ndarray:
    return LAST * (1 - np.cos(np.linspace(0, math.pi, 2000))) / 2


def largest_error(coefficients) -> float:
    """Of a polynomial, lowest power first, in units of `allowed`."""
    z = nodes()
    return float((np.abs(np.polynomial.Polynomial(coefficients)(z) - tail(z)) / allowed(z)).max())


def fit(rounds: int = 300) -> np.ndarray:
    """The coefficients, lowest power first."""
    z = nodes()
    basis, target = (
        np.polynomial.chebyshev.chebvander(2 * z / LAST - 1, DEGREE) / allowed(z)[:, None],
        tail(z) / allowed(z),
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
    found = fit()
    print(*(f"{c:.9g}" for c in found), sep=", ")
    rounded = found.astype(np.float32).astype(np.float64)
    print(f"largest error {largest_error(found):.3f}, in fp32 {largest_error(rounded):.3f}")
