"""vitfast: faster Vision Transformers, a drop-in for timm, Hugging Face and torchvision."""

import importlib
import importlib.machinery
import sys

from . import ops
from .adapters import accelerate, acceleration_report, restore
from .errors import InputError
from .model import ViT
from .model.checkpoint import load_checkpoint
from .ops import batch_invariant, sdpa
from .ops.packed import PackedImages, pack
from .version import __version__

__all__ = [
    "InputError",
    "PackedImages",
    "ViT",
    "__version__",
    "accelerate",
    "acceleration_report",
    "batch_invariant",
    "load_checkpoint",
    "ops",
    "pack",
    "restore",
]

# Earlier names of modules that have moved: old documentation and pickled models use them. `ref` is a short name too.
MOVED = {
    "ref": "ops.reference",
    "packed": "ops.packed",
    "interpreter": "tools.interpreter",
    "verify": "tools.verify",
    "checkpoint": "model.checkpoint",
    "block": "model.block",
    "hybrid": "model.hybrid",
    "layers": "model.layers",
    "positions": "model.positions",
    "kernels.tiles": "kernels.configs.tiles",
}


class _Moved:
    """Finds a module by its earlier name: the module itself, not a copy."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        package, _, inner = name.partition(".")
        for old, new in MOVED.items() if package == __name__ else ():
            if inner == old or inner.startswith(f"{old}."):
                return importlib.machinery.ModuleSpec(name, _Moved, origin=f"{__name__}.{new}{inner[len(old) :]}")
        return None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module) -> None:
        sys.modules[module.__name__] = importlib.import_module(module.__spec__.origin)


def __getattr__(name: str):
    """The Embedder, the compile backend or a module by its earlier name, at its first use."""
    if name == "Embedder":  # it needs timm, torchvision and Pillow, which the core does not
        return importlib.import_module(f"{__name__}.eval.embedder").Embedder
    if name == "transform":
        return importlib.import_module(f"{__name__}.eval.pixels").transform
    if name == "backend" or name in MOVED:
        return importlib.import_module(f"{__name__}.{MOVED.get(name, name)}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sdpa.register()
sys.meta_path.insert(0, _Moved)  # before the finder of files, which would load a copy
