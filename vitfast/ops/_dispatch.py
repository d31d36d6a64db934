"""Which implementation runs, what autocast casts, and the checks that the operations share."""

import contextlib
import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator
from numbers import Real

import torch
from torch import Tensor

from .. import interpreter, ref
from ..kernels.launch import INTERPRETED
from ._mode import current_mode

try:
    import triton  # noqa: F401
except ImportError as error:  # as on macOS and Windows: the operations are plain PyTorch there
    NO_TRITON = f"triton cannot be imported ({error})"
else:
    from ..kernels import tiles

    NO_TRITON = None

# Never cast: factors and LayerNorm's parameters act in fp32, whatever the products run in.
_KEPT = frozenset({"layer_scale", "drop_path", "norm_weight", "norm_bias", "inner_norm_weight", "inner_norm_bias"})

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float64)  # of plain PyTorch, whose products know no smaller ones
FLOAT32 = torch.finfo(torch.float32).max
_warned: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result  # Dynamo would trace through the cache behind it: 2.14 warns, 2.11 cannot
def _too_old(device: torch.device) -> bool:
    """Whether a GPU is older than any that there are kernels for."""
    return tiles.generation(device) == 0


def _unsupported_reason(x: Tensor, unsupported: str | None) -> str | None:
    """Why no kernel can run on x, None where one can."""
    if NO_TRITON is not None:
        return NO_TRITON
    if x.device.type == "cuda":
        if _too_old(x.device):
            return "the GPU is older than compute capability 8.0"
    elif x.device.type != "cpu" or not INTERPRETED:
        return f"tensors on {x.device.type} need TRITON_INTERPRET=1 before vitfast is imported"
    elif x.dtype == torch.bfloat16 and not interpreter.bfloat16_mended:
        return "Triton's interpreter computes bfloat16 wrongly (vitfast.interpreter.mend_bfloat16() mends it)"
    if x.dtype not in KERNEL_DTYPES:
        return f"no kernel computes in {x.dtype}"
    if ref.transformed():
        return "no kernel runs under torch.func's transforms or forward-mode differentiation"
    return unsupported


_counter: Counter | None = None


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Counts the operations that are called inside, by name, whatever does them."""
    global _counter
    before, _counter = _counter, Counter()
    try:
        yield _counter
    finally:
        _counter = before


def kernels_wanted(op: str, x: Tensor, unsupported: str | None = None) -> bool:
    """Whether the kernel of `op` is to run on x.

    unsupported: why no kernel covers the other arguments, if so. A CUDA case that no kernel covers runs plain PyTorch
    with one warning; in mode "on" it raises RuntimeError, as CPU tensors do outside the interpreter. Export
    (torch.export, ONNX) always traces plain PyTorch.
    """
    if _counter is not None:
        _counter[op] += 1
    # torch 2.11's Dynamo takes is_exporting() for true while it compiles; the flag behind it is right in every version.
    mode = current_mode()
    if mode == "off" or (mode == "auto" and x.device.type != "cuda") or torch.compiler._is_exporting_flag:
        return False
    reason = _unsupported_reason(x, unsupported)
    if reason is None:
        return True
    if mode == "on":
        raise RuntimeError(f"{op}: kernels are switched on, but {reason}; use_kernels('auto') runs plain PyTorch there")
    if not torch.compiler.is_compiling() and (op, reason) not in _warned:
        _warned.add((op, reason))
        warnings.warn(f"vitfast {op}: {reason}; plain PyTorch runs in its place", stacklevel=4)
    return False


def reason_for_plain(weight: Tensor) -> str | None:
    """Why operations with a weight like this run plain PyTorch now; None where they run kernels."""
    mode = current_mode()
    if mode == "off":
        return "use_kernels('off')"
    if mode == "auto" and weight.device.type != "cuda":
        return f"the weights are on {weight.device.type}"
    return _unsupported_reason(weight, None)


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when backward may be asked for any of these: what it needs must be kept."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def only_once(backward_op, name: str) -> None:
    """Makes a second differentiation raise: the backward is written out by hand and has none of its own."""

    def refuse(ctx, *grads):
        # PyTorch's fused attention, which a model has besides this operation, cannot be differentiated twice either.
        math = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        instead = f"a forward in use_kernels('off') inside {math} runs plain PyTorch, which can"
        raise RuntimeError(f"{name}: cannot be differentiated twice; {instead}")

    backward_op.register_autograd(refuse)


def autocasts(function=None, *, keep: tuple[str, ...] = ()):
    """Runs `function` outside autocast, on arguments cast to its dtype but for those in `keep`."""
    if function is None:
        return functools.partial(autocasts, keep=keep)
    names, kept = tuple(inspect.signature(function).parameters), _KEPT.union(keep)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "meta")
        if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for meta
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        stream = names[0] if kwargs.get("residual_in_fp32", False) else None

        def cast(name, a):
            floating = isinstance(a, Tensor) and a.is_floating_point()
            return a.to(dtype) if floating and name not in kept and name != stream else a

        with torch.autocast(device, enabled=False):
            # Too many arguments are for the function to refuse.
            given = [cast(names[i] if i < len(names) else "", a) for i, a in enumerate(args)]
            return function(*given, **{name: cast(name, a) for name, a in kwargs.items()})

    return wrapper


def check_tensors(op: str, **tensors: Tensor) -> None:
    """Every argument is a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")


