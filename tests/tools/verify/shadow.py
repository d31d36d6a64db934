"""Shadow memory of one interpreted launch: who has read and written each element (for sanitizer.py).

Every pointer carries the number of its kernel argument in its upper 16 bits, which pointer arithmetic leaves alone. So
an address is judged by the tensor through which it was reached, whatever else lies there.
"""

from collections.abc import Callable, Container

import numpy as np
import torch
from torch import Tensor, UntypedStorage
from triton.runtime.interpreter import TensorHandle

_SHIFT, _ADDRESS = np.uint64(48), np.uint64((1 << 48) - 1)
_SEVERAL = -1  # stands for several readers in place of one's stamp

Program = tuple[int, ...]
Touched = list[tuple["ShadowView", np.ndarray]]
Report = Callable[[str, str, str], None]


def plain(pointers: TensorHandle) -> TensorHandle:
    """The pointers without the numbers of arguments."""
    return TensorHandle(pointers.data & _ADDRESS, pointers.dtype)


class Memory:
    """One storage, with the stamps of the last writer and the last reader of each element."""

    def __init__(self, storage: UntypedStorage, itemsize: int):
        self.start, self.itemsize = storage.data_ptr(), itemsize
        self.writer, self.reader, self.lane = (np.zeros(storage.nbytes() // itemsize, np.int32) for _ in range(3))
        self.written = self.read = False


class ShadowView:
    """One tensor that a kernel was given: which elements of its memory are its own."""

    def __init__(self, name: str, tensor: Tensor, memory: Memory, fresh: bool):
        self.name, self.memory, self.itemsize, self.fresh = name, memory, tensor.element_size(), fresh
        self.shape, self.strides, self.offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        steps = self.itemsize // memory.itemsize  # more than 1 where the storage is seen in a smaller dtype too
        self.span = np.arange(steps) if steps > 1 else None
        self.inside = np.zeros(len(memory.writer), bool)  # even of a huge storage, only touched pages take memory
        if tensor.numel():
            inside, strides = torch.from_numpy(self.inside), [steps * s for s in self.strides]
            inside.as_strided(self.shape, strides, steps * self.offset).fill_(True)

    def locate(self, addresses: np.ndarray) -> np.ndarray:
        """The indices, in its memory, at which the elements at these addresses begin."""
        return ((addresses & _ADDRESS).view(np.int64) - self.memory.start) // self.memory.itemsize

    def holds(self, at: np.ndarray) -> np.ndarray:
        """Whether each of these indices is an element of the tensor."""
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


class WatchedLaunch:
    """Watches what a launch's programs do to its tensors; `report(kind, tensor, detail)` gets faults.

    A stamp stands for a phase of a program, from its start or a barrier to the next. Stamps rise through the launch.
    fresh: addresses of the storages that were poisoned.
    """

    def __init__(self, kernel: str, tensors: list[tuple[str, Tensor]], fresh: Container[int], report: Report):
        self.kernel, self.tensors, self.report = kernel, tensors, report
        keys = [t.untyped_storage().data_ptr() for _, t in tensors]
        sizes: dict[int, int] = {}
        for key, (_, t) in zip(keys, tensors):
            sizes[key] = min(sizes.get(key, 16), t.element_size())
        memories = {key: Memory(t.untyped_storage(), sizes[key]) for key, (_, t) in zip(keys, tensors)}
        self.views = [ShadowView(name, t, memories[key], key in fresh) for key, (name, t) in zip(keys, tensors)]
        self.programs: list[Program] = [()]  # of each stamp
        self.now = self.first = 0
        self.loads: list[tuple[Memory, np.ndarray, np.ndarray]] = []  # of this phase: addresses and masks
        # Counter -> the phase in which it was last added to, and those that came before.
        self.counts: dict[tuple[Memory, int], tuple[int, list[int]]] = {}
        self.ordered: list[int] = []  # phases of other programs that came before this phase
        self.arrived: list[int] = []  # and those that come before the next one

    @property
    def program(self) -> Program:
        return self.programs[self.now]

    def number(self, pointer: TensorHandle, tensor: object) -> None:
        """Gives the pointer of an argument its number."""
        for number, (_, t) in enumerate(self.tensors, 1):
            if t is tensor:
                pointer.data = pointer.data | (np.uint64(number) << _SHIFT)

    def next_phase(self, program: Program | None = None) -> None:
        """Begins a phase: of a new program, or with None of the same one after a barrier."""
        self.programs.append(program or self.program)
        self.now = len(self.programs) - 1
        self.first = self.now if program else self.first
        self.ordered = [] if program else self.ordered + self.arrived
        self.loads, self.arrived = [], []

    def access(self, handle: TensorHandle, mask: np.ndarray, what: str) -> tuple[np.ndarray, Touched]:
        """(mask without the lanes out of bounds, indices of the other lanes in each tensor's memory).

        Lanes of a pointer that was cast to another size are not among the latter: only their bounds are checked.
        """
        pointers, itemsize = handle.data, max(1, handle.get_element_ty().primitive_bitwidth // 8)
        mask = np.broadcast_to(mask, pointers.shape)
        active = pointers.ravel() if mask.all() else pointers[mask]
        touched, good = [], np.ones(active.size, bool)
        numbers = active >> _SHIFT
        for number in numbers[:1] if (numbers == numbers[:1]).all() else np.unique(numbers):
            mine = numbers == number
            if not 0 < number <= len(self.views):
                self.report("out of bounds", "?", f"{what} through a pointer that comes from no argument")
                good &= ~mine
                continue
            view = self.views[int(number) - 1]
            at = view.locate(active[mine])
            inside = view.holds(at)
            if not inside.all():
                self.report("out of bounds", view.name, f"{what} {view.element(int(at[~inside][0]))}")
                good[np.flatnonzero(mine)[~inside]] = False
                at = at[inside]
            if itemsize == view.itemsize:
                touched.append((view, at if view.span is None else (at[:, None] + view.span).ravel()))
        if not good.all():
            mask = mask.copy()
            mask[mask] = good
        return np.ascontiguousarray(mask), touched

    def load(self, pointers: np.ndarray, mask: np.ndarray, touched: Touched) -> None:
        """Reports elements that are read after a conflicting write, and notes who has read them."""
        for view, at in touched:
            memory = view.memory
            self._after_writes(view, at, "read-write race", "reads")
            reader = memory.reader[at]
            memory.reader[at] = np.where((reader == 0) | (reader >= self.first), self.now, _SEVERAL)
            memory.read = True
            self.loads.append((memory, pointers & _ADDRESS, mask))

    def store(self, pointers: np.ndarray, mask: np.ndarray, touched: Touched, values: np.ndarray) -> None:
        """Reports elements that are written after a conflicting access, and notes who has written them."""
        for view, at in touched:
            memory = view.memory
            self._after_writes(view, at, "write-write race", "writes")
            if memory.read:
                reader = memory.reader[at]
                others = (reader == _SEVERAL) | self._elsewhere(reader)
                self._found("read-write race", view, at, others, "writes what {} read,", reader)
                mine = reader == self.now
                if mine.any() and self._read_otherwise(memory, pointers & _ADDRESS, mask):
                    self._found("missing barrier", view, at, mine, "writes without a barrier what other threads read,")
            memory.writer[at] = self.now
            memory.written = True
        if len(touched) == 1 and touched[0][0].span is None:
            self._lanes_agree(*touched[0], np.broadcast_to(values, mask.shape)[mask])

    def arrive(self, touched: Touched, orders: bool) -> None:
        """Notes an addition to counters, and what it orders: phases before this one, and whom it lets read them."""
        for view, at in touched:
            writer = view.memory.writer
            for counter in at.tolist():
                last, before = self.counts.get((view.memory, counter), (0, []))
                if writer[counter] != last:  # something else than an addition
                    self._after_writes(view, np.array([counter]), "read-write race", "adds to")
                if orders:
                    self.arrived += before
                    before += [*self.ordered, *range(self.first, self.now)]
                self.counts[view.memory, counter] = self.now, before
            writer[at], view.memory.written = self.now, True

    def _elsewhere(self, stamps: np.ndarray) -> np.ndarray:
        """Whether these are stamps of other programs which nothing has ordered before this phase."""
        others = (stamps > 0) & (stamps < self.first)
        return others & ~np.isin(stamps, self.ordered) if self.ordered and others.any() else others

    def _after_writes(self, view: ShadowView, at: np.ndarray, race: str, verb: str) -> None:
        """Reports accessed elements that another program, or this one in this phase, has written before."""
        if view.memory.written:
            writer = view.memory.writer[at]
            self._found(race, view, at, self._elsewhere(writer), verb + " what {} wrote,", writer)
            again = f"{verb} again without a barrier what it wrote,"
            self._found("missing barrier", view, at, writer == self.now, again)

    def hint(self, values: np.ndarray, divisors: list[int]) -> None:
        """Reports, along each axis, a contiguous run whose first number is no multiple of the divisor."""
        for axis, divisor in enumerate(divisors):
            if divisor > 1:
                along = np.moveaxis(values, min(axis, values.ndim - 1), 0)
                first = np.ones(along.shape, bool)
                first[1:] = along[1:] != along[:-1] + np.ones(1, along.dtype)
                wrong = along[first & (along % np.asarray(divisor, along.dtype) != 0)]
                if wrong.size:
                    self.report("false hint", "tl.multiple_of", f"{wrong.flat[0]} is no multiple of {divisor}")

    def _read_otherwise(self, memory: Memory, addresses: np.ndarray, mask: np.ndarray) -> bool:
        """Whether this phase has read any of these in another order of pointers, so by other threads."""
        others = [(a, m) for of, a, m in self.loads if of is memory and not np.array_equal(a, addresses)]
        return any(np.isin(a[m], addresses[mask]).any() for a, m in others)

    def _lanes_agree(self, view: ShadowView, at: np.ndarray, values: np.ndarray) -> None:
        lanes, last = np.arange(len(at), dtype=np.int32), view.memory.lane
        last[at] = lanes
        if (last[at] != lanes).any():
            bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
            self._found("two values", view, at, bits[last[at]] != bits, "lanes disagree on")

    def initialised(self, pointers: np.ndarray, mask: np.ndarray, result: TensorHandle) -> None:
        """Reports loaded numbers that are poison: floats with all bits set."""
        if result.dtype.scalar.is_floating():
            bits = result.data.view(f"u{result.data.itemsize}")
            poison = (bits == np.iinfo(bits.dtype).max) & mask
            if poison.any():
                view = self.views[int(pointers[poison][0] >> _SHIFT) - 1]
                at = view.locate(pointers[poison])
                self._found("uninitialised read", view, at, view.holds(at) & view.fresh, "reads what nothing wrote,")

    def _found(self, kind: str, view: ShadowView, at: np.ndarray, wrong: np.ndarray, text: str, stamps=None) -> None:
        """Reports the first wrong one of the elements `at`, with the program that its stamp stands for."""
        if wrong.any():
            first = np.flatnonzero(wrong)[0]
            if stamps is not None:
                stamp = int(stamps[first])
                text = text.format("several programs" if stamp == _SEVERAL else f"program {self.programs[stamp]}")
            more = f", {wrong.sum()} elements" if wrong.sum() > 1 else ""
            self.report(kind, view.name, f"{text} {view.element(int(at[first]))}{more}")
