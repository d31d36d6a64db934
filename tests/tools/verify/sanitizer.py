"""A memory sanitizer for Triton kernels in Triton's interpreter, without a GPU or a changed kernel.

    # TRITON_INTERPRET=1 must be in the environment before triton is imported; vitfast needs ops.use_kernels("on")
    interpreter.quicken(), interpreter.mend_bfloat16()  # vitfast's: twice as quick, bfloat16 right
    with Sanitizer() as watch:
        ...launches on CPU tensors...
    print(watch)                                        # watch.findings has the same as a list

It looks at each element that a program reads or writes where its mask is true. The kinds of findings are:

    out of bounds        no element of the tensor; its neighbours in the same storage (k beside q in one qkv) are none
    write-write race     two programs of a launch write one element
    read-write race      a program reads what another program of the launch writes, in either order
    missing barrier      a program reads or writes again what it wrote, or writes what it read through other pointers
                         (by other threads, that is), with no tl.debug_barrier() in between
    two values           the lanes of one store write different values to one element
    uninitialised read   of an element of torch.empty that nothing has written
    left unwritten       such an element at the end, in a tensor that a kernel was given
    false hint           tl.multiple_of a number that is no multiple (for a contiguous run, its first number)
    atomic operation     but an addition of integers: the order of other ones would change from run to run, and the
                         bits with it

Lanes that a mask leaves out of a load without `other=` become NaN, since a GPU leaves them undefined (the interpreter
has zeros). An addition of integers with sem="acq_rel", by which programs count who has arrived, orders them: what a
program wrote before the last barrier in front of it may be read by those that add to the same counter later, behind
their next barrier; so the last to arrive may read what all have written.

The findings are about addresses, not about time: the interpreter runs programs one after the other, and does not see
what the compiler makes of a kernel. One column too many in a contiguous tensor is the next row's first, so kernels
should run on views of wider tensors too. Pointers must come from arguments, not from memory. Integers are not watched
for uninitialised reads, as every pattern may be a value. Only one thread may launch at a time. All memory that
torch.empty gives inside is kept until the end.
"""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import shadow
import torch
import triton
import triton.language as tl
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels import tiles
from vitfast.tools.verify import settle_lookups

_NOT_KERNELS = (os.path.dirname(triton.__file__), __file__, shadow.__file__)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALLOCATE = {torch: ("empty", "empty_like", "empty_strided"), Tensor: ("new_empty", "new_empty_strided")}


@dataclass
class Finding:
    """One kind of fault of one kernel at one line of source, as first met, and how often it was met."""

    kind: str
    kernel: str
    tensor: str  # the kernel's argument
    source: str  # "kernels/rows.py:40 < layer_norm.py:58": the line, and the lines that called it
    program: shadow.Program | None
    detail: str  # with the element's index
    count: int = 1

    def __str__(self) -> str:
        where = self.kernel + (f", program {self.program}" if self.program else "")
        again = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {where}, {self.source}: {self.detail}{again}"


