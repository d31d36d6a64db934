"""A kernel under a driver without a GPU: what Triton hands to a kernel's launcher, and what a plan hands to it.

tests/kernels/test_plans.py runs this file, whose kernel must not be interpreted.
"""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vitfast.kernels import launch, plans
from vitfast.ops import operation

calls = []  # (compiled kernel's metadata, arguments of its launcher)


class Driver:
    """An H100 that keeps no kernel and makes no launch."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)

    class utils:
        load_binary = staticmethod(lambda *_: ("module", "function", 32, 0, 1024))
        get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})
        unload_module = staticmethod(lambda module: None)

    @staticmethod
    def launcher_cls(source, metadata):
        return lambda *arguments: calls.append((metadata, arguments))


@triton.jit
def twice(x):
    return 2 * x


@triton.jit
def kernel(x_ptr, out_ptr, pair, n, scale, more, CHANGE: tl.constexpr, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = CHANGE(tl.load(x_ptr + offs, mask=offs < n)) * scale + tl.load(pair[1])
    if FLAG:
        x += pair[0]
    if more is not None:
        x += more
    tl.store(out_ptr + offs, x, mask=offs < n)


X, OUT = torch.zeros(64), torch.zeros(64)
GIVEN = dict(x_ptr=X, out_ptr=OUT, pair=(4, X), n=16, scale=2.0, more=3, CHANGE=twice, FLAG=0, BLOCK=64, num_warps=4)
OTHERS = dict(
    x_ptr=[X[1:], X.half(), X.bfloat16()],
    pair=[(1, X), (16, X), (4, X[1:]), (4.0, X)],
    n=[1, 17, 2**31],
    scale=[1.0, -0.0, 1],
    more=[1, True, None, 3.0],
    FLAG=[1, True],
    num_warps=[8],
)


def with_tensors(value, given):
    """The value with the next of `given` in place of each tensor in it."""
    if isinstance(value, torch.Tensor):
        return next(given)
    return tuple(with_tensors(each, given) for each in value) if isinstance(value, tuple) else value


def tensors(values) -> list[torch.Tensor]:
    found = []
    for value in values:
        found += [value] if isinstance(value, torch.Tensor) else tensors(value) if isinstance(value, tuple) else []
    return found


def address(value):
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(address, value)) if isinstance(value, tuple) else value


def check(arguments: dict) -> None:
    """What the third call, a plan's, hands to the launcher is what Triton hands to it in the first."""

    def run(*given):
        left = iter(given)
        launch.launch(kernel, (3, 2), **{name: with_tensors(value, left) for name, value in arguments.items()})
        return torch.empty(1)

    planned, given = operation.planned(run), [x.as_strided(x.shape, x.stride()) for x in tensors(arguments.values())]
    with torch._C._AutoDispatchBelowAutograd():
        for _ in range(3):
            planned(*given)
    assert [type(plan) for plan in planned.plans.values()] == [plans.Plan], planned.plans
    (metadata, wanted), _, (found_metadata, found) = calls[-3:]
    last = len(kernel.arg_names)
    assert found_metadata is metadata and found[:6] == wanted[:6] and len(found) == len(wanted), arguments
    for a, b in zip(found[-last:], map(address, wanted[-last:]), strict=True):
        assert a is b or (type(a), a) == (type(b), b), (a, b)


driver.set_active(Driver)
every = [GIVEN, *(GIVEN | {name: value} for name, values in OTHERS.items() for value in values)]
for arguments in every:
    check(arguments)
print(f"{len(every)} alike")
