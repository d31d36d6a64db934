"""QuACK as modules of the same names, arguments and demands, computed by PyTorch."""

import sys
from types import ModuleType

import torch
import torch.nn.functional as F


def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert x.dim() == 2 and weight.dim() == bias.dim() == 1 and weight.dtype == bias.dtype == torch.float32
    assert not torch.is_grad_enabled()  # there is no autograd
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False):
    return F.rms_norm(x, weight.shape, weight, eps)


def gemm_act(A, B, C=None, bias=None, activation=None, alpha=1.0, preact_out=None, postact_out=None, store_preact=True):
    assert A.dim() == B.dim() == 2 and not torch.is_grad_enabled()  # there is no autograd
    preact = A @ B + bias
    return preact if store_preact else None, F.gelu(preact, approximate=GELU[activation])


def mlp_func(x, weight1, weight2, activation, bias1=None, bias2=None, fuse_grad_accum=False, tuned=True):
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate=GELU[activation]), weight2, bias2)


GELU = dict(gelu_erf="none", gelu_tanh_approx="tanh")
QUACK = {  # module -> its functions, with the arguments of quack-kernels 0.6.5
    "quack": [rmsnorm],
    "quack.rmsnorm": [layernorm_fwd],
    "quack.gemm_interface": [gemm_act],
    "quack.mlp": [mlp_func],
}


def install_quack(monkeypatch) -> None:
    for name, functions in QUACK.items():
        module = ModuleType(name)
        module.__dict__.update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, name, module)
