"""The activations of the MLPs and their slopes, in kernels.

"gelu" is p Phi(p) = max(p, 0) - |p| Q(|p|), where Phi is the normal distribution function and Q = 1 - Phi its upper
tail, computed as two to the power of a polynomial of |p|. Its degree is 8 for fp32, and for bf16 and fp16 5, the least
with which in no range from -6 up the largest error of gelu or its slope, over all finite numbers, is more than 1.1
times PyTorch's (tests/kernels/test_gelu.py). It keeps digits in the negative tail, where 1 + erf cancels: the relative
error of fp32 gelu is 2e-4 at -4, 1.6e-3 at -5, 1e-2 at -6, 0.15 at -7 (with erf 6e-3 at -4, 0.2 at -5, 1 from -6 on).
Below -9, where |gelu| is 1e-18 and less, no digit is left.
The others are p times a gate, the logistic function of 2 sqrt(2/pi) (p + 0.044715 p^3) for "gelu_tanh", of 1.702 p for
"quick_gelu" (both Hendrycks & Gimpel, 2016) and of p for "silu".

Instructions for a bf16 number in registers, counted, not timed (sm_90; Triton 3.6, 3.8 and 3.9): gelu takes 10.5, 16.5
with its slope; gelu_tanh 8.5 and 12 (13.5 from Triton 3.8 on); quick_gelu and silu 6.5 and 9.
With PLAIN, no instruction takes two bf16 numbers at a time; the bits of all results are the same.
"""

import triton
import triton.language as tl

from ..launch import INTERPRETED

INTERPRETED = tl.constexpr(INTERPRETED)

# log2 Q(z) = c0 + c1 z + ..., lowest power first: the minimax fits of tests/helpers/gelu_polynomial.py.
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
UPPER_TAIL_BF16 = tl.constexpr((-1.00026148, -1.14819009, -0.466021644, -0.046647465, 0.00530057478, -0.000262595987))
UPPER_TAIL_FP16 = tl.constexpr((-1.00005467, -1.15032725, -0.461376498, -0.0503261147, 0.00644901134, -0.000383296556))
LARGE = tl.constexpr(16.0)  # where Q, 2^-190, and the normal density, 2^-186, are zero in fp32


@triton.jit
def wide(pre, PLAIN: tl.constexpr):
    """`pre` in fp32.

    bf16 is the upper half of fp32: a shift and a mask take apart the two that share a register.
    """
    if PLAIN or pre.dtype != tl.bfloat16:
        return pre.to(tl.float32)
    else:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(asm, "=&f,=f,r", [pre], tl.float32, is_pure=True, pack=2)


@triton.jit
def mirrored(pre, p, slope, PLAIN: tl.constexpr):
    """slope where p, which is `pre` in fp32, is negative, and 1 - slope elsewhere."""
    if PLAIN or pre.dtype != tl.bfloat16 or not tl.target_info.cuda_capability_geq(9, 0):
        return tl.where(p < 0, slope, 1.0 - slope)
    else:  # one comparison for two
        asm: tl.constexpr = """{ .reg .pred a, b; .reg .f32 x, y; .reg .b32 zero; mov.b32 zero, 0;
            setp.lt.bf16x2 a|b, $2, zero; sub.f32 x, 0f3F800000, $3; sub.f32 y, 0f3F800000, $4;
            selp.f32 $0, $3, x, a; selp.f32 $1, $4, y, b; }"""
        return tl.inline_asm_elementwise(asm, "=&f,=f,r,f,f", [pre, slope], tl.float32, is_pure=True, pack=2)


