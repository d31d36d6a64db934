"""Checks of arguments: each raises ValueError or TypeError, which names the operation."""

from numbers import Integral, Real

import torch
from torch import Tensor

from ..errors import both_ends
from . import reference as ref

# The dtypes that eager PyTorch computes in; its products have no smaller ones.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOAT32 = torch.finfo(torch.float32).max


def tensors(op: str, **tensors: Tensor) -> None:
    """Checks that every argument is a tensor; raises TypeError otherwise."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")


def rows(op: str, x: Tensor) -> int:
    """Checks that x is a tensor (..., D) and returns D."""
    tensors(op, x=x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must be (..., D), got ()")
    return x.shape[-1]


def floating(op: str, **tensors: Tensor | None) -> None:
    """Checks that every tensor, unless None, has a dtype that the operations compute in."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            known = "float16, bfloat16, float32 or float64"
            raise TypeError(f"{op}: {name} must be floating point ({known}), got {tensor.dtype}")


def shape(op: str, name: str, tensor: Tensor | None, shape: tuple, required: bool = False) -> None:
    """Checks a shape, in which a name or "*" matches any length; None passes unless `required`."""
    if tensor is None and not required:
        return
    tensors(op, **{name: tensor})
    lengths = [(have, want) for have, want in zip(tensor.shape, shape) if not isinstance(want, str)]
    if tensor.dim() != len(shape) or any(have != want for have, want in lengths):
        want = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{op}: {name} must be ({want}), got {tuple(tensor.shape)}")


def device(op: str, like: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Checks that every tensor, unless None, lies on this device, which is that of the argument `like`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{op}: {name} must be on {device} like {like}, got {tensor.device}")


def same(op: str, x_name: str, x: Tensor, **others: Tensor | None) -> None:
    """Checks that every tensor, unless None, has x's device and x's dtype."""
    floating(op, **{x_name: x})
    device(op, x_name, x.device, **others)
    for name, tensor in others.items():
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must be {x.dtype} like {x_name}, got {tensor.dtype}")


def norm(op: str, x: Tensor, width: int, **parameters: Tensor | None) -> None:
    """Checks that a norm's parameters (D,) lie on x's device, in x's dtype or in fp32."""
    for name, p in parameters.items():
        shape(op, name, p, (width,))
        if p is not None and (p.dtype != torch.float32 or p.device != x.device):
            same(op, "x", x, **{name: p})


def weight(op: str, x: Tensor, **weight: Tensor) -> tuple[int, int]:
    """Checks that a weight (F, D), given by its name, fits x (..., D); returns F and D."""
    width, ((name, weight),) = rows(op, x), weight.items()
    shape(op, name, weight, ("*", width), required=True)
    return weight.shape[0], width


def linear(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "", size: tuple | None = None
) -> None:
    """Checks that weight (F, D) and bias (F,) have x's dtype and fit x (..., D).

    prefix: what the arguments' names begin with. size: the weight's shape, where it is not to be (F, D) for x's D.
    """
    size = ("*", rows(op, x)) if size is None else size
    shape(op, f"{prefix}weight", weight, size, required=True)
    shape(op, f"{prefix}bias", bias, (weight.shape[0],))
    same(op, "x", x, **{f"{prefix}weight": weight, f"{prefix}bias": bias})


def factors(op: str, x: Tensor, layer_scale: Tensor | None, drop_path: Tensor | None, width: int) -> None:
    """Checks that layer_scale (D,) and drop_path (B,) lie on x's device, in any dtype of DTYPES."""
    shape(op, "layer_scale", layer_scale, (width,))
    shape(op, "drop_path", drop_path, (x.shape[0],))
    floating(op, layer_scale=layer_scale, drop_path=drop_path)
    device(op, "x", x.device, layer_scale=layer_scale, drop_path=drop_path)


def is_number(value) -> bool:
    """Whether value is a real number, NumPy's included, and no bool. Quick, as it runs at every call."""
    kind = type(value)
    if kind is float or kind is int:
        return True
    return isinstance(value, (torch.SymFloat, torch.SymInt)) or (isinstance(value, Real) and kind is not bool)


def as_whole(value) -> int | None:
    """A whole number of Python, NumPy or torch, as an int or a torch.SymInt; None for what is none."""
    if isinstance(value, torch.SymInt):
        return value
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def number(op: str, name: str, value, low: float = 0.0, want: str = f"a number from 0 to {FLOAT32:.1e}") -> float:
    """Checks a number from `low` to float32's largest, as `want` says; returns a float or SymFloat."""
    if not is_number(value) or not low <= value <= FLOAT32:
        raise ValueError(f"{op}: {name} must be {want}, got {value!r}")
    return value if isinstance(value, torch.SymFloat) else float(value)


def activation(op: str, activation: str) -> None:
    """Checks that `activation` names one; raises ValueError otherwise."""
    if not isinstance(activation, str) or activation not in ref.ACTIVATIONS:
        known = ", ".join(map(repr, ref.ACTIVATIONS))
        raise ValueError(f"{op}: activation must be one of {known}, got {activation!r}")


def counts(op: str, name: str, tensor: Tensor, where: torch.device) -> None:
    """Checks that a tensor is int32 or int64 and on the device of the operation's input."""
    tensors(op, **{name: tensor})
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")
    device(op, "its input", where, **{name: tensor})


def offsets(op: str, offsets: Tensor, tokens: int, device: torch.device) -> int | None:
    """Checks offsets (S + 1,) and returns the tokens of the longest sample.

    Their values are checked only where the host has them (ref.at_hand); otherwise None is returned.
    """
    counts(op, "offsets", offsets, device)
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"{op}: offsets must be (S + 1,), got {tuple(offsets.shape)}")
    if not ref.at_hand(offsets):
        return None
    if offsets[0] != 0 or offsets[-1] != tokens or bool((offsets.diff() < 0).any()):
        text = f"must rise from 0 to the {tokens} tokens, got {both_ends(str(offsets.tolist()), 80)}"
        raise ValueError(f"{op}: offsets {text}")
    return int(offsets.diff().max()) if len(offsets) > 1 else 0
