"""The attention block of a pre-norm encoder layer (Eq. 2 of the ViT paper), fused.

    attention_block: x + drop_path[b] * layer_scale * proj(attention(qkv(norm(x))))

Kept for backward besides what _blocks.py says: qkv, lse and the attention output.
"""

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention.options import Logits
from . import reference as ref
from ._blocks import INPUTS, TRAINED, BlockNeeds, Inputs, check, gradients, keeps, kept, normed, output_gradient, split
from ._dispatch import NO_TRITON, autocasts, kernels_wanted
from ._operation import (
    as_matrix,
    check_norm_kind,
    check_rows,
    check_shape,
    check_tensors,
    differentiable,
    filled,
    operation,
    sample_rows,
    shaped,
)
from .attention import SCHEMA, checked, logit_gradients
from .attention import unsupported_reason as head_unsupported
from .layer_norm import fake_statistics
from .layer_norm import unsupported_reason as width_unsupported
from .linear_residual import through_scale, weight_gradients

if NO_TRITON is None:
    from ..kernels.attention.launchers import attention_bwd, attention_fwd
    from ..kernels.matmul.linear import input_grad, linear, linear_residual
    from ..kernels.rows import scale_rows


def _samples(x: Tensor) -> tuple[int, int]:
    """B and N of x (B, N, D); of packed samples, x (tokens, D), 1 and the tokens."""
    return x.shape[:2] if x.dim() == 3 else (1, x.shape[0])


