"""Stochastic depth (Huang et al., 2016): training leaves a half of a block out, for some samples."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.reference import owners
from .positions import TokenLayout


def sample_drop_path(x: Tensor, rate: float) -> Tensor:
    """(B,) factors: 0 with probability `rate`, else 1 / (1 - rate)."""
    keep = 1 - rate
    factors = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    return factors.bernoulli_(keep).div_(keep) if keep > 0 else factors.zero_()


class Subset(NamedTuple):
    """The samples on which a half of a block runs; others skip it (Oquab et al., 2023, DINOv2's code)."""

    rows: Tensor  # which samples of x (B, N, D), or which tokens of x (tokens, D)
    factors: Tensor  # one for each row: samples / samples kept
    layout: TokenLayout | None = None  # of the tokens that are kept


def _kept(count: int, rate: float) -> int:
    """How many of `count` samples are kept: at least one, but none at rate 1."""
    return max(1, int(count * (1 - rate))) if rate < 1 else 0


def draw_subset(x: Tensor, rate: float) -> Subset:
    """Draws random samples of x (B, N, D)."""
    kept = _kept(x.shape[0], rate)
    rows = torch.randperm(x.shape[0], device=x.device)[:kept]
    return Subset(rows, torch.full((kept,), x.shape[0] / max(1, kept), device=x.device))


def subset_of_packed(sizes: Tensor, layout: TokenLayout, rate: float) -> Subset:
    """Draws random samples of packed ones, without waiting for the device.

    sizes: how many tokens each sample has, (S,), on the CPU.
    """
    kept = torch.randperm(len(sizes))[: _kept(len(sizes), rate)].sort().values
    sizes, device = sizes[kept], layout.offsets.device
    tokens, offsets = int(sizes.sum()), torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    offsets, kept = (t.to(device, non_blocking=True) for t in (offsets.to(layout.offsets.dtype), kept))
    owner = owners(offsets, tokens)
    rows = torch.arange(tokens, device=device) + (layout.offsets[kept] - offsets[:-1])[owner]
    factors = torch.full((tokens,), len(layout.offsets[1:]) / max(1, len(kept)), device=device)
    return Subset(rows, factors, TokenLayout(offsets, layout.longest))


# torch.compiler.disable would import torch._dynamo at once, this does at the first call.
@torch._disable_dynamo  # it draws on the host, which knows how many tokens an image has
def subsets_of_packed(sizes: list[int], layout: TokenLayout, rates: list[float]) -> list[tuple[Subset | None, ...]]:
    """Draws the subsets of the two halves of each block, by the block's rate; None for rate 0."""
    draw = lambda rate: subset_of_packed(torch.tensor(sizes), layout, rate) if rate else None  # noqa: E731
    return [(draw(rate), draw(rate)) for rate in rates]
