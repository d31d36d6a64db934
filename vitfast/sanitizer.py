"""A memory sanitizer for Triton kernels in Triton's interpreter: no GPU, any kernel, no change to it.

    with Sanitizer() as watch:
        ...launches...
    print(watch)                                        watch.findings: the same as a list

Every pointer carries the number of its kernel argument in its upper 16 bits, which pointer arithmetic leaves alone. So
each element that a program reads or writes where its mask is true is known by the tensor it was reached through:

    out of bounds        no element of that tensor: a neighbour in the same storage (k beside q in a packed qkv) is none
    write-write race     two programs of a launch write one element
    read-write race      a program reads what another program of the launch writes, in either order
    missing barrier      a program reads or writes again what it wrote, or writes what it read through other pointers
                         (by other threads, that is), with no tl.debug_barrier() in between
    two values           the lanes of one store write different values to one element
    uninitialised read   of an element of torch.empty that nothing has written
    left unwritten       such an element at the end, in a tensor that a kernel was given
    false hint           tl.multiple_of of a number that is none
    atomic operation     vitfast has none: the order of additions would change from run to run, and the bits with it

All of it is about addresses, not about time: the interpreter runs programs one after the other, and what the compiler
makes of a kernel is not seen. Integers are not watched for uninitialised reads: every pattern may be a value.
"""

import contextlib
import os
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, UntypedStorage
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

_SHIFT, _ADDRESS = np.uint64(48), np.uint64((1 << 48) - 1)
_SEVERAL = -1  # in place of the stamp of an element's reader
_NOT_KERNELS = (os.path.dirname(triton.__file__), __file__)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Finding:
    """One kind of fault of one kernel at one line of source, as it was met first, and how often it was met."""

    kind: str
    kernel: str
    tensor: str  # the kernel's argument
    source: str  # "rows.py:40 < layer_norm.py:58": the line, and the lines that called it
    program: tuple[int, ...] | None
    detail: str  # with the element's index
    count: int = 1

    def __str__(self) -> str:
        where = f"{self.kernel}" + (f", program {self.program}" if self.program else "")
        again = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {where}, {self.source}: {self.detail}{again}"


