"""The ViT, its parts and its weights."""

from . import heads, layers, patch_embed, positions, relative
from .vit import ViT

__all__ = ["ViT"]

# Models pickled by earlier versions look for these classes and functions here.
layers.PatchEmbed, layers.PreLogits = patch_embed.PatchEmbed, heads.PreLogits
layers.AttentionPoolLatent = heads.AttentionPoolLatent
positions.relative_logits, positions.relative_attention = relative.relative_logits, relative.relative_attention
