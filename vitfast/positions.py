"""Position embeddings: the fixed 2-D sine-cosine table, and the 2-D resampling that a change of resolution needs."""

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]


def sincos_2d(grid: Grid, dim: int, prefix: int = 0, temperature: float = 10_000.0) -> Tensor:
    """Fixed positions (1, prefix + h*w, dim) in fp32, zeros for prefix tokens.

    As in "Better plain ViT baselines for ImageNet-1k" (Beyer et al., 2022): [sin x, cos x, sin y, cos y], dim/4 frequencies each,
    from 1 to 1/temperature. Raises ValueError where dim is no multiple of 4, or below 8.
    """
    if dim % 4 or dim < 8:
        raise ValueError(f"sine-cosine positions need a width that is a multiple of 4 and at least 8, got {dim}")
    y, x = torch.meshgrid(torch.arange(grid[0], dtype=torch.float64), torch.arange(grid[1], dtype=torch.float64), indexing="ij")
    omega = temperature ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1))
    x, y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    table = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)
    return torch.cat([table.new_zeros(prefix, dim), table])[None].float()


def resample(pos_embed: Tensor, old: Grid, new: Grid, prefix: int = 0) -> Tensor:
    """Positions (1, prefix + h*w, D) of an `old` (h, w) grid -> those of a `new` one, prefix positions untouched.

    Bicubic with antialias, in fp32 whatever the dtype, which is kept (the ViT paper, 3.2; the filter is timm's).
    """
    if tuple(old) == tuple(new):
        return pos_embed
    if pos_embed.shape[1] != prefix + old[0] * old[1]:
        raise ValueError(f"resample: pos_embed must have {prefix} + {old[0]} x {old[1]} positions, got {pos_embed.shape[1]}")
    first, table = pos_embed[:, :prefix], pos_embed[:, prefix:]
    table = table.float().unflatten(1, old).permute(0, 3, 1, 2)
    table = F.interpolate(table, size=new, mode="bicubic", antialias=True)
    return torch.cat([first, table.flatten(2).transpose(1, 2).to(pos_embed.dtype)], dim=1)
