"""The attention block of a pre-norm encoder layer (Eq. 2 of the ViT paper), fused.

    attention_block: x + drop_path[b] * layer_scale * proj(attention(qkv(norm(x))))

Besides the tensors that blocks.py names, qkv, lse and the attention output are kept for backward.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention.options import AttentionOptions
from . import blocks as block
from . import checks as check
from . import reference as ref
from .attention import RopeLayout, checked, head_unsupported, needs_rope, option_gradients
from .blocks import Keep, Norm
from .dispatch import NO_TRITON, autocasts, kernels_wanted, norm_unsupported, routed
from .layer_norm import fake_statistics
from .operation import Constant, as_matrix, custom_op

if NO_TRITON is None:
    from ..kernels.attention.launchers import attention_bwd, attention_fwd
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.scaled import scale_rows


def _samples(x: Tensor) -> tuple[int, int]:
    """B and N of x (B, N, D); for packed samples, x (tokens, D), they are 1 and the number of tokens."""
    return x.shape[:2] if x.dim() == 3 else (1, x.shape[0])


class _Arguments(NamedTuple):
    """The arguments of attention_block; "in" stands for qkv, "out" for proj."""

    x: Tensor  # (B, N, D) or (tokens, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    in_weight: Tensor  # (3K, D)
    in_bias: Tensor | None  # (3K,)
    out_weight: Tensor  # (D, K)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Constant | None  # (B,) or (tokens,)
    options: AttentionOptions
    num_heads: int
    eps: float
    norm: str
    keep: str


class _Saved(NamedTuple):
    """The tensors kept for backward."""

    mean: Tensor | None = None  # (M,) in fp32
    rstd: Tensor | None = None  # (M,) in fp32
    qkv: Tensor | None = None  # (B, N, 3, H, Dh)
    lse: Tensor | None = None  # (B, H, N) in fp32
    o: Tensor | None = None  # (B, N, H, Dh)
    h: Tensor | None = None  # (M, D), the norm's output, with keep="all" alone


def _forward(t: _Arguments) -> tuple[Tensor, _Saved]:
    (batch, tokens), inner, few = _samples(t.x), t.out_weight.shape[1], block.has_few_rows(t, t.in_weight)
    if few:
        qkv, counters = block.first_layer(t, None, t.in_weight, t.in_bias)
    else:
        h, mean, rstd = block.apply_norm(t)
        qkv = linear(h, as_matrix(t.in_weight), t.in_bias)
    qkv = qkv.view(batch, tokens, 3, t.num_heads, inner // t.num_heads)
    o, lse = attention_fwd(*qkv.unbind(2), qkv.shape[-1] ** -0.5, t.options, few_rows=few)
    if few:
        return block.last_layer(o.view(-1, inner), counters, t), _Saved()
    return block.output_layer(o.view(-1, inner), t, t.x), block.saved_outputs(t, _Saved(mean, rstd, qkv, lse, o, h))


def _fake(t: _Arguments) -> tuple[Tensor, _Saved]:
    (batch, tokens), new = _samples(t.x), t.in_weight.new_empty
    head = t.in_weight.shape[0] // 3 // t.num_heads
    qkv, o = new(batch, tokens, 3, t.num_heads, head), new(batch, tokens, t.num_heads, head)
    lse = t.x.new_empty(batch, t.num_heads, tokens, dtype=torch.float32)
    saved = _Saved(*fake_statistics(t.x, t.norm == "rms"), qkv, lse, o, new(batch * tokens, t.x.shape[-1]))
    return t.x.new_empty(t.x.shape), block.saved_outputs(t, saved)


def _backward(dout: Tensor, t: _Arguments, saved: _Saved, needs: _Arguments) -> dict[str, Tensor | None]:
    dout, below, want_rope = as_matrix(dout), block.needs_norm(needs), needs_rope(needs)
    g, g_sum = block.branch_gradient(dout, t, needs, norm_follows=below)
    dout_weight, dscale = block.weight_gradients(g, as_matrix(saved.o.flatten(2)), t, needs)
    # Gradients through proj and attention.
    want_layer = below or needs.in_weight or needs.in_bias
    grads, din, din_bias, norm = {}, None, None, block.NormBackward({}, g_sum, None, ())
    if want_layer or want_rope or needs.options.bias:
        do = input_grad(*block.through_layer_scale(g, t)).view(saved.o.shape)
        tensors = *saved.qkv.unbind(2), saved.o, saved.lse, do, saved.qkv.shape[-1] ** -0.5
        dqkv, din_bias = attention_bwd(*tensors, needs.in_bias and not want_rope, t.options, unrotate=not want_rope)
        grads = option_gradients(t.options, needs, tensors, *dqkv.unbind(2)[:2])
        din = as_matrix(dqkv.flatten(2))
        if needs.in_bias and want_rope:
            din_bias = scale_rows(din, None, None, 1, want_scaled=False)[1]
        tensors = do = dqkv = None  # freed before more is allocated
    # Gradients through qkv, the norm and the residual.
    if want_layer:
        dh = input_grad(din, as_matrix(t.in_weight)) if below else None
        norm = block.norm_backward(t, needs, saved, dh, dout, g_sum, needs.in_weight)
        dh = None
        grads |= norm.grads
        grads["in_weight"] = torch.mm(din.t(), norm.h) if needs.in_weight else None
        grads["in_bias"] = din_bias.to(t.in_weight.dtype) if needs.in_bias else None
    return grads | block.output_layer_gradients(t, needs, norm.g_sum, dout_weight, dscale)


_attention_block = custom_op("attention_block", _Arguments, _Saved, forward=_forward, fake=_fake, backward=_backward)


@autocasts("bias")
@routed
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
    norm: Norm = "layer",
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: Keep = "least",
    save_policy: Keep | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "half",
    num_prefix: int = 0,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    longest: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """An attention block: x + drop_path[b] * layer_scale * proj(attention(qkv(norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in the layers' dtype or fp32; qkv_weight (3K, D), rows [q; k; v],
    head-major in each; proj_weight (D, K), where K = num_heads * head size, usually D; biases may be None; layer_scale
    (D,) or None; drop_path (B,) factors or None. norm: "layer", or "rms" for RMSNorm, whose norm_bias is None.

    residual_in_fp32: x is fp32, and so is the result. The products still run in the dtype of the parameters or of
    autocast. keep: "least" computes the norm's output again in backward; "all" keeps it, which needs more memory and
    moves less. rope, rope_layout, num_prefix, bias, key_lengths, offsets and longest are as in attention. For packed
    samples, x is (tokens, D) and drop_path (S,) or (tokens,). Returns x's shape in x's dtype, or that of autocast.
    """
    op = "attention_block"
    rows, width = check.weight(op, x, qkv_weight=qkv_weight)
    inner, rest = rows // 3, rows % 3  # divmod is not compiled for any size
    heads = check.as_whole(num_heads)
    if heads is None:
        raise TypeError(f"{op}: num_heads must be an integer, got {num_heads!r}")
    if heads < 1 or rest or not inner or inner % heads:
        want = f"3 * num_heads * head size rows with num_heads {heads}"
        raise ValueError(f"{op}: qkv_weight must have {want}, got {rows}")
    if x.dim() != (3 if offsets is None else 2):
        want = "(B, N, D), or packed with offsets" if offsets is None else "(tokens, D) of packed samples"
        raise ValueError(f"{op}: x must be {want}, got {tuple(x.shape)}")
    shape, terms = (*_samples(x), heads, inner // heads), (rope, rope_layout, num_prefix, bias, key_lengths)
    options = checked(op, qkv_weight, shape, *terms, offsets, longest)
    if offsets is not None and isinstance(drop_path, Tensor) and drop_path.shape == (len(offsets) - 1,):
        drop_path = drop_path[ref.owners(offsets, len(x))]
    weights = norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias
    t = _Arguments(x, *weights, layer_scale, drop_path, options, heads, eps, norm, keep)
    layers = dict(qkv_=(qkv_weight, qkv_bias, (rows, width)), proj_=(proj_weight, proj_bias, (width, inner)))
    t = t._replace(eps=block.check_block(op, t, layers, residual_in_fp32))
    unsupported = head_unsupported(inner // heads, 1.0) or norm_unsupported(width, drop_path)
    if kernels_wanted(op, qkv_weight, unsupported):
        return _attention_block(t._replace(keep=block.choose_keep(t, qkv_weight)))
    keywords = dict(num_heads=heads, longest=longest, **block.keywords(t), **options.keywords)
    return ref.attention_block(x, *weights, **keywords)