@operation("attention_block_fwd", f"{INPUTS}, {SCHEMA}, SymInt num_heads, float eps, str norm, str keep", 7)
def _attention_fwd(*arguments):
    """(out, mean, rstd, qkv, lse, o, the norm's output).

    keep "least": the last is empty, "none": all but the first are.
    """
    t, (*logits, num_heads, eps, norm, keep) = split(arguments)
    (batch, tokens), x = _samples(t.x), as_matrix(t.x)
    qkv_weight, proj_weight = as_matrix(t.in_weight), as_matrix(t.out_weight)
    inner = proj_weight.shape[1]
    h, mean, rstd = normed(t, eps, norm)
    qkv = linear(h, qkv_weight, t.in_bias).view(batch, tokens, 3, num_heads, inner // num_heads)
    o, lse = attention_fwd(*qkv.unbind(2), qkv.shape[-1] ** -0.5, Logits(*logits))
    out = linear_residual(o.view(-1, inner), proj_weight, t.out_bias, x, t.layer_scale, t.drop_path, sample_rows(t.x))
    return shaped(out, *t.x.shape), *kept(keep, t.x, (mean, rstd, qkv, lse, o), (h,))


@_attention_fwd.register_fake
def _(*arguments):
    t, (*_, num_heads, _, norm, keep) = split(arguments)
    (batch, tokens), width, new = _samples(t.x), t.x.shape[-1], t.in_weight.new_empty
    head = t.in_weight.shape[0] // 3 // num_heads
    qkv, o = new(batch, tokens, 3, num_heads, head), new(batch, tokens, num_heads, head)
    lse = t.x.new_empty(batch, num_heads, tokens, dtype=torch.float32)
    least = (*fake_statistics(t.x, norm), qkv, lse, o)
    return t.x.new_empty(t.x.shape), *kept(keep, t.x, least, (new(batch * tokens, width),))


class AttentionNeeds(NamedTuple):
    """Which gradients of an attention block are needed: BlockNeeds, and those of Logits."""

    x: bool
    norm_weight: bool
    norm_bias: bool
    in_weight: bool
    in_bias: bool
    out_weight: bool
    out_bias: bool
    layer_scale: bool
    cos: bool
    sin: bool
    bias: bool


@operation(
    "attention_block_bwd",
    f"Tensor dout, {TRAINED}, Tensor? cos, Tensor? sin, Tensor? bias, Tensor? drop_path, Tensor? key_lengths, "
    "Tensor? offsets, Tensor mean, Tensor rstd, Tensor qkv, Tensor lse, Tensor o, Tensor? h, "
    "bool interleaved, SymInt num_prefix, SymInt longest, float eps, str norm, bool[] needs",
    11,
)
def _attention_bwd(dout, *arguments):
    """The gradients that AttentionNeeds names, empty where not needed. h: the norm's output, if kept."""
    *trained, cos, sin, bias, drop_path, lengths, offsets = arguments[:14]
    mean, rstd, qkv, lse, o, h, *options, eps, norm, needs = arguments[14:]
    t, logits = Inputs(*trained, drop_path), Logits(cos, sin, bias, lengths, offsets, *options)
    *needs, want_cos, want_sin, want_bias = needs
    want_rope, needs, din, more = want_cos or want_sin, BlockNeeds(*needs), None, (None,) * 3
    dout, proj_weight = as_matrix(dout), as_matrix(t.out_weight)
    g, total = output_gradient(dout, t, qkv.dtype, needs)
    dproj_weight, dscale = weight_gradients(g, as_matrix(o.flatten(2)), proj_weight, t.layer_scale, needs.out)
    if needs.out.x or want_rope or want_bias:
        do = input_grad(*through_scale(g, proj_weight, t.layer_scale)).view(o.shape)
        heads, scale = qkv.unbind(2), qkv.shape[-1] ** -0.5
        want_sum = needs.in_bias and not want_rope
        dqkv, dbias = attention_bwd(*heads, o, lse, do, scale, want_sum, logits, turn_back=not want_rope)
        more = logit_gradients(heads, dqkv.unbind(2)[:2], o, lse, do, scale, logits, want_rope, want_bias)
        din = as_matrix(dqkv.flatten(2))
        if needs.in_bias and want_rope:
            dbias = scale_rows(din, None, None, 1, want_scaled=False)[1]
        din = (din, dbias) if needs.out.x else None
    found = gradients(t, needs, dout, (total, dproj_weight, dscale), din, (mean, rstd, h), eps, norm)
    return *found, *filled(t.x, *more)


# keep="least" trades it for time: backward writes it again in a pass that it makes anyway.
differentiable(_attention_fwd, _attention_bwd, "attention_block", AttentionNeeds, only_all=("h",))


@autocasts(keep=("bias",))
def attention_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    *,
    num_heads: int,
    eps: float = 1e-6,
    norm: str = "layer",
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: str = "least",
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: str = "half",
    num_prefix: int = 0,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """x + drop_path[b] * layer_scale * proj(attention(qkv(norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; qkv_weight (3D, D), rows [q; k; v], head-major in each;
    proj_weight (D, D); biases may be None; layer_scale (D,) or None; drop_path (B,) factors or None. norm: "layer", or
    "rms" for RMSNorm, whose norm_bias is None. `residual_in_fp32`: x is fp32 and stays so, whatever the dtype of the
    parameters (or autocast) that the matrix products run in. `keep`: "least", or "all" for more memory and less
    traffic: the norm's output is then kept for backward, not written again. `rope`, `rope_layout`, `num_prefix`,
    `bias`, `key_lengths`, `offsets` and `longest`: as in attention; of packed samples x is (tokens, D), drop_path (S,)
    or (tokens,). Returns x's shape in x's dtype.
    """
    op, width = "attention_block", check_rows("attention_block", x)
    layers = (norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias)
    check_tensors(op, norm_weight=norm_weight, qkv_weight=qkv_weight, proj_weight=proj_weight)
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_norm_kind(op, norm, norm_bias)
    check_shape(op, "qkv_weight", qkv_weight, (None, width))
    inner, rest = divmod(qkv_weight.shape[0], 3)
    if type(num_heads) is not int and not isinstance(num_heads, torch.SymInt):
        if isinstance(num_heads, bool) or not isinstance(num_heads, Integral):
            raise TypeError(f"{op}: num_heads must be an integer, got {num_heads!r}")
        num_heads = int(num_heads)
    if num_heads < 1 or rest or not inner or inner % num_heads:
        raise ValueError(
            f"{op}: qkv_weight must have 3 * num_heads * head size rows with num_heads {num_heads}, "
            f"got {qkv_weight.shape[0]}"
        )
    if x.dim() != (3 if offsets is None else 2):
        want = "(B, N, D), or packed with offsets" if offsets is None else "(tokens, D) of packed samples"
        raise ValueError(f"{op}: x must be {want}, got {tuple(x.shape)}")
    shape, options = (*_samples(x), num_heads, inner // num_heads), (rope, rope_layout, num_prefix, bias, key_lengths)
    logits = checked(op, qkv_weight, shape, *options, offsets, longest)
    if offsets is not None and isinstance(drop_path, Tensor) and drop_path.shape == (len(offsets) - 1,):
        drop_path = drop_path[ref.owners(offsets, len(x))]
    t = Inputs(x, *layers, layer_scale, drop_path)
    eps = check(op, t, ("qkv", "proj"), 3 * inner, inner, eps, residual_in_fp32, keep)
    unsupported = head_unsupported(inner // num_heads, 1.0) or width_unsupported(width, drop_path)
    if kernels_wanted(op, qkv_weight, unsupported):
        keep = keeps(keep, (*t, logits.cos, logits.sin, logits.bias), qkv_weight)
        return _attention_fwd(*t, *logits, num_heads, eps, norm, keep)[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=qkv_weight.dtype)
    acting = logits.options | ({} if offsets is None else dict(longest=longest))
    return ref.attention_block(x, *layers, num_heads=num_heads, eps=eps, norm=norm, **factors, **acting)
