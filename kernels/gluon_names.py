"""What product_gluon.py needs of Gluon, under the names of this Triton, and why it cannot be used where it cannot.

Gluon (`triton.experimental.gluon`) is the language below Triton's: layouts, shared memory, barriers and warps are written out. It is experimental, and
its names change: `async_copy_global_to_shared` of Triton 3.6 is `async_load` in 3.9.
"""

import torch
import triton

from .launch import INTERPRETED

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    jit, warp_specialize, Swizzled = gluon.jit, gl.warp_specialize, gl.NVMMASharedLayout
    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    FOUND = True
except (ImportError, AttributeError):
    gl = fence_async_shared = mbarrier = warpgroup_mma = warpgroup_mma_wait = warp_specialize = async_load = None
    TensorDescriptor = Swizzled = None
    FOUND = False

    def jit(function):
        """Leaves a kernel the Python function that it is: nothing launches it."""
        return function


__all__ = ["Swizzled", "TensorDescriptor", "async_load", "fence_async_shared", "gl", "jit", "mbarrier", "unsupported_reason", "warp_specialize"]
__all__ += ["warpgroup_mma", "warpgroup_mma_wait"]


def unsupported_reason(x: torch.Tensor, generation: int) -> str | None:
    """Why no kernel in Gluon can take x on a GPU of this generation; None where one can."""
    if not FOUND:
        return f"this Triton ({triton.__version__}) has another Gluon"
    if generation != 90:
        return "written for sm_90"
    if x.dtype not in (torch.float16, torch.bfloat16):
        return "for 16 bit"
    if x.device.type != "meta" and (INTERPRETED or x.device.type == "cpu"):
        return "Gluon has no interpreter"
    return None
