"""Gluon for product_gluon.py, whatever its names are in this Triton, or why it cannot be used.

Gluon (`triton.experimental.gluon`) is the language below Triton's: layouts, shared memory, barriers and warps are
written out. It is experimental: `async_copy_global_to_shared` of Triton 3.6 is `async_load` in 3.9.
"""

import torch
import triton

from .launch import INTERPRETED

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    async_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    jit, MISSING = gluon.jit, ""
except (ImportError, AttributeError):
    gl = hopper = TensorDescriptor = async_load = None
    MISSING = f"this Triton ({triton.__version__}) has another Gluon"

    def jit(function=None, **_):
        """Leaves a function as it is: none is compiled."""
        return function or (lambda named: named)


__all__ = ["TensorDescriptor", "async_load", "gl", "hopper", "jit", "unsupported_reason"]


def unsupported_reason(x: torch.Tensor, generation: int) -> str | None:
    """Why a kernel in Gluon cannot take x on a GPU of this generation; None where it can."""
    if MISSING:
        return MISSING
    if generation != 90 or x.element_size() != 2:
        return "written for sm_90 and 16 bit"
    interpreted = x.device.type != "meta" and (INTERPRETED or x.device.type == "cpu")
    return "Gluon has no interpreter" if interpreted else None
