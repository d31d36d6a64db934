"""Makes custom operations from the annotations of their arguments.

An operation lists its arguments once, in a NamedTuple, and what else its backward needs in another. Schemas, masks of
needed gradients, fake gradients and unpacking are made from the annotations of both.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

# Annotations of tensors for which backward computes no gradient: a Constant never has one, and the gradient of a
# PassedOn is the output's own.
Constant = Annotated[Tensor, "constant"]
PassedOn = Annotated[Tensor, "passed on"]
_TENSORS = (Tensor, Constant, PassedOn)
_SCHEMAS = {int: "SymInt", float: "float", bool: "bool", str: "str", list[float]: "float[]", list[bool]: "bool[]"}
_ABSENT = (0,) * 6  # the shape that stands for None where an operation must return a tensor: no true one has six axes


class _Field(NamedTuple):
    """A field of a NamedTuple of arguments."""

    name: str
    kind: object  # of _TENSORS or _SCHEMAS, or a NamedTuple type
    optional: bool

    @property
    def is_tensor(self) -> bool:
        return self.kind in _TENSORS

    @property
    def schema(self) -> str:
        return f"{'Tensor' if self.is_tensor else _SCHEMAS[self.kind]}{'?' * self.optional} {self.name}"


@functools.cache
def _own_fields(arguments: type) -> list[_Field]:
    found = []
    for name, hint in get_type_hints(arguments, include_extras=True).items():
        optional = type(None) in get_args(hint)
        found.append(_Field(name, get_args(hint)[0] if optional else hint, optional))
    return found


def _fields(arguments: type) -> list[_Field]:
    """The fields of a NamedTuple, those of NamedTuples in it included: an operation's arguments."""
    parts = ([f] if not hasattr(f.kind, "_fields") else _fields(f.kind) for f in _own_fields(arguments))
    return [field for part in parts for field in part]


@functools.cache
def _builder(arguments: type) -> Callable[[Iterable], tuple]:
    """A function that makes a NamedTuple of this type from its values, in the order of _fields."""
    inner = [(i, f.kind) for i, f in enumerate(_own_fields(arguments)) if hasattr(f.kind, "_fields")]
    parts = [(i, i + len(_fields(kind)), _builder(kind)) for i, kind in inner]

    def build(values: Iterable):
        values = list(values)
        for start, end, part in parts:  # from left to right, so that what comes before is one value each
            values[start:end] = [part(values[start:end])]
        return arguments._make(values)

    return build


def flat(t: tuple) -> list:
    """The values of a NamedTuple in the order of _fields."""
    parts = (flat(value) if isinstance(value, tuple) else [value] for value in t)
    return [value for part in parts for value in part]


def tensors_of(t: tuple) -> list[Tensor]:
    """All tensors of a NamedTuple of arguments."""
    return [value for value in flat(t) if isinstance(value, Tensor)]


