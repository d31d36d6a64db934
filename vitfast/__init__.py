"""vitfast: Vision Transformers trained and run faster, as a drop-in for timm, Hugging Face and torchvision."""

__version__ = "0.1.0"

from . import ops
from .adapters import accelerate, acceleration_report, restore
from .checkpoint import load_checkpoint
from .errors import InputError
from .model import ViT

__all__ = ["InputError", "ViT", "accelerate", "acceleration_report", "load_checkpoint", "ops", "restore"]