class Sanitizer:
    """Watches every launch of an interpreted kernel inside a with block, poisoning torch.empty's memory.

    findings: a list, complete after the block. counts: the numbers of launches, programs, reads, writes and their
    elements. A read or write out of bounds is reported and not done; an atomic operation is done. Raises RuntimeError
    inside of another Sanitizer.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self._found: dict[tuple[str, str, str, str], Finding] = {}
        self._launch: shadow.WatchedLaunch | None = None  # the one under way
        self._fresh: dict[int, UntypedStorage] = {}  # poisoned storages by their address
        self._given: dict[int, dict[tuple, tuple[str, str]]] = {}  # storage -> its views -> first kernel, argument
        self._open = False  # so that a hook which other code restores after the end does nothing

    @property
    def findings(self) -> list[Finding]:
        return list(self._found.values())

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or f"nothing found in {self.counts['launches']} launches"

    def _report(self, kind: str, tensor: str, detail: str) -> None:
        self._add(Finding(kind, self._launch.kernel, tensor, _source(), self._launch.program, detail))

    def _add(self, finding: Finding) -> None:
        first = self._found.setdefault((finding.kind, finding.kernel, finding.tensor, finding.source), finding)
        first.count += first is not finding

    def _unwritten(self) -> None:
        """Looks for poison that is left in the poisoned tensors that kernels were given."""
        for key, views in self._given.items():
            for (shape, strides, offset, dtype), (kernel, name) in views.items():
                if dtype.is_floating_point:
                    whole = torch.tensor([], dtype=dtype).set_(self._fresh[key]).view(_INTEGERS[dtype.itemsize])
                    left = (whole.as_strided(shape, strides, offset) == -1).nonzero()
                    if len(left):
                        detail = f"{name}{left[0].tolist()} of {tuple(shape)}, {len(left)} elements"
                        self._add(Finding("left unwritten", kernel, name, "after the last launch", None, detail))

    def __enter__(self) -> "Sanitizer":
        if hasattr(GridExecutor._init_args_hst, "_sanitized"):
            raise RuntimeError("a Sanitizer is at work already: they do not nest")
        settle_lookups()
        with contextlib.ExitStack() as stack:
            stack.enter_context(tiles.using())  # no plans of before, which allocate by themselves
            for owner, name, hook in self._hooks():
                stack.enter_context(mock.patch.object(owner, name, _hooked(hook, getattr(owner, name))))
            self._restore = stack.pop_all()
        self._open = True
        return self

    def __exit__(self, kind, *_) -> None:
        self._restore.close()
        self._launch, self._open = None, False
        if kind is None:
            self._unwritten()
        self._fresh.clear()
        self._given.clear()

    def _hooks(self) -> Iterator[tuple[object, str, Callable]]:
        """Yields (owner, name, replacement) of each hook; the replacement gets the original first."""
        yield GridExecutor, "_init_args_hst", self._bind_arguments
        yield GridExecutor, "_restore_args_dev", self._return_arguments
        yield interpreter, "_implicit_cvt", self._convert
        yield TensorHandle, "set_attr", self._set_attribute
        yield InterpreterBuilder, "set_grid_idx", self._begin_program
        yield InterpreterBuilder, "create_barrier", self._barrier
        yield InterpreterBuilder, "create_masked_load", self._load
        yield InterpreterBuilder, "create_masked_store", self._store
        yield InterpreterBuilder, "create_atomic_rmw", self._count_in
        yield InterpreterBuilder, "create_atomic_cas", self._atomic
        yield from ((owner, name, self._allocate) for owner, names in _ALLOCATE.items() for name in names)

    def _bind_arguments(self, original, executor, args_dev, kwargs):
        args, kwargs = original(executor, args_dev, kwargs)
        self.counts["launches"] += 1
        kernel, tensors = executor.fn.__name__, list(_tensors(dict(zip(executor.arg_names, args)) | kwargs))
        self._launch = shadow.WatchedLaunch(kernel, tensors, self._fresh, self._report)
        for name, t in tensors:
            key = t.untyped_storage().data_ptr()
            if key in self._fresh:
                view = tuple(t.shape), t.stride(), t.storage_offset(), t.dtype
                self._given.setdefault(key, {}).setdefault(view, (kernel, name))
        return args, kwargs

    def _return_arguments(self, original, *arguments):
        self._launch = None
        return original(*arguments)

    def _convert(self, original, argument):
        result = original(argument)
        if self._launch and hasattr(argument, "data_ptr"):
            self._launch.number(result.handle, interpreter._unwrap_tensor(argument))
        return result

    def _set_attribute(self, original, handle, key, values):
        if key == "tt.divisibility":
            self._launch.hint(handle.data, values)
        return original(handle, key, values)

    def _begin_program(self, original, builder, x, y, z):
        original(builder, x, y, z)
        self.counts["programs"] += 1
        self._launch.next_phase((x, y, z))

    def _barrier(self, original, builder, *arguments):
        self._launch.next_phase()
        return original(builder, *arguments)

    def _load(self, original, builder, ptrs, mask, other, *rest, **options):
        kept, touched = self._launch.access(ptrs, mask.data, "reads")
        if other is None:
            other = _undefined(ptrs)
        result = original(builder, shadow.plain(ptrs), TensorHandle(kept, tl.int1), other, *rest, **options)
        self._launch.load(ptrs.data, kept, touched)
        self._launch.initialised(ptrs.data, kept, result)
        self._count("reads", touched)
        return result

    def _store(self, original, builder, ptrs, value, mask, *rest, **options):
        kept, touched = self._launch.access(ptrs, mask.data, "writes")
        self._launch.store(ptrs.data, kept, touched, value.data)
        self._count("writes", touched)
        return original(builder, shadow.plain(ptrs), value, TensorHandle(kept, tl.int1), *rest, **options)

    def _count_in(self, original, builder, kind, ptrs, value, mask, sem, scope):
        if kind != ir.ATOMIC_OP.ADD or value.dtype.scalar.is_floating():
            return self._atomic(original, builder, kind, ptrs, value, mask, sem, scope)
        kept, touched = self._launch.access(ptrs, mask.data, "counts in")
        self._launch.arrive(touched, sem == ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
        return original(builder, kind, shadow.plain(ptrs), value, TensorHandle(kept, tl.int1), sem, scope)

    def _atomic(self, original, builder, *arguments):
        self._report("atomic operation", "?", original.__name__.removeprefix("create_"))
        pointers = (isinstance(a, TensorHandle) and a.dtype.is_ptr() for a in arguments)
        return original(builder, *(shadow.plain(a) if is_ptr else a for a, is_ptr in zip(arguments, pointers)))

    def _allocate(self, original, *args, **kwargs):
        x = original(*args, **kwargs)
        new = self._open and kwargs.get("out") is None and type(x) is Tensor and not torch.compiler.is_compiling()
        if new and x.device.type == "cpu" and x.layout == torch.strided and x.numel():
            # functorch's tensors have no storage; a plan that is recorded must not fill the memory of its first run
            with contextlib.suppress(RuntimeError, NotImplementedError), _disable_current_modes():
                storage = x.untyped_storage()
                self._fresh[storage.data_ptr()] = storage.fill_(255)
        return x

    def _count(self, what: str, touched: shadow.Touched) -> None:
        self.counts[what] += 1
        self.counts["elements"] += sum(len(at) for _, at in touched)


def _hooked(hook: Callable, original: Callable) -> Callable:
    """A plain function, so that classes bind it as a method, that calls `hook` in place of `original`."""

    def hooked(*args, **kwargs):
        return hook(original, *args, **kwargs)

    hooked._sanitized = True
    return hooked


def _tensors(arguments: dict) -> Iterator[tuple[str, Tensor]]:
    """Yields a kernel's tensor arguments by name, those in tuples and behind descriptors included."""
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            yield name, value.base
        elif isinstance(value, tuple):
            yield from _tensors({f"{name}[{i}]": v for i, v in enumerate(value)})
        elif hasattr(value, "data_ptr"):
            yield name, interpreter._unwrap_tensor(value)


def _undefined(ptrs: TensorHandle) -> TensorHandle:
    """Values of a load without `other` where its mask is false: poison, or for integers zeros."""
    dtype = ptrs.get_element_ty()
    values = np.zeros(ptrs.data.shape, interpreter._get_np_dtype(dtype))
    if dtype.is_floating():
        values.view(f"u{values.itemsize}").fill(np.iinfo(f"u{values.itemsize}").max)
    return TensorHandle(values, dtype)


def _source() -> str:
    """The line of the kernel that is running, with the lines that called it."""
    lines, frame = [], sys._getframe(1)
    while frame and not isinstance(frame.f_locals.get("self"), GridExecutor):
        if not frame.f_code.co_filename.startswith(_NOT_KERNELS):
            folder, name = frame.f_code.co_filename.split(os.sep)[-2:]
            line = f"{folder}/{name}:{frame.f_lineno}"
            if line not in lines:
                lines.append(line)
        frame = frame.f_back
    return " < ".join(lines) or "?"
