"""The initialisation of a ViT's weights: timm's modes."""

import math

import torch
from torch import nn

from . import positions
from .hybrid import HybridEmbed


@torch.no_grad()
def init_weights(vit: nn.Module, mode: str, needs_reset: bool) -> None:
    """Initialises every weight; with needs_reset also those that PyTorch's constructors initialise."""
    config = vit.config
    for name in vit._tables:
        if isinstance(getattr(vit, name), nn.Parameter):
            nn.init.trunc_normal_(getattr(vit, name), std=0.02)
    if config["pos_embed"] == "sincos2d":
        table = positions.sincos_2d(vit.patch_embed.grid_size, vit.embed_dim, positions.prefix_slots(vit))
        vit.pos_embed.copy_(table.to(vit.pos_embed.device))
    for token in (vit.cls_token, vit.reg_token):
        if token is not None:
            nn.init.normal_(token, std=1e-6)
    for name, module in vit.named_modules():
        if not name.startswith("patch_embed.backbone"):
            _init_module(module, name, mode, needs_reset)
    if needs_reset and isinstance(vit.patch_embed, HybridEmbed):
        vit.patch_embed.backbone.init_weights(zero_init_last=True)  # the last GroupNorm of a unit is 0, as Google's
    if isinstance(vit.head, nn.Linear):
        if mode == "jax_nlhb":
            nn.init.constant_(vit.head.bias, -math.log(vit.num_classes))
        if config["head_init_bias"] is not None:
            nn.init.constant_(vit.head.bias, config["head_init_bias"])


def _init_module(module: nn.Module, name: str, mode: str, needs_reset: bool) -> None:
    if isinstance(module, nn.Linear) and mode != "reset":
        if mode.startswith("jax") and name == "head":
            nn.init.zeros_(module.weight)
        elif mode == "moco" and name.endswith("qkv"):
            bound = math.sqrt(6 / (module.weight.shape[0] // 3 + module.weight.shape[1]))  # q, k and v are three layers
            nn.init.uniform_(module.weight, -bound, bound)
        elif mode == "moco" or mode.startswith("jax"):
            nn.init.xavier_uniform_(module.weight)
        else:
            nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None and mode.startswith("jax") and ".mlp." in name:
            nn.init.normal_(module.bias, std=1e-6)
        elif module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d) and mode.startswith("jax"):
        std = math.sqrt(1 / module.weight[0].numel()) / 0.87962566103423978  # LeCun's, after the cut at two deviations
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif needs_reset and hasattr(module, "reset_parameters"):
        module.reset_parameters()
