"""A kernel under a driver without a GPU: what Triton hands to a kernel's launcher, and what a launch at once does.

tests/kernels/test_launch.py runs this file, whose kernel must not be interpreted.
"""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vitfast.kernels import launch

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


def check(arguments: dict) -> None:
    """A launch, the first and the second, is Triton's own in all that reaches the launcher."""
    kernel[(3, 2)](**arguments, enable_fp_fusion=True)
    (metadata, wanted), last = calls[-1], len(kernel.arg_names)
    for _ in range(2):
        launch.launch(kernel, (3, 2), **arguments)
        found = calls[-1]
        assert found[0] is metadata and found[1][:6] == wanted[:6] and len(found[1]) == len(wanted), arguments
        assert all(a is b or (type(a), a) == (type(b), b) for a, b in zip(found[1][-last:], wanted[-last:])), arguments


driver.set_active(Driver)
every = [GIVEN, *(GIVEN | {name: value} for name, values in OTHERS.items() for value in values)]
for arguments in every + every[::-1]:
    check(arguments)
through, run = [], type(kernel).run
type(kernel).run = lambda *_, **options: through.append(1) or run(*_, **options)
for arguments in every:
    launch.launch(kernel, (3, 2), **arguments)
print(f"{len(every)} at once, {len(through)} through Triton")
