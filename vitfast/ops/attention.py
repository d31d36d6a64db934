"""Softmax attention on packed or separate q, k, v (Vaswani et al., 2017; computed flash-style, Dao et al., 2022)."""

from torch import Tensor

from .. import ref
from ._dispatch import autocasts, check_same, check_shape, kernels_wanted


@autocasts
def attention(qkv: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v over the tokens, for every head.

    Either packed, `attention(qkv)` with qkv (B, N, 3, H, Dh), or `attention(q, k, v)` with three (B, N, H, Dh); any strides with a
    unit last one. scale: 1/sqrt(Dh) unless given. Returns (B, N, H, Dh), contiguous, in the input's dtype.
    """
    if (k is None) != (v is None):
        raise ValueError("attention: give qkv alone, or q, k and v; got two tensors")
    if k is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(f"attention: qkv must be (B, N, 3, H, Dh), got {tuple(qkv.shape)}")
        check_same("attention", "qkv", qkv)
        q, k, v = qkv.unbind(2)
    else:
        q = qkv
        if q.dim() != 4:
            raise ValueError(f"attention: q must be (B, N, H, Dh), got {tuple(q.shape)}")
        check_shape("attention", "k", k, tuple(q.shape))
        check_shape("attention", "v", v, tuple(q.shape))
        check_same("attention", "q", q, k=k, v=v)
    kernels_wanted("attention", q)
    return ref.attention(q, k, v, scale=scale)