def register(name: str, arguments: type | list[str], outputs: int, run: Callable, fake: Callable):
    """Makes the custom operation vitfast::name, which returns `outputs` tensors.

    arguments: a NamedTuple type whose fields are its arguments, or a list of schemas. run, fake: its implementations.
    """
    schemas = arguments if isinstance(arguments, list) else [field.schema for field in _fields(arguments)]
    results = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    schema = f"({', '.join(schemas)}) -> {results}"
    made = torch.library.custom_op(f"vitfast::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made


class NothingSaved(NamedTuple):
    """The `saved` of an operation whose backward needs only the arguments."""


def _several(tensors: tuple):
    """The outputs as an operation returns them: a tuple, or one tensor on its own."""
    return tensors if len(tensors) > 1 else tensors[0]


class custom_op:
    """vitfast::name and vitfast::name_backward, its derivative, as one function of `arguments`.

    arguments, saved: NamedTuple types. The fields of `arguments` are tensors, options and NamedTuples of these. Those
    of `saved` are tensors, None unless kept for backward; one named `out` is the output itself. The operation returns
    the output, followed by the other fields of `saved`, which are constant to autograd.

    forward(t) -> (out, saved), t of type `arguments`; fake(t) -> the same without values. backward(dout, t, saved,
    needs) -> gradients by name, of which only the needed ones are read; needs has t's type, with a bool for each
    tensor. reads(t, needs) -> t with only what backward reads, so that the rest is not saved.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        saved: type,
        *,
        forward: Callable,
        fake: Callable,
        backward: Callable,
        reads: Callable | None = None,
    ):
        self.saved, self.backward, self.reads, self.build = saved, backward, reads, _builder(arguments)
        taken, self.kept = _fields(arguments), [field.name for field in _fields(saved)]
        self.taken, self.written = [f.name for f in taken], [name for name in self.kept if name != "out"]
        self.tensors = [*(field.name for field in taken if field.is_tensor), *self.kept]
        self.options = [field.name for field in taken if not field.is_tensor]
        self.trained = [field.name for field in taken if field.kind is Tensor]
        self.passed_on = [field.name for field in taken if field.kind is PassedOn]
        run, fake = (functools.partial(self._forward, function) for function in (forward, fake))
        self.operation = register(name, arguments, 1 + len(self.written), run, fake)
        schemas = [f"Tensor? {name}" for name in self.tensors] + [f.schema for f in taken if not f.is_tensor]
        schemas, made = ["Tensor dout", *schemas, "bool[] needs"], len(self.trained)
        self.derivative = register(f"{name}_backward", schemas, made, self._backward, self._fake_backward)
        self.operation.register_autograd(self._differentiate, setup_context=self._save)
        only_once(self.derivative, name)

    def __call__(self, t: NamedTuple) -> Any:  # a tensor, or a tuple of them
        return self.operation(*flat(t))

    def _forward(self, function: Callable, *values):
        """The outputs of forward or of its fake; an empty tensor of shape _ABSENT stands for each None."""
        out, held = function(self.build(values))
        held = dict(zip(self.kept, flat(held)))
        return _several((out, *(out.new_empty(_ABSENT) if held[n] is None else held[n] for n in self.written)))

    def _save(self, ctx, inputs, output) -> None:
        out, *more = output if self.written else (output,)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*more)
        if self.reads is not None:
            needs = self._needs(dict(zip(self.taken, ctx.needs_input_grad)))
            inputs = flat(self.reads(self.build(inputs), needs))
        more = [None if x.dim() == len(_ABSENT) else x for x in more]
        values = dict(zip((*self.taken, *self.written), (*inputs, *more)), out=out) | dict.fromkeys(self.passed_on)
        ctx.save_for_backward(*(values[name] for name in self.tensors))
        ctx.options = [values[name] for name in self.options]

    def _needs(self, flags: dict[str, bool]) -> NamedTuple:
        """Whether the gradient of each argument is needed; False for those that have none."""
        return self.build([name in self.trained and flags[name] for name in self.taken])

    def _differentiate(self, ctx, dout, *_):
        asked, found = dict(zip(self.taken, ctx.needs_input_grad)), {}
        needs = [asked[name] for name in self.trained]
        if dout is not None and any(needs):
            grads = self.derivative(dout, *ctx.saved_tensors, *ctx.options, needs)
            grads = grads if len(needs) > 1 else (grads,)
            found = {name: gradient for name, gradient, need in zip(self.trained, grads, needs) if need}
        found |= {name: dout for name in self.passed_on if asked[name]}
        return tuple(found.get(name) for name in self.taken)

    def _backward(self, dout, *values):
        """The gradients of the tensors that have one from backward, each empty (0,) unless needed."""
        values, needs = dict(zip((*self.tensors, *self.options), values)), dict(zip(self.trained, values[-1]))
        t = self.build(values[name] for name in self.taken)
        held = _builder(self.saved)(values[name] for name in self.kept)
        found = self.backward(dout, t, held, self._needs(needs))
        return _several(tuple(found[name] if need else dout.new_empty(0) for name, need in needs.items()))

    def _fake_backward(self, dout, *values):
        values, needs = dict(zip(self.tensors, values)), dict(zip(self.trained, values[-1]))
        like = (values[name] if need else dout.new_empty(0) for name, need in needs.items())
        return _several(tuple(torch.empty(x.shape, dtype=x.dtype, device=dout.device) for x in like))


def only_once(backward_op, name: str) -> None:
    """Makes a second differentiation raise: the backward is written out by hand and has none of its own."""

    def refuse(ctx, *grads):
        # PyTorch's fused attention, which a model has besides this operation, cannot be differentiated twice either.
        math = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        instead = f"a forward in use_kernels('off') inside {math} runs plain PyTorch, which can"
        raise RuntimeError(f"{name}: cannot be differentiated twice; {instead}")

    backward_op.register_autograd(refuse)


def as_matrix(x: Tensor | None) -> Tensor | None:
    """(..., D) -> (M, D) with a unit last stride: a view where the strides allow one."""
    if x is None:
        return None
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, x.shape[-1])


def sample_rows(x: Tensor) -> int:
    """How many rows of x (B, ..., D), as a matrix, share a drop path factor; 1 for x (tokens, D)."""
    return max(1, x.shape[1:-1].numel())


def resized(x: Tensor, *shape: int) -> Tensor:
    """x itself, freshly made, in another shape.

    The result is no view of x: a view that an operation returns may not be changed in place, and FSDP2 warns of it.
    """
    return x.resize_(shape)


def meta_like(x: Tensor | None) -> Tensor | None:
    """A tensor of x's shape, dtype and device, for backward to read these from; it holds one number."""
    return None if x is None else x.new_empty(()).expand(x.shape)


def as_dtype(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The gradient in its parameter's dtype."""
    return None if gradient is None else gradient.to(dtype)
