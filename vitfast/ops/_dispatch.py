"""Which implementation runs (kernels or ref), what autocast does to the arguments, and the checks every operation shares."""

import functools
import os

import torch
from torch import Tensor

MODES = ("auto", "on", "off")
_PARAMETERS = frozenset({"layer_scale", "drop_path"})  # factors: they act in fp32 and are never cast


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"use_kernels: mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


_mode = _checked(os.environ.get("VITFAST_KERNELS", "auto"))


class use_kernels:
    """Chooses between the kernels and plain PyTorch, as a setter or a context manager.

    "auto" (default): kernels where they can run, plain PyTorch elsewhere. "on": kernels, or an error that says why not.
    "off": plain PyTorch. The environment variable VITFAST_KERNELS sets the start value.
    """

    def __init__(self, mode: str):
        global _mode
        self.previous, _mode = _mode, _checked(mode)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        global _mode
        _mode = self.previous


def kernels_wanted(op: str, x: Tensor) -> bool:
    """True when the kernel of `op` is to run on x. Raises RuntimeError in mode "on" where there is none."""
    if _mode == "on":
        raise RuntimeError(f"{op}: kernels are switched on, and this version has no kernel for it; use_kernels('auto') runs plain PyTorch")
    return False


def autocasts(function):
    """Under autocast, casts the floating tensor arguments to the autocast dtype and runs `function` outside autocast."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        device = next(a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)

        def cast(a, name=""):
            wanted = isinstance(a, Tensor) and a.is_floating_point() and name not in _PARAMETERS
            return a.to(dtype) if wanted else a

        residual = kwargs.get("residual_in_fp32", False)
        with torch.autocast(device, enabled=False):
            first = args[:1] if residual else tuple(cast(a) for a in args[:1])
            return function(*first, *(cast(a) for a in args[1:]), **{k: cast(v, k) for k, v in kwargs.items()})

    return wrapper


def check_shape(op: str, name: str, tensor: Tensor | None, shape: tuple) -> None:
    """None passes; an int must match, None in `shape` matches any length."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != len(shape) or any(want is not None and have != want for have, want in zip(tensor.shape, shape)):
        want = ", ".join("*" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{op}: {name} must be ({want}), got {tuple(tensor.shape)}")


def check_same(op: str, x_name: str, x: Tensor, **others: Tensor | None) -> None:
    """Every given tensor lies on x's device in x's dtype."""
    if not x.is_floating_point():
        raise TypeError(f"{op}: {x_name} must be floating point, got {x.dtype}")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} like {x_name}, got {tensor.device}")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must be {x.dtype} like {x_name}, got {tensor.dtype}")


def check_factors(op: str, x: Tensor, layer_scale: Tensor | None, drop_path: Tensor | None, width: int) -> None:
    """layer_scale (D,) and drop_path (B,), on x's device, any floating dtype."""
    check_shape(op, "layer_scale", layer_scale, (width,))
    check_shape(op, "drop_path", drop_path, (x.shape[0],))
    for name, tensor in (("layer_scale", layer_scale), ("drop_path", drop_path)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} like x, got {tensor.device}")


def check_approximate(op: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
