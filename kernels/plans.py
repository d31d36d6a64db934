"""Plans: recordings by which an operation that has run before makes its launches at less cost.

What the code of an operation does (configurations, grids, views, sizes of outputs) depends on the shapes, strides,
dtypes and alignment of its arguments, not on what is in them. When it is called with such arguments for the second
time, a Recorder writes down which operations of PyTorch and which launches it makes. From the third call on a plan
makes them: straight-line code in which all else is a constant. A launch takes addresses, so a view that only launches
read is an address and a number of bytes; a descriptor is kept for each address; a tensor is freed after its last use.

The operation's code itself runs while anything watches launches (Triton's hooks and profilers, `recording`), and always
where an operation reads the contents of a tensor. Each `tiles.using` has plans of its own.
"""

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import launch
from .launch import INTERPRETED, Launch

MOST = 256  # plans of an operation, and addresses of a descriptor: packed samples have other sizes at every step
aten = torch.ops.aten
# PyTorch's own functions take less of the host's time than the overloads that a Recorder sees.
_QUICK = {
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.addmm_.default: Tensor.addmm_,
    aten.t.default: torch.t,
    aten.view.default: Tensor.view,
    aten.unbind.int: torch.unbind,
    aten.sum.dim_IntList: torch.sum,
    aten.cat.default: torch.cat,
    aten.mul.Tensor: torch.mul,
    aten.resize_.default: Tensor.resize_,
}
_EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default)


class _Address(int):
    """The address of a tensor, which a descriptor keeps in place of it, so as not to hold its memory."""

    def data_ptr(self) -> int:
        return self


class _Descriptors(dict):
    """Address -> descriptor, for one argument of a launch; the other fields are copied from `first`."""

    def __init__(self, first: object):
        super().__init__()
        self.kind, self.fields = type(first), {**vars(first), "base": None}

    def of(self, base: int | Tensor) -> object:
        descriptor = object.__new__(self.kind)
        vars(descriptor).update(self.fields, base=base)
        return descriptor

    def __missing__(self, address: int) -> object:
        if len(self) >= MOST:
            self.clear()
        descriptor = self[address] = self.of(_Address(address))
        return descriptor


class Plan(NamedTuple):
    """`run` (*arguments, stream) does what an operation does; `kernels` are those that it launches."""

    run: Callable
    kernels: tuple
    launches: int

    @property
    def hooked(self) -> bool:
        """Whether somebody hooks a kernel, which then must be launched by Triton itself."""
        return any(kernel.pre_run_hooks for kernel in self.kernels)

    def __call__(self, values: Sequence, device: torch.device) -> Tensor | tuple[Tensor, ...]:
        """The results of the operation for these arguments, on the current stream of the device."""
        launch.count(self.launches)
        with launch.on(device):
            return self.run(*values, _stream(device))


def _stream(device: torch.device):
    """The current stream, as Triton takes it; None in its interpreter."""
    if INTERPRETED:
        return None
    from triton.runtime import driver

    return driver.active.get_current_stream(device.index)


