"""Checks of arguments: each raises ValueError or TypeError, which names the operation."""

from numbers import Integral, Real
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import Activation

Approximate = Literal["none", "tanh"]  # the kinds of GELU, in torch's words

# The dtypes that eager PyTorch computes in; its products have no smaller ones.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FLOAT32 = torch.finfo(torch.float32).max


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) or forward-mode differentiation is at work."""
    if forward_ad._current_level >= 0:
        return True
    # Dynamo would always answer yes to the second question; the transforms that it traces raise where they must.
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def at_hand(offsets: Tensor) -> bool:
    """Whether the host may read the values now: a plain Tensor on the CPU, while nothing is compiled."""
    return offsets.device.type == "cpu" and not torch.compiler.is_compiling() and type(offsets) is Tensor


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
            dtypes = "float16, bfloat16, float32 or float64"
            raise TypeError(f"{op}: {name} must be floating point ({dtypes}), got {tensor.dtype}")


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

    prefix: what the arguments' names begin with. size: the weight's shape, by default (F, D) for any F and x's D.
    """
    size = ("*", rows(op, x)) if size is None else size
    shape(op, f"{prefix}weight", weight, size, required=True)
    shape(op, f"{prefix}bias", bias, (weight.shape[0],))
    same(op, "x", x, **{f"{prefix}weight": weight, f"{prefix}bias": bias})


def factors(op: str, x: Tensor, layer_scale: Tensor | None, drop_path: Tensor | None, width: int) -> None:
    """Checks that layer_scale (width,) and drop_path (B,) lie on x's device, in any dtype of DTYPES."""
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
    """Checks a number from `low` to float32's largest (`want` in the error); returns a float or SymFloat."""
    if not is_number(value) or not low <= value <= FLOAT32:
        raise ValueError(f"{op}: {name} must be {want}, got {value!r}")
    return value if isinstance(value, torch.SymFloat) else float(value)


def activation(op: str, activation: str) -> None:
    """Checks that `activation` names one; raises ValueError otherwise."""
    if not isinstance(activation, str) or activation not in get_args(Activation):
        names = ", ".join(map(repr, get_args(Activation)))
        raise ValueError(f"{op}: activation must be one of {names}, got {activation!r}")


def one_activation(op: str, name: str | None, approximate: str | None) -> str:
    """The activation's name, "gelu" unless given; approximate: torch's word for the kind of GELU."""
    if approximate not in (None, "none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
    by_kind = "gelu_tanh" if approximate == "tanh" else "gelu"
    if name is None:
        return by_kind
    activation(op, name)
    if approximate is not None and name != by_kind:
        clash = f"approximate={approximate!r} means activation={by_kind!r}, and activation={name!r} is given too"
        raise ValueError(f"{op}: {clash}; give one of the two")
    return name
