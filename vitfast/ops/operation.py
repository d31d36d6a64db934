"""Makes custom operations from the annotations of their arguments.

An operation lists its arguments once, in a NamedTuple, and what else its backward needs in another. Schemas, masks of
needed gradients, fake gradients and unpacking are made from the annotations of both.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..kernels import launch, tiles
from ..kernels.plans import MOST, Plan, recorded

Constant = Annotated[Tensor, "constant"]  # a tensor that never has a gradient
_TENSORS = (Tensor, Constant)
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
def _top_fields(arguments: type) -> list[_Field]:  # a NamedTuple in `arguments` is one field
    hints = [(name, hint, get_args(hint)) for name, hint in get_type_hints(arguments, include_extras=True).items()]
    return [_Field(name, *((of[0], True) if type(None) in of else (hint, False))) for name, hint, of in hints]


def _fields(arguments: type) -> list[_Field]:
    """The fields of a NamedTuple type, with those of a NamedTuple in it in place of that field."""
    nested = ([f] if not hasattr(f.kind, "_fields") else _fields(f.kind) for f in _top_fields(arguments))
    return list(itertools.chain.from_iterable(nested))


def _build(arguments: type, values: Iterator) -> Any:
    """A NamedTuple of this type from its next values, in the order of _fields."""
    kinds = [field.kind for field in _top_fields(arguments)]
    return arguments._make([_build(k, values) if hasattr(k, "_fields") else next(values) for k in kinds])


def flat(t: tuple) -> list:
    """The values of a NamedTuple in the order of _fields."""
    return [leaf for value in t for leaf in (flat(value) if isinstance(value, tuple) else (value,))]


def needs_grad(*values: Any) -> bool:
    """Whether backward may need the gradient of a tensor among these, for which forward keeps tensors."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def _plan_key(values: Sequence) -> tuple[tuple, torch.device | None]:
    """(all on which an operation's launches depend, which is no tensor's content; its tensors' device)."""
    key, device = [tiles.batch_invariant(), launch.fp32_precision(), tiles.state], None
    for x in values:
        if isinstance(x, Tensor):
            device = x.device
            key += x.dtype, x.shape, x.stride(), x.data_ptr() % 16, device
        else:
            key.append(tuple(x) if isinstance(x, list) else x)
    if torch._C._is_any_autocast_enabled():
        key += torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return tuple(key), device


def planned(run: Callable) -> Callable:
    """Decorates a function that returns new tensors; plans make all calls from the third of a kind on."""
    plans: dict[tuple, Plan | str | None] = {}  # None: met once; a text: why there can be none

    @functools.wraps(run)
    def call(*values):
        if launch.watched():
            return run(*values)
        key, device = _plan_key(values)
        plan = plans.get(key, "new")
        if plan is None:
            outputs, plans[key] = recorded(run, values)
            return outputs
        if plan == "new":
            if len(plans) >= MOST:
                plans.clear()
            plans[key] = None
        return run(*values) if isinstance(plan, str) or plan.hooked else plan(values, device)

    call.plans = plans
    return call


# The libraries of the operations by name, kept in torch: a file that is imported again defines its operations anew.
_LIBRARIES: dict[str, torch.library.Library] = vars(torch.ops.vitfast).setdefault("_libraries", {})
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


class Registered:
    """vitfast::name, an operation of PyTorch's dispatcher, which returns some new tensors.

    run: what it does on a CPU and on a GPU. fake: the same for tensors without values. autograd: its derivative, and
    the function that saves tensors for that or None, as torch.library.register_autograd takes them.
    """

    all: ClassVar[dict[str, "Registered"]] = {}

    def __init__(self, name: str, schemas: list[str], outputs: int, run: Callable, fake: Callable, *autograd: Callable):
        self.run, self.fake, results = run, fake, ", ".join(["Tensor"] * outputs)
        if name in _LIBRARIES:
            _LIBRARIES[name]._destroy()
        library = _LIBRARIES[name] = torch.library.Library("vitfast", "FRAGMENT")
        library.define(f"{name}({', '.join(schemas)}) -> ({results})", tags=torch.Tag.pt2_compliant_tag)
        for key in ("CPU", "CUDA"):
            library.impl(name, planned(run), key)
        torch.library.register_fake(f"vitfast::{name}", lambda *values: self.fake(*values), lib=library)
        differentiate, set_up = autograd
        torch.library.register_autograd(f"vitfast::{name}", differentiate, setup_context=set_up, lib=library)
        self.call = getattr(torch.ops.vitfast, name).default
        self.all[name] = self


