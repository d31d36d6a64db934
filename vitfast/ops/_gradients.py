"""Shared by the operations: schemas, masks of needed gradients, and derivatives.

Custom operations take and return tensors only: a gradient that nobody needs is an empty tensor there, None to autograd.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import only_once


class Needs(NamedTuple):
    """Which gradients of a LayerNorm or a linear layer are needed; to torch.library a list[bool]."""

    x: bool
    weight: bool
    bias: bool


def operation(name: str, arguments: str, outputs: int):
    """Decorates a custom operation that takes `arguments` and returns so many tensors."""
    schema = f"({arguments}) -> {'Tensor' if outputs == 1 else '(' + ', '.join(['Tensor'] * outputs) + ')'}"
    return torch.library.custom_op(f"vitfast::{name}", mutates_args=(), schema=schema)


def as_matrix(x: Tensor | None) -> Tensor | None:
    """(..., D) -> (M, D) with a unit last stride: a view where the strides allow one."""
    if x is None:
        return None
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def sample_rows(x: Tensor) -> int:
    """Rows of the matrix of x (B, ..., D) that share a drop path factor."""
    return max(1, x.shape[1:-1].numel())


def shaped(x: Tensor, *shape: int) -> Tensor:
    """x itself, freshly made, in another shape.

    Not a view of it: an operation's output that is one may not be changed in place, and FSDP2 warns.
    """
    return x.resize_(shape)


def filled(like: Tensor, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    """An empty tensor in the place of each None."""
    return tuple(like.new_empty(0) if g is None else g for g in gradients)


def chosen(gradients: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
    """The gradients that are needed, None in the place of the others."""
    return [g if need else None for g, need in zip(gradients, needs)]


def fake_gradients(needs: tuple[bool, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous gradients shaped and typed like what they belong to, empty where not needed."""
    like = tensors[0]
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else like.new_empty(0)
        for t, need in zip(tensors, needs)
    )


def as_dtype(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The gradient in its parameter's dtype."""
    return None if gradient is None else gradient.to(dtype)


def differentiable(
    forward,
    backward,
    name: str,
    needs: type,
    *,
    constants: int = 0,
    options: slice = slice(0),
    least: int | None = None,
) -> None:
    """Makes the operation `backward`, whose fake this registers, the derivative of `forward`, once only.

    forward(*tensors, *constants, ...) -> (out, *kept), where kept is constant to autograd;
    backward(dout, *tensors, *constants, *kept, *options, needs) -> a gradient for each of the tensors.
    needs: a NamedTuple type with a field for each of these tensors, handed over as a list. constants: how many tensors
    after them are saved and get no gradient. options: which of forward's arguments backward takes too. least: how many
    of kept are saved unless forward's last argument is "all"; None stands in the place of the others.
    """
    count = len(needs._fields)

    def setup(ctx, inputs, output):
        _, *kept = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        if least is not None and inputs[-1] != "all":
            kept[least:] = [None] * len(kept[least:])
        ctx.save_for_backward(*inputs[: count + constants], *kept)
        ctx.options = inputs[options]

    def differentiate(ctx, dout, *_):
        needed, unneeded = list(ctx.needs_input_grad[:count]), (None,) * (len(ctx.needs_input_grad) - count)
        if dout is None:
            return (None,) * count + unneeded
        return (*chosen(backward(dout, *ctx.saved_tensors, *ctx.options, needed), needed), *unneeded)

    backward.register_fake(lambda dout, *arguments: fake_gradients(arguments[-1], *arguments[:count]))
    forward.register_autograd(differentiate, setup_context=setup)
    only_once(backward, name)
