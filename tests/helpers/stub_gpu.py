"""A GPU that runs nothing, for all that Triton does before a kernel runs: CPU tensors are launched on it."""

import contextlib
from collections import Counter
from types import SimpleNamespace

import cubin
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from vitfast.kernels import tiles
from vitfast.tools.machine_code.model_launches import launching_on_meta


@contextlib.contextmanager
def stub_gpu(sm: int):
    """Yields a Counter of the kernels launched: found in Triton's cache, as compiling one raises AssertionError."""
    launched = Counter()
    utils = SimpleNamespace(
        get_device_properties=lambda device: dict(max_shared_mem=cubin.SHARED_LIMIT[tiles.table_of(sm)]),
        load_binary=lambda name, *_: (launched.update([name]), name, 32, 0, 1024),
    )
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", sm, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda src, metadata: lambda *_: launched.update([metadata.name]),
        utils=utils,
    )

    def compile_nothing(self, src, *_):
        raise AssertionError("Triton compiles a kernel")

    with contextlib.ExitStack() as stack:
        config, stages = triton.runtime.driver, CUDABackend.add_stages
        stack.callback(setattr, config, "_active", config._active)
        stack.callback(setattr, CUDABackend, "add_stages", stages)
        stack.callback(setattr, torch.cuda, "get_device_capability", torch.cuda.get_device_capability)
        config.set_active(driver)
        CUDABackend.add_stages = compile_nothing
        torch.cuda.get_device_capability = lambda device: divmod(sm, 10)
        stack.enter_context(launching_on_meta())
        stack.enter_context(tiles.using(sm=sm))
        yield launched
