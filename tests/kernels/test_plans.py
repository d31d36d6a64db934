"""Plans: what an operation does from its third call on has the bits and the launches of its own code."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from attention_cases import interpreted
from planned_calls import Kernel, function, launches_of_plans
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast import ops
from vitfast.kernels import launch, plans
from vitfast.ops import operation
from vitfast.ops.operation import Registered
from vitfast.tools.verify import cases
from vitfast.tools.verify.draw import Draw, Sizes

SMALL = Sizes(batch=2, tokens=5, width=48, heads=3, hidden=40, image=16, patch=8)
WIDE = Sizes(batch=2, tokens=5, width=128, heads=2, hidden=256, image=16, patch=8)  # matrices that descriptors read
DEVICE = torch.device("cpu" if launch.INTERPRETED else "cuda")


class Calls(TorchDispatchMode):
    """Collects the calls of vitfast's operations: (name, arguments)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "vitfast":
            self.found.append((function._opname, args))
        return function(*args, **(kwargs or {}))


def calls(sizes: Sizes, dtype: torch.dtype) -> list[tuple[str, tuple]]:
    """The operations that all cases run, forward and backward, on random numbers."""
    with ops.use_kernels("on"), Calls() as seen:
        for function, inputs in cases(sizes, ops).values():
            draw = Draw(dtype, DEVICE, torch.Generator(DEVICE).manual_seed(1))
            outputs = function(*draw.leaves(inputs))
            outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y.requires_grad]
            torch.autograd.backward(outputs, [draw.values(*y.shape, dtype=y.dtype) for y in outputs])
    kinds = {(name, *(type(x) if isinstance(x, Tensor) else repr(x) for x in args)): args for name, args in seen.found}
    return [(name, args) for (name, *_), args in kinds.items()]


def again(values: tuple, seed: int) -> tuple:
    """Arguments of the same shapes, strides and dtypes with other random numbers; integers stay."""
    draw = torch.Generator(DEVICE).manual_seed(seed)

    def fresh(x):
        if not isinstance(x, Tensor) or 0 in x.stride():
            return x
        drawn = x
        if x.is_floating_point():  # and positive, as statistics are
            drawn = 0.1 + 0.1 * torch.rand(x.shape, generator=draw, device=DEVICE)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(drawn)

    return tuple(map(fresh, values))