class _Memory:
    """What the programs of one launch did to one storage: the stamps of each element's last writer and reader."""

    def __init__(self, storage: UntypedStorage, itemsize: int):
        self.start, self.itemsize = storage.data_ptr(), itemsize
        self.writer, self.reader, self.lane = (np.zeros(storage.nbytes() // itemsize, np.int32) for _ in range(3))
        self.written = self.read = False


class _View:
    """One tensor that a kernel was given: the elements that are its own."""

    def __init__(self, name: str, tensor: Tensor, memory: _Memory):
        self.name, self.memory, self.itemsize = name, memory, tensor.element_size()
        self.shape, self.strides, self.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        steps = (
            self.itemsize // memory.itemsize
        )  # where one storage is seen in two dtypes, memory counts in the smaller
        self.span = np.arange(steps) if steps > 1 else None
        inside = torch.zeros(len(memory.writer), dtype=torch.bool)
        if tensor.numel():
            inside.as_strided(self.shape, [steps * s for s in self.strides], steps * self.offset).fill_(True)
        self.inside = inside.numpy()

    def locate(self, addresses: np.ndarray) -> np.ndarray:
        """Where in `memory` the elements at these addresses begin."""
        return ((addresses & _ADDRESS).view(np.int64) - self.memory.start) // self.memory.itemsize

    def holds(self, at: np.ndarray) -> np.ndarray:
        """Which of these are elements of the tensor."""
        within = at.view(np.uint64) < len(self.inside)  # negative ones are huge
        if within.all():
            return self.inside[at]
        return within & self.inside[np.where(within, at, 0)] if len(self.inside) else within

    def element(self, at: int) -> str:
        """ "x_ptr[1, 5] of (2, 3)": an index that is out of range where `at` is."""
        rest, index = at * self.memory.itemsize // self.itemsize - self.offset, [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis]:
                index[axis], rest = divmod(rest, self.strides[axis])
        beyond = f" + {rest} elements" if rest else ""  # between two elements of a view with gaps
        return f"{self.name}{index}{beyond} of {self.shape}"


class Sanitizer:
    """Context manager: watches every launch of an interpreted kernel inside. Memory of torch.empty is poisoned.

    findings: what was found, complete after the end. counts: of launches, programs, reads, writes and their elements.
    """

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self._found: dict[tuple[str, str, str, str], Finding] = {}
        self._fresh: dict[int, UntypedStorage] = {}  # poisoned storages by their address
        self._given: dict[int, dict[tuple, tuple[str, str]]] = {}  # storage -> views of it -> the first kernel and name
        self._kernel = ""
        self._views: list[_View] = []  # of the launch under way
        self._numbers: dict[int, int] = {}  # id of a tensor argument -> its number
        self._kept: list[object] = []  # keeps these ids unique
        # A stamp is a phase of a program: from its start or a barrier to the next. They rise through the launch.
        self._now = self._first = 0
        self._programs: list[tuple[int, ...]] = []  # of each stamp
        self._loads: list[tuple[_Memory, np.ndarray, np.ndarray]] = []  # of this phase: addresses and masks

    @property
    def findings(self) -> list[Finding]:
        return list(self._found.values())

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "nothing found"

    # What happens in a launch

    def _begin(self, kernel: str, arguments: dict) -> None:
        self.counts["launches"] += 1
        self._kernel, self._views, self._numbers, self._kept = kernel, [], {}, []
        self._now, self._programs = 0, [()]
        tensors = list(_tensors(arguments))
        smallest: dict[int, int] = {}
        for _, t in tensors:
            key = t.untyped_storage().data_ptr()
            smallest[key] = min(smallest.get(key, 8), t.element_size())
        memories: dict[int, _Memory] = {}
        for name, t in tensors:
            key = t.untyped_storage().data_ptr()
            memory = memories.setdefault(key, _Memory(t.untyped_storage(), smallest[key]))
            self._views.append(_View(name, t, memory))
            self._numbers[id(t)] = len(self._views)
            self._kept.append(t)
            if key in self._fresh:
                view = tuple(t.shape), t.stride(), t.storage_offset(), t.dtype
                self._given.setdefault(key, {}).setdefault(view, (kernel, name))

    def _end(self) -> None:
        self._kernel, self._views, self._numbers, self._kept = "", [], {}, []

    def _next_phase(self, program: tuple[int, ...] | None = None) -> None:
        """A program begins, or (None) has passed a barrier."""
        self._programs.append(program or self._programs[-1])
        self._now = len(self._programs) - 1
        self._loads = []
        if program:
            self.counts["programs"] += 1
            self._first = self._now

    def _report(self, kind: str, tensor: str, detail: str, source: str = "", program: bool = True) -> None:
        source = source or _source()
        key = kind, self._kernel, tensor, source
        if key in self._found:
            self._found[key].count += 1
        else:
            now = self._programs[self._now] if program and self._programs else None
            self._found[key] = Finding(kind, self._kernel, tensor, source, now, detail)

    def _access(self, ptrs: TensorHandle, mask: np.ndarray, what: str) -> tuple:
        """(plain pointers, the mask without what lies outside, [(view, its elements)]) of a load or a store."""
        plain = TensorHandle(ptrs.data & _ADDRESS, ptrs.dtype)
        mask = np.broadcast_to(mask, ptrs.data.shape)
        active = ptrs.data.ravel() if mask.all() else ptrs.data[mask]
        self.counts[what] += 1
        self.counts["elements"] += active.size
        touched, good = [], np.ones(active.size, bool)
        numbers = active >> _SHIFT
        for number in numbers[:1] if (numbers == numbers[:1]).all() else np.unique(numbers):
            mine = numbers == number
            if not 0 < number <= len(self._views):
                self._report("out of bounds", "?", f"{what} through a pointer that comes from no argument")
                good &= ~mine
                continue
            view = self._views[int(number) - 1]
            at = view.locate(active if mine.all() else active[mine])
            inside = view.holds(at)
            if not inside.all():
                self._report("out of bounds", view.name, f"{what} {view.element(int(at[~inside][0]))}")
                good[np.flatnonzero(mine)[~inside]] = False
                at = at[inside]
            touched.append((view, at if view.span is None else (at[:, None] + view.span).ravel()))
        if not good.all():
            mask = mask.copy()
            mask[mask] = good
        return plain, TensorHandle(np.ascontiguousarray(mask), tl.int1), touched

    def _complain(
        self, kind: str, view: _View, at: np.ndarray, wrong: np.ndarray, text: str, stamps: np.ndarray
    ) -> None:
        if not wrong.any():
            return
        first = np.flatnonzero(wrong)[0]
        stamp = int(stamps[first])
        other = "several programs" if stamp == _SEVERAL else f"program {self._programs[stamp]}"
        self._report(
            kind, view.name, f"{text.format(other=other)} {view.element(int(at[first]))}, {wrong.sum()} elements"
        )

    def _load(self, view: _View, at: np.ndarray) -> None:
        memory = view.memory
        if memory.written:
            writer = memory.writer[at]
            foreign = (writer > 0) & (writer < self._first)
            self._complain("read-write race", view, at, foreign, "reads what {other} wrote,", writer)
            again = writer == self._now
            self._complain(
                "missing barrier", view, at, again, "reads back without a barrier what it wrote,", writer
            )
        reader = memory.reader[at]
        memory.reader[at] = np.where((reader == 0) | (reader >= self._first), self._now, _SEVERAL)
        memory.read = True

    def _store(self, view: _View, at: np.ndarray, addresses: np.ndarray, mask: np.ndarray) -> None:
        memory = view.memory
        if memory.written:
            writer = memory.writer[at]
            foreign = (writer > 0) & (writer < self._first)
            self._complain("write-write race", view, at, foreign, "writes what {other} wrote,", writer)
            again = writer == self._now
            self._complain(
                "missing barrier", view, at, again, "writes again without a barrier what it wrote,", writer
            )
        if memory.read:
            reader = memory.reader[at]
            foreign = (reader == _SEVERAL) | (reader > 0) & (reader < self._first)
            self._complain("read-write race", view, at, foreign, "writes what {other} read,", reader)
            mine = reader == self._now
            if mine.any() and self._by_others(memory, addresses, mask):
                self._complain(
                    "missing barrier", view, at, mine, "writes without a barrier what its other threads read,", reader
                )
        memory.writer[at] = self._now
        memory.written = True

    def _by_others(self, memory: _Memory, addresses: np.ndarray, mask: np.ndarray) -> bool:
        """Whether this phase read any of these elements through pointers in another order: maybe by other threads."""
        others = [(a, m) for of, a, m in self._loads if of is memory and not np.array_equal(a, addresses)]
        return any(np.isin(a[m], addresses[mask]).any() for a, m in others)

    def _two_values(self, view: _View, at: np.ndarray, values: np.ndarray) -> None:
        lanes, memory = np.arange(len(at), dtype=np.int32), view.memory
        memory.lane[at] = lanes
        last = memory.lane[at]
        if (last != lanes).any():
            bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
            wrong = bits[last] != bits
            self._complain("two values", view, at, wrong, "lanes disagree on", memory.writer[at])

    def _uninitialised(self, ptrs: TensorHandle, mask: np.ndarray, result: TensorHandle) -> None:
        if result.dtype.scalar.is_floating():
            bits = result.data.view(f"u{result.data.itemsize}")
            wrong = (bits == np.iinfo(bits.dtype).max) & mask
            if wrong.any():
                address = ptrs.data[wrong][:1]
                view = self._views[int(address[0] >> _SHIFT) - 1]
                element = view.element(int(view.locate(address)[0]))
                self._report(
                    "uninitialised read", view.name, f"reads {element}, {wrong.sum()} elements, before it is written"
                )

    def _unwritten(self) -> None:
        for key, views in self._given.items():
            for (shape, strides, offset, dtype), (kernel, name) in views.items():
                if not dtype.is_floating_point:
                    continue
                whole = torch.tensor([], dtype=dtype).set_(self._fresh[key]).view(_INTEGERS[dtype.itemsize])
                left = (whole.as_strided(shape, strides, offset) == -1).nonzero()
                if len(left):
                    self._kernel = kernel
                    detail = f"{name}{left[0].tolist()} of {tuple(shape)}, {len(left)} elements"
                    self._report("left unwritten", name, detail, source="after the last launch", program=False)

    # Where Triton and torch are listened to

    def __enter__(self) -> "Sanitizer":
        if hasattr(GridExecutor._init_args_hst, "_sanitizer"):
            raise RuntimeError("a Sanitizer is at work already: they do not nest")
        with contextlib.ExitStack() as stack:
            for owner, name, hook in self._hooks():
                original = getattr(owner, name)
                hooked = hook(original)
                hooked._sanitizer = self
                if name in vars(owner):
                    stack.callback(setattr, owner, name, original)
                else:
                    stack.callback(delattr, owner, name)
                setattr(owner, name, hooked)
            self._restore = stack.pop_all()
        return self

    def __exit__(self, kind, *_) -> None:
        self._restore.close()
        self._end()
        if kind is None:
            self._unwritten()
        self._fresh.clear()
        self._given.clear()

    def _hooks(self):
        """(owner, name, function of the original that gives its replacement)."""

        def bind_arguments(original):
            def hooked(executor, args_dev, kwargs):
                args, kwargs = original(executor, args_dev, kwargs)
                self._begin(executor.fn.__name__, dict(zip(executor.arg_names, args)) | kwargs)
                return args, kwargs

            return hooked

        def return_arguments(original):
            def hooked(*arguments):
                self._end()
                return original(*arguments)

            return hooked

        def convert(original):
            def hooked(argument):
                result = original(argument)
                number = self._numbers.get(id(argument), 0)
                if number:
                    result.handle.data = result.handle.data | (np.uint64(number) << _SHIFT)
                return result

            return hooked

        def begin_program(original):
            def hooked(builder, x, y, z):
                original(builder, x, y, z)
                self._next_phase((x, y, z))

            return hooked

        def barrier(original):
            def hooked(builder, *arguments):
                self._next_phase()
                return original(builder, *arguments)

            return hooked

        def load(original):
            def hooked(builder, ptrs, mask, other, *rest, **options):
                plain, kept, touched = self._access(ptrs, mask.data, "reads")
                result = original(builder, plain, kept, other, *rest, **options)
                for view, at in touched:
                    self._load(view, at)
                    self._loads.append((view.memory, plain.data, kept.data))
                self._uninitialised(ptrs, kept.data, result)
                return result

            return hooked

        def store(original):
            def hooked(builder, ptrs, value, mask, *rest, **options):
                plain, kept, touched = self._access(ptrs, mask.data, "writes")
                for view, at in touched:
                    self._store(view, at, plain.data, kept.data)
                if len(touched) == 1 and touched[0][0].span is None:
                    self._two_values(*touched[0], np.broadcast_to(value.data, kept.data.shape)[kept.data])
                return original(builder, plain, value, kept, *rest, **options)

            return hooked

        def atomic(original):
            def hooked(builder, *arguments):
                self._report("atomic operation", "?", original.__name__.removeprefix("create_"))
                plain = [
                    TensorHandle(a.data & _ADDRESS, a.dtype) if isinstance(a, TensorHandle) and a.dtype.is_ptr() else a
                    for a in arguments
                ]
                return original(builder, *plain)

            return hooked

        def set_attribute(original):
            def hooked(handle, key, values):
                divisor = max(values) if key == "tt.divisibility" else 1
                if divisor > 1:
                    wrong = handle.data[handle.data % np.asarray(divisor, handle.data.dtype) != 0]
                    if wrong.size:
                        self._report("false hint", "tl.multiple_of", f"{wrong.flat[0]} is no multiple of {divisor}")
                return original(handle, key, values)

            return hooked

        def allocate(original):
            def hooked(*args, **kwargs):
                result = original(*args, **kwargs)
                plain = type(result) is Tensor and result.device.type == "cpu" and result.layout == torch.strided
                if plain and result.numel() and not torch.compiler.is_compiling():
                    storage = result.untyped_storage()
                    storage.fill_(255)
                    self._fresh[storage.data_ptr()] = storage
                return result

            return hooked

        yield GridExecutor, "_init_args_hst", bind_arguments
        yield GridExecutor, "_restore_args_dev", return_arguments
        yield interpreter, "_implicit_cvt", convert
        yield TensorHandle, "set_attr", set_attribute
        yield InterpreterBuilder, "set_grid_idx", begin_program
        yield InterpreterBuilder, "create_barrier", barrier
        yield InterpreterBuilder, "create_masked_load", load
        yield InterpreterBuilder, "create_masked_store", store
        yield InterpreterBuilder, "create_atomic_rmw", atomic
        yield InterpreterBuilder, "create_atomic_cas", atomic
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")):
            yield owner, name, allocate
        for name in ("new_empty", "new_empty_strided"):
            yield Tensor, name, allocate


def _tensors(arguments: dict):
    """The tensors among a kernel's arguments, in tuples and behind descriptors too, by name."""
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            yield name, value.base
        elif isinstance(value, tuple):
            yield from _tensors({f"{name}[{i}]": v for i, v in enumerate(value)})
        elif hasattr(value, "data_ptr"):
            yield name, value


def _source() -> str:
    """The line of the kernel that is running, with the lines that called it."""
    lines, frame = [], sys._getframe(1)
    while frame and not isinstance(frame.f_locals.get("self"), GridExecutor):
        if not frame.f_code.co_filename.startswith(_NOT_KERNELS):
            line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            if line not in lines:
                lines.append(line)
        frame = frame.f_back
    return " < ".join(lines) or "?"