@triton.jit
def magnitude(p):
    """min(|p|, LARGE): times Q = 0 it is 0, where infinity would give NaN."""
    return tl.minimum(tl.abs(p), LARGE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude_alone(pre, PLAIN: tl.constexpr):
    """`magnitude` where p is not needed, of two bf16 numbers at a time: up to 1.5 instructions less."""
    if PLAIN or pre.dtype != tl.bfloat16 or not tl.target_info.cuda_capability_geq(9, 0):
        return magnitude(wide(pre, PLAIN))
    else:
        asm: tl.constexpr = """{ .reg .b32 z, most; mov.b32 most, 0x41804180; abs.bf16x2 z, $2;
            min.NaN.bf16x2 z, z, most; shl.b32 $0, z, 16; and.b32 $1, z, 0xffff0000; }"""
        return tl.inline_asm_elementwise(asm, "=&f,=f,r", [pre], tl.float32, is_pure=True, pack=2)


@triton.jit
def positive(p):  # max(p, 0), and NaN for NaN
    return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def upper_tail(z, DTYPE: tl.constexpr):
    """Q(z) = 1 - Phi(z) for 0 <= z <= LARGE, as exactly as results in DTYPE need."""
    C: tl.constexpr = (
        UPPER_TAIL_BF16 if DTYPE == tl.bfloat16 else UPPER_TAIL_FP16 if DTYPE == tl.float16 else UPPER_TAIL
    )
    DEGREE: tl.constexpr = 8 if DTYPE == tl.float32 else 5
    exponent = C[DEGREE] * z + C[DEGREE - 1]
    for i in tl.static_range(DEGREE - 2, -1, -1):
        exponent = exponent * z + C[i]
    return tl.exp2(exponent)


@triton.jit
def gate(p, ACT: tl.constexpr):
    """1 / (1 + exp(-u)).

    u is 2 sqrt(2/pi) (p + 0.044715 p^3) for gelu_tanh, 1.702 p for quick_gelu and p for silu.
    """
    if ACT == "gelu_tanh":
        exponent = p * (-2.302208198 - 0.10294323957 * (p * p))  # 2 sqrt(2/pi) log2(e), 0.044715 times that
    elif ACT == "quick_gelu":
        exponent = -2.4554669595930156 * p  # 1.702 log2(e)
    else:
        tl.static_assert(ACT == "silu", "an activation that no kernel knows")
        exponent = -1.4426950408889634 * p  # log2(e)
    x = 1.0 + tl.exp2(exponent)
    if INTERPRETED:
        return 1.0 / x
    else:  # one instruction, exact to 1 ulp; a division, to 2, takes six: it scales x first, for its whole range
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def wide_activate(pre, ACT: tl.constexpr, PLAIN: tl.constexpr = INTERPRETED):
    """The activation of `pre` in fp32, for what multiplies it before it is rounded."""
    p = wide(pre, PLAIN)
    if ACT == "gelu":
        # p Phi(p) = max(p, 0) - |p| Q(|p|) loses no digits to 1 - Q, and has no branch.
        z = magnitude(p)
        return positive(p) - z * upper_tail(z, pre.dtype)
    else:
        return p * gate(p, ACT)


@triton.jit
def wide_activate_and_slope(pre, ACT: tl.constexpr, PLAIN: tl.constexpr = INTERPRETED, ALONE: tl.constexpr = False):
    """(activation of `pre`, its derivative), both in fp32; ALONE: only the derivative is used."""
    p = wide(pre, PLAIN)
    if ACT == "gelu":
        # The slope is Phi(p) + p density(p): Q - |p| density at -|p|, and 1 minus that at |p|.
        z = magnitude_alone(pre, PLAIN) if ALONE else magnitude(p)
        q = upper_tail(z, pre.dtype)
        density = tl.exp2(-0.7213475204444817 * z * z - 1.3257480647361593)  # log2(e) / 2, log2(2 pi) / 2
        slope = q - z * density
        return positive(p) - z * q, mirrored(pre, p, slope, PLAIN)
    else:
        # gate' = gate (1 - gate) u'
        g = gate(p, ACT)
        act = p * g
        slope = act - act * g
        if ACT == "gelu_tanh":
            slope *= 1.5957691216 + 0.2140644488 * (p * p)  # u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 p^2)
        elif ACT == "quick_gelu":
            slope *= 1.702
        return act, g + slope


@triton.jit
def activate(pre, ACT: tl.constexpr, PLAIN: tl.constexpr = INTERPRETED):
    """The activation of `pre`, in its dtype."""
    return wide_activate(pre, ACT, PLAIN).to(pre.dtype)


@triton.jit
def activate_and_slope(pre, ACT: tl.constexpr, PLAIN: tl.constexpr = INTERPRETED, ALONE: tl.constexpr = False):
    """(activation of `pre` in its dtype, with the bits of `activate`; its derivative in fp32).

    ALONE: only the derivative is used.
    """
    act, slope = wide_activate_and_slope(pre, ACT, PLAIN, ALONE)
    return act.to(pre.dtype), slope


@triton.jit
def activate_and_kept_slope(pre, ACT: tl.constexpr, PLAIN: tl.constexpr = INTERPRETED):
    """(activation of `pre`, its derivative), both in its dtype: all that backward needs of `pre`."""
    act, slope = activate_and_slope(pre, ACT, PLAIN)
    return act, slope.to(pre.dtype)


@triton.jit
def times_slope(dact, slope, PLAIN: tl.constexpr = INTERPRETED):
    """The fp32 gradient `dact`, rounded to the slope's dtype, times the slope, in that dtype."""
    dact = dact.to(slope.dtype)
    if PLAIN or slope.dtype != tl.bfloat16:
        return dact * slope
    else:
        # a b - 0: only from sm_90 on have products an instruction of their own
        asm: tl.constexpr = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [dact, slope], tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def dgelu(dact, pre, ACT: tl.constexpr, WITH_ACT: tl.constexpr):
    """(gelu(pre) if WITH_ACT, dact * slope) in pre's dtype, dact in fp32; ACT "slope": pre is the slope."""
    if ACT == "slope":
        return pre, times_slope(dact, pre)
    else:
        act, slope = activate_and_slope(pre, ACT, ALONE=not WITH_ACT)
        return act, (dact * slope).to(pre.dtype)
