"""One launcher of kernels/ with its inputs and its formula, and functions that lists of them share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .draw import Draw

EPS = 1e-6  # of norms


@dataclass(frozen=True)
class Launcher:
    """`call(*make(draw))` runs kernels; `formula` takes the same inputs, in any dtype.

    An input is what the kernels' launcher takes: a tensor, None, or a NamedTuple of tensors and other options.
    """

    make: Callable[[Draw], tuple]
    call: Callable
    formula: Callable


def outputs(result) -> list[Tensor]:
    """The tensors that a launcher or a formula returns, without the None and empty ones."""
    found = result if isinstance(result, tuple) else (result,)
    return [t for t in found if t is not None and t.numel()]


def wide(x: Tensor) -> torch.dtype:
    """The dtype float64 if x has it, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def gradients(function: Callable, leaves: tuple, upstream: Tensor | tuple) -> tuple[Tensor, ...]:
    """The gradient of every floating leaf, by autograd."""
    trained = lambda t: isinstance(t, Tensor) and t.is_floating_point()  # noqa: E731
    leaves = tuple(t.detach().requires_grad_() if trained(t) else t for t in leaves)
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), tuple(filter(trained, leaves)), upstream)
