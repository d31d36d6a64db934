"""Layers between a ViT's tokens and its logits, and sums and means over the tokens of packed images."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from ..kernels.tiles import batch_invariant
from ..ops import norm_linear
from ..ops.dispatch import constant_when_compiled
from ..ops.fusable import expected_modules, fallback_reason
from ..ops.reference import owners
from .layers import OF_NORMS, Mlp

torch.fx.wrap("norm_linear")  # FX treats it as a leaf, as in layers.py
_NORMS = (nn.Identity, *OF_NORMS)
_END = expected_modules(dict(norm=_NORMS, fc_norm=_NORMS, pre_logits=nn.Identity, head_drop=nn.Dropout, head=nn.Linear))


class AttentionPoolLatent(nn.Module):
    """The MAP head (Lee et al., 2019; Zhai et al., 2022): (B, N, D) -> (B, D) by one learned query.

    Its parameters are `latent` (1, 1, D), `q` (D, D), `kv` (2D, D) and `proj` (D, D); a pre-norm MLP follows. PyTorch
    computes the attention, which has one query.
    """

    def __init__(self, dim: int, num_heads: int, hidden: int, activation: str, norm: Callable):
        super().__init__()
        self.num_heads = num_heads
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.norm = norm(dim)
        self.mlp = Mlp(dim, hidden, activation, True, 0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.latent, std=self.latent.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q(self.latent.to(x.dtype).expand(x.shape[0], -1, -1)).unflatten(-1, (self.num_heads, -1))
        keys, values = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        pooled = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, keys, values)))
        x = self.proj(pooled.transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norm(x)))[:, 0]

    def pool_packed(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(tokens, D) of S packed samples -> (S, D); softmax and sums over tokens are in fp32 at least."""
        query = self.q(self.latent[0].to(x.dtype)).unflatten(-1, (self.num_heads, -1))  # (1, H, Dh)
        keys, values = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).unbind(1)
        owner, work = owners(offsets, len(x)), torch.promote_types(x.dtype, torch.float32)
        logits = (query.to(work) * keys.to(work)).sum(-1) * query.shape[-1] ** -0.5  # (tokens, H)
        least = logits.new_full((len(offsets) - 1, self.num_heads), -torch.inf)
        largest = least.scatter_reduce(0, owner[:, None].expand_as(logits), logits.detach(), "amax")
        weights = (logits - largest[owner]).exp()
        pooled = segment_sum(weights[..., None] * values.to(work), offsets) / segment_sum(weights, offsets)[..., None]
        x = self.proj(pooled.to(x.dtype).flatten(1))
        return x + self.mlp(self.norm(x))


class PreLogits(nn.Module):
    """The hidden layer of the pre-training head: tanh(fc(x)), (B, D) -> (B, representation_size)."""

    def __init__(self, dim: int, size: int):
        super().__init__()
        self.fc = nn.Linear(dim, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """(tokens, ...) -> (S, ...): the sum over each sample's tokens.

    The order of the sum, and so its bits, are the same every time. On a GPU it is PyTorch's segment_reduce, which can
    be differentiated once; elsewhere it is index_add, which can be differentiated any number of times.
    """
    if x.device.type == "cuda":
        return torch.segment_reduce(x, "sum", offsets=offsets, axis=0)
    return x.new_zeros(len(offsets) - 1, *x.shape[1:]).index_add(0, owners(offsets, len(x)), x)


def segment_mean(x: Tensor, offsets: Tensor, prefix: int) -> Tensor:
    """(tokens, D) -> (S, D): the mean of each image's tokens after the first `prefix`, in fp32 at least."""
    if prefix:  # every other segment is an image's prefix
        offsets = torch.stack([offsets, offsets + prefix], 1).flatten()[:-1]
    sums = segment_sum(x.to(torch.promote_types(x.dtype, torch.float32)), offsets)
    return (sums / offsets.diff()[:, None])[bool(prefix) :: 1 + bool(prefix)].to(x.dtype)


# ---- a ViT's last norm and head as one operation


def ends_in_one_operation(vit: nn.Module) -> bool:
    """Whether it computes its last norm for pooled tokens alone, with the head.

    It does without gradients, where nobody observes the modules.
    """
    pool = vit.global_pool in ("token", "avg") and not vit.residual_in_fp32
    return pool and not (torch.is_grad_enabled() or batch_invariant()) and vit._end_reason() is None


@constant_when_compiled
def _end_reason(vit: nn.Module) -> str | None:
    """Why the modules after the blocks must be called one by one; None where they need not."""
    if is_fx_symbolic_tracing():
        return "FX looks for the modules"
    for name in ("forward_features", "forward_head", "pool", "_encode", "_last_norm", "_head"):
        if name in vars(vit) or getattr(type(vit), name).__module__ != f"{__package__}.vit":
            return f"{name} is replaced"
    norms = [not isinstance(norm, nn.Identity) for norm in (vit.norm, vit.fc_norm)]
    if norms != [False, True] and (norms != [True, False] or vit.global_pool != "token"):
        return "the norm needs all tokens, or there are none or two"
    return fallback_reason(_END, vit)


def norm_and_head(vit: nn.Module, x: Tensor) -> Tensor:
    """The tokens (B, T+N, D) after the blocks -> logits, as the norm and forward_head compute them."""
    norm = vit.fc_norm if isinstance(vit.norm, nn.Identity) else vit.norm
    parameters = norm.weight, norm.bias, vit.head.weight, vit.head.bias
    return norm_linear(vit.pool(x), *parameters, eps=norm.eps, norm=OF_NORMS[type(norm)])
