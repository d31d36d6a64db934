"""Libraries that need not be installed: flash-attn 3 and 4, and QuACK.

Where one cannot be imported, its cases are skipped with the reason.

QuACK (github.com/Dao-AILab/quack, package quack-kernels) is called as its versions 0.6.4 and 0.6.5 are written. They
have a GEMM whose epilogue is the erf GELU, an MLP of it whose backward has the derivative in an epilogue too,
LayerNorm and RMSNorm. GEMMs run with `tuned=True`, the default: the first call of a shape searches for their tiles.
"""

import functools
import importlib
from collections.abc import Callable

import pytest
import torch
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


class _LayerNorm(torch.autograd.Function):
    """QuACK's LayerNorm of rows (M, D) with its backward, which it has as functions without autograd."""

    @staticmethod
    def forward(ctx, x, weight, bias, forward, backward):
        y, rstd, mean = forward(x, in_fp32(weight), in_fp32(bias), return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        ctx.backward = backward
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd, mean = ctx.saved_tensors
        dx, dw, db = ctx.backward(x, in_fp32(weight), dy.contiguous(), rstd, mean)
        return dx, dw.to(weight.dtype), db.to(weight.dtype), None, None


def quack_layer_norm() -> Callable:
    """LayerNorm of (..., D) with weight and bias (D,), eps 1e-6; weights go in as fp32 copies."""
    forward, backward = (imported("quack-kernels", "quack.rmsnorm", f"layernorm_{way}") for way in ("fwd", "bwd"))

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if torch.is_grad_enabled():
            return _LayerNorm.apply(rows, weight, bias, forward, backward).view(x.shape)
        return forward(rows, in_fp32(weight), in_fp32(bias)).view(x.shape)

    return layer_norm


def quack_linear_gelu() -> Callable:
    """gelu(x W^T + b) by one GEMM, forward alone.

    QuACK has GELU's gradient as the epilogue of the product that leads to it in backward, which is not in this.
    """
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
