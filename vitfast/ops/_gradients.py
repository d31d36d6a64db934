"""Shared by the operations: schemas, masks of needed gradients, and derivatives.

Custom operations take and return tensors only: a gradient that nobody needs is an empty tensor there, None to autograd.
"""

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import only_once


class Needs(NamedTuple):
    """Which gradients of a LayerNorm or a linear layer are needed; to torch.library a list[bool]."""

    x: bool
    weight: bool
    bias: bool


_filling = threading.RLock()  # PyTorch's switch is one for all threads


def _unfilled(function: Callable) -> Callable:
    """`function` without the pass in which PyTorch's deterministic mode fills each new tensor with NaN.

    The kernels write every number of them.
    """

    @functools.wraps(function)
    def run(*arguments):
        if not torch.are_deterministic_algorithms_enabled():
            return function(*arguments)
        with _filling:
            before = torch.utils.deterministic.fill_uninitialized_memory
            torch.utils.deterministic.fill_uninitialized_memory = False
            try:
                return function(*arguments)
            finally:
                torch.utils.deterministic.fill_uninitialized_memory = before

    return run


def operation(name: str, arguments: str | None = None, outputs: int = 1):
    """Decorates a custom operation that takes `arguments` and returns so many tensors.

    Without `arguments` both are read from the function's annotations.
    """
    results = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    schema = None if arguments is None else f"({arguments}) -> {results}"
    register = torch.library.custom_op(f"vitfast::{name}", mutates_args=(), schema=schema)
    return lambda function: register(_unfilled(function))


def as_matrix(x: Tensor | None) -> Tensor | None:
    """(..., D) -> (M, D) with a unit last stride: a view where the strides allow one."""
    if x is None:
        return None
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def sample_rows(x: Tensor) -> int:
    """Rows of the matrix of x (B, ..., D) that share a drop path factor: one of (tokens, D)."""
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
    forward, backward, name: str, needs: type, *, only_all: tuple[str, ...] = (), passed_on: str = ""
) -> None:
    """Registers `backward`, and its fake, as the derivative of `forward`, once only.

    forward(...) -> (out, *kept), where kept is constant to autograd; backward(dout, ..., needs) -> a gradient for each
    field of needs, a NamedTuple type, handed over as a list: these are arguments of forward, the first that backward
    takes. Its others, tensors first, are found by name in the schemas: forward's own, and what else there is, the kept
    in their order. only_all: the kept that are None unless forward's `keep` is "all". passed_on: the argument of
    forward whose gradient is dout itself.
    """
    given = [argument.name for argument in forward._opoverload._schema.arguments]
    taken = {argument.name: str(argument.type) for argument in backward._opoverload._schema.arguments[1:-1]}
    outputs = [argument for argument in taken if argument not in given]
    tensors = [argument for argument, kind in taken.items() if "Tensor" in kind]
    options = [argument for argument in taken if argument not in tensors]

    def setup(ctx, inputs, output):
        kept = () if isinstance(output, Tensor) else output[1:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        values = {**dict(zip(given, inputs)), **dict(zip(outputs, kept))}
        if values.get("keep") != "all":
            values.update(dict.fromkeys(only_all))
        ctx.save_for_backward(*(values[argument] for argument in tensors))
        ctx.options = [values[argument] for argument in options]

    def differentiate(ctx, dout, *_):
        asked, gradients = dict(zip(given, ctx.needs_input_grad)), {}
        needed = [asked[argument] for argument in needs._fields]
        if dout is not None and any(needed):
            found = backward(dout, *ctx.saved_tensors, *ctx.options, needed)
            gradients = dict(zip(needs._fields, chosen(found, needed)))
        if asked.get(passed_on):
            gradients[passed_on] = dout
        return tuple(gradients.get(argument) for argument in given)

    backward.register_fake(lambda dout, *arguments: fake_gradients(arguments[-1], *arguments[: len(needs._fields)]))
    forward.register_autograd(differentiate, setup_context=setup)
    only_once(backward, name)
