"""Libraries that need not be installed: flash-attn 3 and 4, and QuACK.

Where one cannot be imported, its cases are skipped with the reason.

QuACK (github.com/Dao-AILab/quack, package quack-kernels) is called as its versions 0.6.4 and 0.6.5 are written. GEMMs
run with `tuned=True`, the default: the first call of a shape searches for their tiles.
"""

import functools
import importlib
from collections.abc import Callable

import pytest
from torch import Tensor

FLASH = {  # name -> package, the module of its public functions, which have a backward; 2 is in torch
    "flash-attn 3": ("flash_attn_3", "flash_attn_interface"),
    "flash-attn 4": ("flash_attn_4", "flash_attn.cute"),
}
QUACK = "quack"


def imported(package: str, module: str, name: str | None = None):
    """A module of a package, or what is called `name` in it; skips the case where there is no such thing."""
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except Exception as error:  # an import that looks for a GPU or a shared library may raise anything
        pytest.skip(f"{package} cannot be used: {error}")


def library_function(package: str, module: str, name: str) -> Callable:
    """A function of a package; skips the case where that is not installed or has none of that name.

    Of several results it returns the first, because some versions of flash-attn return the logsumexp too.
    """
    function = imported(package, module, name)

    @functools.wraps(function)
    def first_result(*args, **options):
        result = function(*args, **options)
        return result[0] if isinstance(result, tuple) else result

    return first_result


# ---- QuACK


@functools.lru_cache(maxsize=16)
def in_fp32(parameter: Tensor) -> Tensor:
    """A copy in fp32, made once: QuACK's LayerNorm wants its weights so, and a model would keep them so."""
    return parameter.detach().float()


def quack_layer_norm() -> Callable:
    """LayerNorm of (..., D) with weight and bias (D,), eps 1e-6, forward alone: QuACK's has no autograd."""
    forward = imported("quack-kernels", "quack.rmsnorm", "layernorm_fwd")
    return lambda x, weight, bias: forward(x.flatten(0, -2), in_fp32(weight), in_fp32(bias)).view(x.shape)


def quack_linear_gelu() -> Callable:
    """gelu(x W^T + b) by one GEMM, forward alone: GELU's gradient needs another product."""
    gemm_act = imported("quack-kernels", "quack.gemm_interface", "gemm_act")

    def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = dict(bias=bias, activation="gelu_erf", store_preact=False)
        _, found = gemm_act(x.flatten(0, -2), weight.T, **options)
        return found.view(*x.shape[:-1], -1)

    return linear_gelu


def quack_mlp() -> Callable:
    """The MLP, forward and backward: GELU and its gradient are epilogues."""
    mlp = imported("quack-kernels", "quack.mlp", "mlp_func")
    return lambda x, w1, b1, w2, b2: mlp(x, w1, w2, "gelu_erf", bias1=b1, bias2=b2)


def quack_rms_norm() -> Callable:
    """RMSNorm of (..., D), forward and backward, eps 1e-6."""
    return imported("quack-kernels", "quack", "rmsnorm")