def _overridden(values: tuple) -> bool:
    """Whether a tensor subclass, or a mode but a default device, may compute what autograd must see."""
    if not has_torch_function(values):
        return False
    modes = torch.overrides._get_current_function_mode_stack()
    return not modes or any(type(mode).__module__ != "torch.utils._device" for mode in modes)


class NothingSaved(NamedTuple):
    """The `saved` of an operation whose backward needs only the arguments."""


def _several(tensors: Sequence) -> Any:
    """The outputs as an operation returns them: a tuple, or one tensor on its own."""
    return tuple(tensors) if len(tensors) > 1 else tensors[0]


def _as_tuple(outputs: Any) -> tuple:
    """The tuple that `_several` was given."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


class custom_op:
    """vitfast::name and vitfast::name_backward, its derivative, as one function of `arguments`.

    arguments, saved: NamedTuple types. The fields of `arguments` are tensors, options and NamedTuples of these. Those
    of `saved` are tensors, None unless kept for backward. results: the outputs that have gradients, which a call
    returns; a field of `saved` by such a name is that output. In the dispatcher the operation returns them and the
    other fields of `saved`, which are constant to autograd.

    forward(t) -> (*results, saved), t of type `arguments`; fake(t) -> the same without values. backward(*douts, t,
    saved, needs) -> gradients by name, of which only the needed ones are read; needs has t's type, with a bool for each
    tensor, and one of several douts is None where nobody used that result. reads(t, needs) -> t with only what backward
    reads, so that the rest is not saved. ties(t) -> {argument: a result, or another argument}: the argument's gradient
    is that of the other, and backward does not compute it. An argument with a gradient that `reads` leaves out has
    the shape and dtype of the first field of `saved`.

    Eager code differentiates by an autograd.Function around the operation. It takes a fifth of the time of the
    derivative that is registered with PyTorch, which torch.compile and torch.export trace.
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
        ties: Callable[[Any], dict[str, str]] | None = None,
        results: tuple[str, ...] = ("out",),
    ):
        self.name, self.backward, self.reads, self.ties, self.results = name, backward, reads, ties, results
        self.arguments, self.saved = arguments, saved
        fields, kept = _fields(arguments), [field.name for field in _fields(saved)]
        self.taken, self.written = [f.name for f in fields], [i for i, name in enumerate(kept) if name not in results]
        tensors, options = ([f for f in fields if f.is_tensor is tensor] for tensor in (True, False))
        # The derivative takes douts, tensors, fields of `saved`, options and needs. The lists hold indices: those
        # of arguments with gradients, options, what is saved (in arguments + outputs), arguments (in the derivative).
        order, outputs = [*(f.name for f in tensors), *kept], [*results, *(kept[i] for i in self.written)]
        self.trained = [i for i, f in enumerate(fields) if f.kind is Tensor]
        self.options = [i for i, f in enumerate(fields) if not f.is_tensor]
        self.names = [*self.taken, *outputs]
        self.saves = [self.names.index(name) for name in order]
        self.at = [[*order, *(f.name for f in options)].index(name) for name in self.taken]
        self.saved_at = slice(len(tensors), len(order))
        run, fake = (functools.partial(self._forward, function) for function in (forward, fake))
        schemas, autograd = [f.schema for f in fields], (self._differentiate, self._set_up)
        self.operation = Registered(name, schemas, len(outputs), run, fake, *autograd)
        schemas = ["Tensor dout"] if len(results) == 1 else [f"Tensor? d{name}" for name in results]
        schemas += [*(f"Tensor? {name}" for name in order), *(f.schema for f in options), "bool[] needs"]
        functions = self._backward, self._fake_backward, self._refuse, None
        self.derivative = Registered(f"{name}_backward", schemas, len(self.trained), *functions)
        # Dynamo, which traces backward where autograd is compiled, takes functions and no methods.
        forward, backward = lambda *args: self._forward_eager(*args), lambda *args: self._differentiate(*args)
        eager = dict(forward=staticmethod(forward), backward=staticmethod(backward))
        self.function = type(name, (torch.autograd.Function,), eager)

    def __call__(self, t: NamedTuple) -> Any:
        """A Call with these arguments, which is yet to be made: `dispatch.routed` remembers and runs it."""
        return Call(self, flat(t))

    def run(self, *values) -> Any:
        """Runs the operation on the flat values of `arguments`; returns its results, a tensor or a tuple."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or _overridden(values):
            outputs = self.operation.call(*values)
        elif needs_grad(*values):
            return self.function.apply(*values)
        else:
            with _BelowAutograd():
                outputs = self.operation.call(*values)
        return _several(_as_tuple(outputs)[: len(self.results)])

    def build(self, values: Iterable) -> Any:
        """The NamedTuple `arguments` of these values, which are flat."""
        return _build(self.arguments, iter(values))

    def _forward(self, function: Callable, *values) -> Any:
        """The outputs of `function`, forward or its fake, with an empty tensor (_ABSENT) for each None."""
        *outs, saved = function(self.build(values))
        saved = flat(saved)
        return _several(outs + [outs[0].new_empty(_ABSENT) if saved[i] is None else saved[i] for i in self.written])

    def _forward_eager(self, ctx, *values) -> Any:
        with _BelowAutograd():
            outputs = _as_tuple(self.operation.call(*values))
        self._save(ctx, values, outputs)
        return _several(outputs[: len(self.results)])

    def _set_up(self, ctx, inputs, output) -> None:
        outputs = _as_tuple(output)
        ctx.mark_non_differentiable(*outputs[len(self.results) :])
        self._save(ctx, inputs, outputs)

    def _save(self, ctx, inputs: Sequence, outputs: tuple) -> None:
        ctx.set_materialize_grads(False)
        ties = {} if self.ties is None else self.ties(self.build(inputs))
        ctx.ties = [(self.names.index(name), self.names.index(other)) for name, other in ties.items()]
        if self.reads is not None:
            needs = self._flags([ctx.needs_input_grad[i] for i in self.trained])
            inputs = flat(self.reads(self.build(inputs), needs))
        values = [*inputs, *[None if x.dim() == len(_ABSENT) else x for x in outputs]]
        for i, _ in ctx.ties:
            values[i] = None
        ctx.save_for_backward(*[values[i] for i in self.saves])
        ctx.options = [inputs[i] for i in self.options]

    def _flags(self, needs: Sequence[bool]) -> NamedTuple:
        """`arguments` of bools: `needs` at the places in `trained`, False at all others."""
        flags = dict(zip(self.trained, needs))
        return self.build(flags.get(i, False) for i in range(len(self.taken)))

    def _differentiate(self, ctx, *douts) -> tuple[Tensor | None, ...]:
        douts = douts[: len(self.results)]
        grads = [*[None] * len(self.taken), *douts]  # of arguments, then of results, as ties count them
        wanted = [*ctx.needs_input_grad, *[False] * len(douts)]
        tied = [(i, other) for i, other in ctx.ties if wanted[i]]
        for i, other in tied:
            wanted[i], wanted[other] = False, True
        needs = [wanted[i] for i in self.trained]
        if any(needs) and any(dout is not None for dout in douts):
            inputs = *douts, *ctx.saved_tensors, *ctx.options, needs  # a checkpoint runs forward here, with autograd
            traced = torch.is_grad_enabled() or torch.compiler.is_compiling()
            with contextlib.nullcontext() if traced else _BelowAutograd():
                outputs = _as_tuple(self.derivative.call(*inputs))
            for i, gradient, need in zip(self.trained, outputs, needs):
                grads[i] = gradient if need else None
        for i, other in tied:
            grads[i] = grads[other]
        return tuple(grads[: len(self.taken)])

    def _backward(self, *values) -> Any:
        """The gradients of the arguments in `trained`, computed by backward; (0,) for those not needed."""
        douts, rest, needs = values[: len(self.results)], values[len(self.results) : -1], values[-1]
        t, saved = self.build(rest[i] for i in self.at), _build(self.saved, iter(rest[self.saved_at]))
        grads = self.backward(*douts, t, saved, self._flags(needs))
        dout = next(dout for dout in douts if dout is not None)
        return _several([grads[self.taken[i]] if need else dout.new_empty(0) for i, need in zip(self.trained, needs)])

    def _fake_backward(self, *values) -> Any:
        rest, needs = values[len(self.results) : -1], values[-1]
        dout = next(dout for dout in values if dout is not None)
        like = (rest[self.at[i]] if need else dout.new_empty(0) for i, need in zip(self.trained, needs))
        like = (rest[self.saved_at.start] if x is None else x for x in like)
        return _several([torch.empty(x.shape, dtype=x.dtype, device=dout.device) for x in like])

    def _refuse(self, ctx, *_):
        """Raises as the backward's own derivative: backward is written by hand, and has none."""
        # PyTorch's fused attention, which a model has besides this operation, cannot be differentiated twice either.
        math = "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        instead = f"a forward in use_kernels('off') inside {math} runs plain PyTorch, which can"
        raise RuntimeError(f"{self.name}: cannot be differentiated twice; {instead}")


class Call(NamedTuple):
    """A call of an operation that is still to be made."""

    operation: custom_op
    values: list

    def run(self) -> Any:
        """Makes the call and returns its results."""
        return self.operation.run(*self.values)


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
    """x itself, which must be new, resized in place to a shape of as many elements.

    The result is no view of x: a view that an operation returns may not be changed in place, and FSDP2 warns of it.
    """
    return x.resize_(shape)
