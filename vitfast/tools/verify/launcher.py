"""One launcher of kernels/ with its inputs and its formula, and functions that lists of them share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import tiles
from ...kernels.tiles import KernelConfig
from .draw import Draw

Override = tuple[str, KernelConfig, str]  # an operation, its tile, a shape class


@dataclass(frozen=True)
class Launcher:
    """`call(*make(draw))` runs kernels; `formula` takes the same inputs, in any dtype.

    An input is what the kernels' launcher takes: a tensor, None, or a NamedTuple of tensors and other options.
    variant: a plainer launcher has the same tile. edge: its inputs do not occur in a training step of a plain ViT, and
    edges.py alone runs it.
    """

    make: Callable[[Draw], tuple]
    call: Callable
    formula: Callable
    variant: bool = False
    edge: bool = False


def outputs(result) -> list[Tensor]:
    """The tensors that a launcher or a formula returns, without the None and empty ones."""
    found = result if isinstance(result, tuple) else (result,)
    return [t for t in found if t is not None and t.numel()]


def candidates(used: Iterable[tuple[str, str, str]], dtype: torch.dtype, device: torch.device) -> Iterator[Override]:
    """Yields every other tile for the operations that were used.

    used: their (operation, bits, shape class), as tiles.using yields them.
    """
    for op, bits, shape in used:
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else dtype, device=device)
        yield from ((op, config, shape) for config in tiles.candidates(op, like, shape))


def wide(x: Tensor) -> torch.dtype:
    """The dtype float64 if x has it, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def gradients(function: Callable, leaves: tuple, upstream: Tensor | tuple) -> tuple[Tensor, ...]:
    """The gradient of every floating leaf, by autograd."""
    trained = lambda t: isinstance(t, Tensor) and t.is_floating_point()  # noqa: E731
    leaves = tuple(t.detach().requires_grad_() if trained(t) else t for t in leaves)
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), tuple(filter(trained, leaves)), upstream)
