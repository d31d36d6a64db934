"""Attention with relative positions, an experiment of the ViT paper (D.4, Table 8)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import reference as ref
from .layers import Attention


def relative_logits(q: Tensor, table: Tensor) -> Tensor:
    """q (B, N, H, Dh) times the embedding of each pair's offset, table (2n-1, Dh) -> (B, H, N, N).

    The logits are scaled by 1/sqrt(Dh) like attention's. This is the 1-D relative attention of the ViT paper: the last
    n of the N tokens are patches in raster order; for the query at p and the key at k, row p - k + n - 1 of the table
    is an extra key, the same for all heads (Shaw et al., 2018). The N - n prefix tokens have no position in the image:
    where one is query or key, this logit is 0. (So the last layer's table learns only in models that pool patches.)
    """
    patches = (table.shape[0] + 1) // 2
    prefix, place = q.shape[1] - patches, torch.arange(patches, device=q.device)
    keys = table.to(q.dtype)[place[:, None] - place + patches - 1]  # (n, n, Dh)
    return F.pad(torch.einsum("bqhd,qkd->bhqk", q[:, prefix:] * q.shape[-1] ** -0.5, keys), (prefix, 0, prefix, 0))


@torch.fx.wrap  # it looks at shapes in Python
def relative_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attention of q, k, v (B, N, H, Dh) with `relative_logits` as a bias: (B, N, H, Dh).

    PyTorch's attention computes it. The bias depends on q, so it and its gradient are of shape (B, H, N, N).
    """
    bias = relative_logits(q, table)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias).transpose(1, 2)


class RelativeAttention(Attention):
    """Attention with relative positions: `relative` is this layer's table of them, (2n-1, Dh)."""

    def unsupported_reason(self) -> str:
        return "relative positions"

    def probabilities(self, x: Tensor, relative: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        return ref.attention_probabilities(q, k, bias=relative_logits(q, relative))

    def attend(self, x: Tensor, relative: Tensor) -> Tensor:
        return relative_attention(*self.heads(x), relative)
