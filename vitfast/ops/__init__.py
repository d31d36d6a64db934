"""The operations a ViT spends its time on: checks, then a kernel or its plain PyTorch twin."""

from .attention import attention
from .attention_block import attention_block
from .batch_invariance import batch_invariant
from .dispatch import use_kernels
from .flops import register_formulas
from .gated_mlp import gated_mlp, gated_mlp_block
from .layer_norm import add_layer_norm, layer_norm, rms_norm
from .linear_residual import linear_residual
from .mlp import linear_gelu, mlp
from .mlp_block import mlp_block
from .norm_linear import norm_linear
from .patch_embed import patch_embed

__all__ = [
    "add_layer_norm",
    "attention",
    "attention_block",
    "batch_invariant",
    "gated_mlp",
    "gated_mlp_block",
    "layer_norm",
    "linear_gelu",
    "linear_residual",
    "mlp",
    "mlp_block",
    "norm_linear",
    "patch_embed",
    "rms_norm",
    "use_kernels",
]

register_formulas()
