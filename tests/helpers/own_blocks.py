"""Modules of facebookresearch/dinov2's and /dinov3's own code, written out."""

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    """q, k and v together, the softmax written out. rope: sines and cosines of the last tokens."""

    def __init__(self, dim, num_heads, qkv=nn.Linear):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = qkv(dim, 3 * dim), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x, rope=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if rope is not None:
            prefix = x.shape[1] - rope[0].shape[-2]
            q, k = (torch.cat([t[:, :, :prefix], rotated(t[:, :, prefix:], *rope)], 2) for t in (q, k))
        weights = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))


def rotated(x, sin, cos):
    """As rope_apply in dinov3: halves of a head in pairs."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class LinearKMaskedBias(nn.Linear):
    """dinov3's, whose mask starts as NaN."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("bias_mask", torch.full_like(self.bias, float("nan")))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias * self.bias_mask.to(self.bias.dtype))


class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        return x * self.gamma


class Drop(nn.Module):
    """Stochastic depth as dinov2 draws it."""

    def __init__(self, rate):
        super().__init__()
        self.drop_prob = rate

    def forward(self, x):
        if not self.training or self.drop_prob == 0:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep).div_(keep)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden=None):
        super().__init__()
        hidden = hidden or 2 * dim
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Gated(nn.Module):
    """w3(silu(w1 x) * w2 x), with the first two in one layer."""

    def __init__(self, dim):
        super().__init__()
        self.w12, self.w3 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        gate, up = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * up)


class SwiGLUFFN(nn.Module):
    """dinov3's, in two layers."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w3(F.silu(self.w1(x)) * self.w2(x))