def check_rows(op: str, x: Tensor) -> int:
    """The width of x (..., D)."""
    check_tensors(op, x=x)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must be (..., D), got ()")
    return x.shape[-1]


def check_floating(op: str, name: str, tensor: Tensor | None) -> None:
    """A given tensor has a dtype that the operations compute in."""
    if tensor is not None and tensor.dtype not in DTYPES:
        known = "float16, bfloat16, float32 or float64"
        raise TypeError(f"{op}: {name} must be floating point ({known}), got {tensor.dtype}")


def check_shape(op: str, name: str, tensor: Tensor | None, shape: tuple) -> None:
    """None passes; an int must match, None in `shape` matches any length."""
    if tensor is None:
        return
    check_tensors(op, **{name: tensor})
    if tensor.dim() != len(shape) or any(want is not None and have != want for have, want in zip(tensor.shape, shape)):
        want = ", ".join("*" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{op}: {name} must be ({want}), got {tuple(tensor.shape)}")


def check_same(op: str, x_name: str, x: Tensor, **others: Tensor | None) -> None:
    """Every given tensor lies on x's device in x's dtype."""
    check_floating(op, x_name, x)
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} like {x_name}, got {tensor.device}")
        if tensor.dtype != x.dtype:
            raise TypeError(f"{op}: {name} must be {x.dtype} like {x_name}, got {tensor.dtype}")


def check_norm(op: str, x: Tensor, **parameters: Tensor | None) -> None:
    """LayerNorm's parameters lie on x's device, in x's dtype or in fp32."""
    for name, p in parameters.items():
        if p is not None and (p.dtype != torch.float32 or p.device != x.device):
            check_same(op, "x", x, **{name: p})


def check_linear(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    """A weight (F, D) and a bias (F,) that fit x (..., D). prefix: of their names."""
    width = check_rows(op, x)
    check_tensors(op, **{f"{prefix}weight": weight})
    check_shape(op, f"{prefix}weight", weight, (None, width))
    check_shape(op, f"{prefix}bias", bias, (weight.shape[0],))
    check_same(op, "x", x, **{f"{prefix}weight": weight, f"{prefix}bias": bias})


def check_factors(op: str, x: Tensor, layer_scale: Tensor | None, drop_path: Tensor | None, width: int) -> None:
    """layer_scale (D,) and drop_path (B,), on x's device, in any dtype of DTYPES."""
    check_shape(op, "layer_scale", layer_scale, (width,))
    check_shape(op, "drop_path", drop_path, (x.shape[0],))
    for name, tensor in (("layer_scale", layer_scale), ("drop_path", drop_path)):
        check_floating(op, name, tensor)
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{op}: {name} must be on {x.device} like x, got {tensor.device}")


def is_number(value) -> bool:
    """A real number, NumPy's too, and no truth value. The common types first: this runs at every launch."""
    kind = type(value)
    if kind is float or kind is int:
        return True
    return isinstance(value, (torch.SymFloat, torch.SymInt)) or (isinstance(value, Real) and kind is not bool)


def check_eps(op: str, eps: float, name: str = "eps") -> float:
    """The eps of a norm, as Python's or torch's own number."""
    if not is_number(eps) or not 0 <= eps <= FLOAT32:
        raise ValueError(f"{op}: {name} must be a number from 0 to {FLOAT32:.1e}, got {eps!r}")
    return eps if isinstance(eps, torch.SymFloat) else float(eps)


def check_flag(op: str, name: str, value: bool) -> None:
    if value is not True and value is not False:
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}")


def check_activation(op: str, activation: str) -> None:
    """activation names one."""
    if not isinstance(activation, str) or activation not in ref.ACTIVATIONS:
        known = ", ".join(map(repr, ref.ACTIVATIONS))
        raise ValueError(f"{op}: activation must be one of {known}, got {activation!r}")


def one_activation(op: str, activation: str | None, approximate: str | None) -> str:
    """The activation's one name, "gelu" unless given; approximate: torch's word for a GELU."""
    if approximate not in (None, "none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
    named = "gelu_tanh" if approximate == "tanh" else "gelu"
    if activation is None:
        return named
    check_activation(op, activation)
    if approximate is not None and activation != named:
        clash = f"approximate={approximate!r} means activation={named!r}, and activation={activation!r} is given too"
        raise ValueError(f"{op}: {clash}; give one of the two")
    return activation


def check_norm_kind(op: str, norm: str, norm_bias: Tensor | None) -> None:
    """norm "layer" or "rms", which has no bias."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"{op}: norm must be 'layer' or 'rms', got {norm!r}")
    if norm == "rms" and norm_bias is not None:
        raise ValueError(f"{op}: norm_bias must be None where norm is 'rms', which has no bias")
