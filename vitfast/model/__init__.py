"""The ViT, its parts and its weights."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .vit import ViT

__all__ = ["ViT"]


def __getattr__(name: str):
    """ViT, at its first use: arguments and presets need no PyTorch."""
    if name == "ViT":
        return import_module(".vit", __name__).ViT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
