"""The operations a ViT spends its time on: checks, then a kernel or its plain PyTorch twin."""

from ._mode import use_kernels
from .attention import attention
from .blocks import attention_block, mlp_block
from .layer_norm import add_layer_norm, layer_norm
from .linear_residual import linear_residual
from .mlp import linear_gelu, mlp
from .patch_embed import patch_embed

__all__ = [
    "add_layer_norm",
    "attention",
    "attention_block",
    "layer_norm",
    "linear_gelu",
    "linear_residual",
    "mlp",
    "mlp_block",
    "patch_embed",
    "use_kernels",
]
