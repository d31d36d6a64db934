"""One launcher of kernels/ with its inputs and its formula, and what the lists of them share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.configs import tiles
from ...kernels.configs.tiles import KernelConfig
from .draw import Draw

Override = tuple[str, KernelConfig, str]  # an operation, its tile, a shape class


@dataclass(frozen=True)
class Launcher:
    """`call(*make(draw))` runs kernels; `formula` takes the same inputs, in any dtype.

    variant: a plainer case has the same tile. edge: on inputs that a training step of a plain ViT does not give, for
    edges.py alone.
    """

    make: Callable[[Draw], tuple]
    call: Callable
    formula: Callable
    variant: bool = False
    edge: bool = False


def outputs(result) -> list[Tensor]:
    """The tensors of what a launcher or a formula returns, without those that were not asked for."""
    found = result if isinstance(result, tuple) else (result,)
    return [t for t in found if t is not None and t.numel()]


def candidates(used: Iterable[tuple[str, str, str]], dtype: torch.dtype, device: torch.device) -> Iterator[Override]:
    """Every other tile that could do what was `used`.

    used: (operation, bits, shape class), as tiles.using has it.
    """
    for op, bits, shape in used:
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else dtype, device=device)
        yield from ((op, config, shape) for config in tiles.candidates(op, like, shape))


def wide(x: Tensor) -> torch.dtype:
    """fp32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def gradients(function: Callable, leaves: tuple, upstream: Tensor | tuple) -> tuple[Tensor, ...]:
    """Of every leaf, by autograd."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, upstream)
