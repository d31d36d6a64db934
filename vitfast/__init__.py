"""vitfast: faster Vision Transformers, a drop-in for timm, Hugging Face and torchvision."""

from . import ops
from .adapters import accelerate, acceleration_report, restore
from .checkpoint import load_checkpoint
from .errors import InputError
from .model import ViT
from .packed import PackedImages, pack
from .version import __version__

__all__ = [
    "InputError",
    "PackedImages",
    "ViT",
    "__version__",
    "accelerate",
    "acceleration_report",
    "load_checkpoint",
    "ops",
    "pack",
    "restore",
]