def as_tuple(outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(sizes: Sizes, dtype: torch.dtype) -> None:
    """The third call of every operation has the bits and the launches of its own code."""
    seen, launches = set(), launch.launches_made()
    for name, values in calls(sizes, dtype):
        planned = operation.planned(run := Registered.all[name].run)
        with torch._C._AutoDispatchBelowAutograd():
            for seed in range(3):
                given, before = again(values, seed), launch.launches_made()
                found = as_tuple(planned(*given))
            made = launch.launches_made() - before
            wanted = as_tuple(run(*given))
        assert launch.launches_made() - before == 2 * made, name
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype and a.stride() == b.stride(), name
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name
        places = [{x.data_ptr() for x in xs if isinstance(x, Tensor) and x.numel()} for xs in (found, given)]
        assert places[0].isdisjoint(places[1]), "a result is no argument"
        assert [type(plan) for plan in planned.plans.values()] == [plans.Plan], (name, planned.plans.values())
        seen.add(name)
    assert seen == set(Registered.all) and launch.launches_made() > launches


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_plan_has_the_bits_of_the_operations_own_code(dtype):
    check(SMALL, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [WIDE, Sizes.of_preset("B/16", batch=50)], ids=["few rows", "many rows"])
def test_a_plan_computes_the_same_on_a_gpu(sizes, dtype):
    check(sizes, dtype)


# ---- what reaches Triton's launchers: addresses, where the operation's own code gives tensors


class Kept(TorchDispatchMode):
    """Keeps every tensor that PyTorch makes inside, so that no address is used twice."""

    def __init__(self, given: tuple):
        super().__init__()
        self.tensors = [x for x in given if isinstance(x, Tensor)]
        self.numbers = {x.untyped_storage().data_ptr(): i for i, x in enumerate(self.tensors)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.tensors += [
            x for x in as_tuple(tuple(found) if isinstance(found, list) else found) if isinstance(x, Tensor)
        ]
        return found

    def place(self, address: int) -> tuple[int, int]:
        """(the number of the memory: first arguments, then by first use; bytes after its start)."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.tensors}
        (start,) = [start for start, size in storages.items() if start <= address < start + max(size, 1)]
        return self.numbers.setdefault(start, len(self.numbers)), address - start


def described(kept: Kept, value):
    """A launch's argument, with memory by its place: of own code a tensor, of a plan an address where that has one."""
    if isinstance(value, Tensor):
        return kept.place(value.data_ptr())
    if isinstance(value, TensorDescriptor):
        base = value.base if isinstance(value.base, int) else value.base.data_ptr()
        return kept.place(base), tuple(value.shape), tuple(value.strides), tuple(value.block_shape), value.padding
    if type(value) is tuple:
        return tuple(described(kept, each) for each in value)
    return type(value), value


def like(kept: Kept, value, wanted):
    """`described` for an argument of a plan, whose addresses stand where `wanted` has a tensor."""
    if isinstance(wanted, Tensor):
        assert type(value) is int, "an address"
        return kept.place(value)
    if type(wanted) is tuple:
        return tuple(like(kept, a, b) for a, b in zip(value, wanted, strict=True))
    return described(kept, value)


@interpreted
@pytest.mark.parametrize(
    "sizes, dtype", [(SMALL, torch.float32), (SMALL, torch.float16), (WIDE, torch.float16)], ids=["32", "16", "wide"]
)
def test_a_plan_launches_on_the_memory_that_the_operations_own_code_gives(sizes, dtype, monkeypatch):
    every = calls(sizes, dtype)
    launched = launches_of_plans(monkeypatch)
    descriptors = 0
    for name, values in every:
        planned, seen = operation.planned(Registered.all[name].run), []
        for seed in range(4):
            given = again(values, seed)
            launched.clear()
            with torch._C._AutoDispatchBelowAutograd(), Kept(given) as kept:
                planned(*given)
            seen.append((kept, list(launched)))
        (kept, wanted), *_, (kept_by_plan, found) = seen
        assert len(found) == len(wanted)
        for (kernel, where, arguments), (kernel_wanted, where_wanted, arguments_wanted) in zip(found, wanted):
            assert (kernel, where) == (kernel_wanted, where_wanted), name
            a = [like(kept_by_plan, x, y) for x, y in zip(arguments, arguments_wanted, strict=True)]
            assert a == [described(kept, y) for y in arguments_wanted], (name, kernel)
            descriptors += sum(isinstance(y, TensorDescriptor) for y in arguments_wanted)
    assert descriptors > 0 or sizes is SMALL


@interpreted
def test_memory_is_freed_and_a_new_tensor_at_an_old_address_is_read_right(monkeypatch):
    launched = launches_of_plans(monkeypatch)
    planned, buffers = function(Kernel()), [torch.empty(64) for _ in range(2)]
    for i in range(8):
        x = buffers[i % 2].view(4, 16).copy_(torch.arange(64.0).view(4, 16) + i)
        with torch._C._AutoDispatchBelowAutograd():
            found = planned(x, 3)
        torch.testing.assert_close(found, x[1:].double().mm(x[1:].double().t()).float())
        _, _, (address, box) = launched[-1]
        base = box.base if isinstance(box.base, int) else box.base.data_ptr()
        assert base == x.data_ptr() and (i < 2 or address == base + 64)
    memory = [weakref.ref(buffer.untyped_storage()) for buffer in buffers]
    launched.clear()  # whose first two launches hold the tensor
    del x, box, address, buffers
    gc.collect()
    assert [ref() for ref in memory] == [None, None]


@interpreted
def test_a_plan_frees_each_tensor_after_its_last_use():
    """At each operation, fewer of those before are alive than a plan would hold that kept them to its end."""
    alive: list[int] = []

    class Watch(TorchDispatchMode):
        made: list[weakref.ref] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            self.made.append(weakref.ref(found))
            alive.append(sum(ref() is not None for ref in self.made))
            return found

    def run(x):
        for _ in range(6):
            x = x + 1
        return x

    planned = operation.planned(run)
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(2):
            planned(torch.zeros(3))
        x = torch.zeros(3)
        with Watch():
            found = planned(x)
    assert alive == [1, 2, 2, 2, 2, 2] and found.tolist() == [6.0] * 3


@pytest.mark.slow
def test_a_plan_hands_a_compiled_kernel_what_triton_hands_it(tmp_path):
    """For each kind of argument, with Triton's own front end and compiler, under a driver without a GPU."""
    file = Path(__file__).parents[1] / "helpers" / "known_launches.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= dict(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True)
    assert done.stdout == "21 alike\n", done.stderr
