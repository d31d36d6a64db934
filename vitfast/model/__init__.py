"""The ViT, its parts and its weights."""

from .vit import ViT

__all__ = ["ViT"]
