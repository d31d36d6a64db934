"""Shared by the operations: checks of arguments, schemas, masks of needed gradients, and derivatives.

Custom operations take and return tensors only: a gradient that nobody needs is an empty tensor there, None to autograd.
"""

import functools
import threading
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import both_ends
from . import reference as ref

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
)  # of plain PyTorch, whose products know no smaller ones
FLOAT32 = torch.finfo(torch.float32).max


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


def only_once(backward_op, name: str) -> None:
    """Makes a second differentiation raise: the backward is written out by hand and has none of its own."""

    def refuse(ctx, *grads):
        # PyTorch's fused attention, which a model has besides this operation, cannot be differentiated twice either.
        math = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        instead = f"a forward in use_kernels('off') inside {math} runs plain PyTorch, which can"
        raise RuntimeError(f"{name}: cannot be differentiated twice; {instead}")

    backward_op.register_autograd(refuse)


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


def check_offsets(op: str, offsets: Tensor, tokens: int, device: torch.device) -> int | None:
    """Tokens of the longest sample of offsets (S + 1,); None where the host would have to wait for that.

    Their values are checked on the CPU alone.
    """
    check_tensors(op, offsets=offsets)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.device != device:
        raise ValueError(f"{op}: offsets must be on {device} like its input, got {offsets.device}")
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"{op}: offsets must be (S + 1,), got {tuple(offsets.shape)}")
    if not ref.at_hand(offsets):
        return None
    if offsets[0] != 0 or offsets[-1] != tokens or bool((offsets.diff() < 0).any()):
        text = f"must rise from 0 to the {tokens} tokens, got {both_ends(str(offsets.tolist()), 80)}"
        raise ValueError(f"{op}: offsets {text}")
    return int(offsets.diff().max()) if len(offsets) > 1 else 0
