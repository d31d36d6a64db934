"""Attention with relative positions, an experiment of the ViT paper (D.4, Table 8)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import reference as ref
from .layers import Attention


def relative_logits(q: Tensor, table: Tensor) -> Tensor:
    """q (B, N, H, Dh) times the embedding of each pair's offset, table (2n-1, Dh) -> (B, H, N, N).

    Scaled by 1/sqrt(Dh) like attention's. The 1-D relative attention of the ViT paper: the last n of the N tokens are
    patches p in raster order; for a query q and a key k, row p_q - p_k + n - 1 is an extra key, the same for all heads
    (Shaw et al., 2018). The N - n prefix tokens before them have no place in the image: where one is query or key the
    logit is 0, content alone counts. (So the last layer's table learns only where patches are pooled.)
    """
    patches = (table.shape[0] + 1) // 2
    prefix, place = q.shape[1] - patches, torch.arange(patches, device=q.device)
    keys = table.to(q.dtype)[place[:, None] - place + patches - 1]  # (n, n, Dh)
    return F.pad(torch.einsum("bqhd,qkd->bhqk", q[:, prefix:] * q.shape[-1] ** -0.5, keys), (prefix, 0, prefix, 0))


@torch.fx.wrap  # it looks at shapes in Python
def relative_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attention of q, k, v (B, N, H, Dh) with `relative_logits` as a bias: (B, N, H, Dh).

    PyTorch's, which needs no memory of (B, H, N, N) numbers for the bias's gradient.
    """
    bias = relative_logits(q, table)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias).transpose(1, 2)


class RelativeAttention(Attention):
    """Attention to which each layer's table of relative positions (2n-1, Dh) comes as `relative`."""

    def unsupported_reason(self) -> str:
        return "relative positions"

    def probabilities(self, x: Tensor, relative: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        return ref.attention_probabilities(q, k, bias=relative_logits(q, relative))

    def attend(self, x: Tensor, relative: Tensor) -> Tensor:
        return relative_attention(*self.heads(x), relative)
