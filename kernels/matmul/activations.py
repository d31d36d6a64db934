"""The activations of the MLPs and their slopes, in kernels and by PyTorch.

"gelu" is p Phi(p) = max(p, 0) - |p| Q(|p|), where Phi is the normal distribution function and Q = 1 - Phi its upper
tail, computed as two to the power of a polynomial of |p|. This takes two fifths fewer instructions in fc1's kernel than
erf does (sm_90, Triton 3.9), and keeps digits in the negative tail, where 1 + erf cancels (tests/kernels/test_gelu.py):
the relative error of fp32 gelu is 2e-4 at -4, 1.6e-3 at -5, 1e-2 at -6, 0.15 at -7 (with erf 6e-3 at -4, 0.2 at -5, 1
from -6 on). Below -9, where |gelu| is 1e-18 and less, no digit is left.
The others are p times a gate, the logistic function of 2 sqrt(2/pi) (p + 0.044715 p^3) for "gelu_tanh", of 1.702 p for
"quick_gelu" (both Hendrycks & Gimpel, 2016) and of p for "silu".
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# log2 Q(z) = c0 + c1 z + ..., lowest power first: the minimax fit of tests/helpers/gelu_polynomial.py.
UPPER_TAIL = tl.constexpr(
    (
        -0.999999922,
        -1.15110917,
        -0.459172229,
        -0.0526167539,
        0.00725389419,
        -0.000293898503,
        -0.000117135696,
        2.40945069e-05,
        -1.50350067e-06,
    )
)
LARGE = tl.constexpr(16.0)  # where Q, 2^-190, and the normal density, 2^-186, are zero in fp32


@triton.jit
def upper_tail(z):
    """Q(z) = 1 - Phi(z) for 0 <= z <= LARGE, Phi being the normal distribution function."""
    exponent = UPPER_TAIL[8] * z + UPPER_TAIL[7]
    for i in tl.static_range(6, -1, -1):
        exponent = exponent * z + UPPER_TAIL[i]
    return tl.exp2(exponent)


@triton.jit
def tanh_gate(p):
    """1 / (1 + exp(-2 u)), u = sqrt(2/pi) (p + 0.044715 p^3)."""
    # 2 sqrt(2/pi) log2(e) = 2.3022082
    return 1.0 / (1.0 + tl.exp2(-2.302208198 * p * (1.0 + 0.044715 * p * p)))


@triton.jit
def logistic_gate(p, ACT: tl.constexpr):
    """1 / (1 + exp(-c p)), where c is 1.702 for quick_gelu and 1 for silu."""
    if ACT == "quick_gelu":
        return 1.0 / (1.0 + tl.exp2(-2.4554669595930156 * p))  # 1.702 log2(e)
    else:
        tl.static_assert(ACT == "silu", "an activation that no kernel knows")
        return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * p))  # log2(e)


@triton.jit
def magnitude(p):
    return tl.minimum(tl.abs(p), LARGE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def wide_activate(pre, ACT: tl.constexpr):
    """The activation of `pre` in fp32, for what multiplies it before it is rounded."""
    p = pre.to(tl.float32)
    if ACT == "gelu":
        # p Phi(p) = max(p, 0) - |p| Q(|p|) loses no digits to 1 - Q, and has no branch.
        z = magnitude(p)
        return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * upper_tail(z)
    elif ACT == "gelu_tanh":
        return p * tanh_gate(p)
    else:
        return p * logistic_gate(p, ACT)


@triton.jit
def wide_activate_and_slope(pre, ACT: tl.constexpr):
    """(activation of `pre`, its derivative), both in fp32."""
    p = pre.to(tl.float32)
    if ACT == "gelu":
        # The slope is Phi(p) + p density(p): Q - |p| density at -|p|, and 1 minus that at |p|.
        z = magnitude(p)
        q = upper_tail(z)
        density = tl.exp2(-0.7213475204444817 * z * z - 1.3257480647361593)  # log2(e) / 2, log2(2 pi) / 2
        slope = q - z * density
        return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * q, tl.where(p < 0, slope, 1.0 - slope)
    elif ACT == "gelu_tanh":
        # gate' = gate (1 - gate) 2 u', 2 u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 p^2)
        gate = tanh_gate(p)
        return p * gate, gate + p * gate * (1.0 - gate) * 1.5957691216 * (1.0 + 0.134145 * p * p)
    else:
        gate = logistic_gate(p, ACT)
        factor: tl.constexpr = 1.702 if ACT == "quick_gelu" else 1.0
        return p * gate, gate + p * gate * (1.0 - gate) * factor


@triton.jit
def activate(pre, ACT: tl.constexpr):
    """The activation of `pre`, in its dtype."""
    return wide_activate(pre, ACT).to(pre.dtype)


@triton.jit
def activate_and_slope(pre, ACT: tl.constexpr):
    """(activation of `pre` in its dtype, with the bits of `activate`; its derivative in fp32)."""
    act, slope = wide_activate_and_slope(pre, ACT)
    return act.to(pre.dtype), slope


@triton.jit
def activate_and_kept_slope(pre, ACT: tl.constexpr):
    """(activation of `pre`, its derivative), both in its dtype: all that backward needs of `pre`."""
    act, slope = activate_and_slope(pre, ACT)
    return act, slope.to(pre.dtype)


@triton.jit
def times_slope(dact, slope):
    """The gradient `dact` in fp32, rounded to the slope's dtype, times the slope."""
    return dact.to(slope.dtype) * slope


def activated(p: Tensor, activation: str) -> Tensor:
    """The activation, by PyTorch."""
    if activation == "silu":
        return F.silu(p)
    if activation == "quick_gelu":
        return (p * torch.sigmoid(1.702 * p.float())).to(p.dtype)
    return F.gelu(p, approximate="tanh" if activation == "gelu_tanh" else "none")
