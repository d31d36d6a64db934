"""What the operations' backwards share: custom operations take and return tensors only, rows are 2-D with a unit last stride."""

import torch
from torch import Tensor


def rows(x: Tensor | None) -> Tensor | None:
    """(..., D) -> (M, D) with a unit last stride: a view where the strides allow one."""
    if x is None:
        return None
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def shaped(x: Tensor, *shape: int) -> Tensor:
    """x itself, freshly made, in another shape. Not a view of it: an operation's output that is one may not be changed in place, and FSDP2 warns."""
    return x.resize_(shape)


def filled(like: Tensor, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    """An empty tensor in the place of each None."""
    return tuple(like.new_empty(0) if g is None else g for g in gradients)


def chosen(gradients: tuple[Tensor, ...], needed: list[bool]) -> list[Tensor | None]:
    """The gradients that were asked for, None in the place of the others."""
    return [g if need else None for g, need in zip(gradients, needed)]


def fake_gradients(needed: list[bool], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous gradients shaped and typed like what they belong to, empty where not needed."""
    like = tensors[0]
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need else like.new_empty(0)
        for t, need in zip(tensors, needed)
    )


def as_dtype(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The gradient in its parameter's dtype."""
    return None if gradient is None else gradient.to(dtype)