class Recorder(TorchDispatchMode):
    """Writes the source of a plan while an operation runs.

    Tensors are t0, t1, ..., first the operation's arguments; the address of a tensor that is no view is p0, p1, ...;
    constants are c0, c1, ... `reason` says why there can be no plan.
    """

    def __init__(self, values: Sequence):
        super().__init__()
        self.reason: str | None = None
        self.numbers: dict[int, tuple[int, weakref.ref]] = {}  # by id, which another may get when a tensor is freed
        self.roots: list[tuple[int, int]] = []  # by number: (the number of the viewed tensor, offset in bytes)
        # names that a line defines, its expression, and whether it may be left out where nothing reads them
        self.lines: list[tuple[list[str], str, bool]] = []
        self.constants: dict[str, object] = {}
        self.kernels: dict[object, None] = {}
        self.launches = 0
        for x in values:
            if isinstance(x, Tensor):
                if self._number(x) is not None:
                    self.reason = "two arguments are one tensor"
                self._add(x)
            else:
                self.roots.append((-1, 0))
        self.arguments = len(values)

    # ---- what is recorded

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with launch.taped(None):  # the plan calls `function`, which launches these again
            outputs = function(*args, **kwargs)
        tensors, inputs = list(_tensors([outputs])), list(_tensors((args, kwargs.values())))
        texts = [self._text(x) for x in args] + [f"{name}={self._text(x)}" for name, x in kwargs.items()]
        call = f"{self._constant(_QUICK.get(function, function))}({', '.join(texts)})"
        names, optional = [], False
        if not tensors or len(tensors) != (len(outputs) if isinstance(outputs, (tuple, list)) else 1):
            self.reason = f"{function} reads what is in a tensor"
        elif function in _EMPTY:
            options = f"dtype={self._constant(outputs.dtype)}, device={self._constant(outputs.device)}"
            call = f"empty({tuple(outputs.shape)}, {outputs.stride()}, {options})"
            names, optional = [self._add(outputs)], True
        elif not any(x is y for x in tensors for y in inputs):  # otherwise the call changes one in place
            names = [self._add(x, inputs) for x in tensors]
            optional = any(self.roots[int(name[1:])][0] != int(name[1:]) for name in names)  # views
            call += "[0]" * (isinstance(outputs, (tuple, list)) and len(names) == 1)
        self.lines.append((names, call, optional))
        return outputs

    def launched(self, each: Launch, compiled: object) -> None:
        """Adds a launch after it ran; compiled: the kernel as Triton compiled it, None in its interpreter."""
        self.launches += 1
        self.kernels[each.kernel] = None
        values = {name: self._text(value, self._address) for name, value in each.arguments.items()}
        if compiled is None:
            call = f"{self._constant(each.kernel[each.grid])}({', '.join(f'{k}={v}' for k, v in values.items())})"
        elif not each.arguments.keys() >= set(each.kernel.arg_names):
            self.reason = "a kernel has arguments by default"
            return
        else:
            constants = map(self._constant, (compiled.function, compiled.packed_metadata))
            first = *map(str, (*each.grid, 1, 1)[:3]), "stream", *constants, "None", "None", "None"
            values = ", ".join((*first, *(values[name] for name in each.kernel.arg_names)))
            call = f"{self._constant(compiled.run)}({values})"
        self.lines.append(([], call, False))

    # ---- names and texts

    def _add(self, x: Tensor, bases: Iterable[Tensor] = ()) -> str:
        """Names a new tensor, which may be a view of one of `bases`."""
        number = len(self.roots)
        self.roots.append((number, 0))
        for base in bases:
            base_number = self._number(base)
            if base_number is not None and base.untyped_storage()._cdata == x.untyped_storage()._cdata:
                root, start = self.roots[base_number]
                self.roots[number] = root, start + x.data_ptr() - base.data_ptr()
        self.numbers[id(x)] = number, weakref.ref(x)
        return f"t{number}"

    def _number(self, x: Tensor) -> int | None:  # 3 for t3; None for a tensor that has no name yet
        number, tensor = self.numbers.get(id(x), (None, None))
        return number if tensor is not None and tensor() is x else None

    def _tensor(self, x: Tensor) -> str:
        number = self._number(x)
        if number is None:
            self.reason = "it reads a tensor that is no argument"
        return f"t{number}"

    def _address(self, x: Tensor) -> str:
        """A tensor as launches take it: its address, or in the interpreter the tensor itself."""
        name, number = self._tensor(x), self._number(x)
        if INTERPRETED or number is None:
            return name
        root, start = self.roots[number]
        return f"p{root} + {start}" if start else f"p{root}"

    def _constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _text(self, value: object, tensor: Callable[[Tensor], str] | None = None) -> str:
        """The source of a value; tensor: the function that gives the source of a tensor in it."""
        tensor = tensor or self._tensor
        if isinstance(value, Tensor):
            return tensor(value)
        if value is None or type(value) in (int, bool):
            return repr(value)
        if type(value) in (tuple, list, torch.Size):
            inside = "".join(f"{self._text(each, tensor)}, " for each in value)
            return f"[{inside}]" if type(value) is list else f"({inside})"
        if type(value).__name__ == "TensorDescriptor":
            kept, base = _Descriptors(value), tensor(value.base)
            return f"{self._constant(kept.of)}({base})" if base[0] == "t" else f"{self._constant(kept)}[{base}]"
        return self._constant(value)

    def plan(self, outputs: Tensor | tuple[Tensor, ...]) -> Plan | str:
        """The plan of a call that returned `outputs`, or a text that says why there can be none."""
        returned = self._text(outputs)
        if self.reason is not None:
            return self.reason
        lines, read = [f"return {returned}"], _names(returned)
        for defined, text, optional in reversed(self.lines):
            if optional and read.isdisjoint(defined):
                continue
            freed = [t for t in _names(text).union(defined) - read if t[0] == "t" and int(t[1:]) >= self.arguments]
            lines += [f"del {', '.join(sorted(freed))}"] * bool(freed)
            lines += [f"p{t[1:]} = {t}.data_ptr()" for t in defined if f"p{t[1:]}" in read]
            lines.append(f"{', '.join(defined)} = {text}" if defined else text)
            read |= _names(text)
        lines += [f"p{i} = t{i}.data_ptr()" for i in range(self.arguments) if f"p{i}" in read]
        arguments = ", ".join(f"t{i}" for i in range(self.arguments))
        source = f"def plan({arguments}, stream):\n" + "\n".join(f"    {line}" for line in reversed(lines))
        place = {**self.constants, "empty": torch.empty_strided}
        exec(compile(source, "<a plan of vitfast>", "exec"), place)
        return Plan(place["plan"], () if INTERPRETED else tuple(self.kernels), self.launches)


def _names(text: str) -> set[str]:
    """The names of tensors and addresses in a line of source, and of the tensors of those addresses."""
    names = set(re.findall(r"\b[tp]\d+\b", text))
    return names.union(f"t{name[1:]}" for name in names)


def _tensors(values: Iterable) -> Iterable[Tensor]:
    """The tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def recorded(run: Callable, values: Sequence) -> tuple[Tensor | tuple[Tensor, ...], Plan | str]:
    """(the results of run(*values), the plan that computes them or a text why there can be none)."""
    with Recorder(values) as recorder, launch.taped(recorder):
        outputs = run(*values)
    return outputs, recorder.plan(outputs)
