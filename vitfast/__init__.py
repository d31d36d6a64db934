"""Vision Transformers on Triton kernels: a ViT, and a drop-in for timm, Hugging Face and torchvision."""

import importlib.machinery
import importlib.util
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import InputError
from .version import __version__

if TYPE_CHECKING:  # at run time they are imported at their first use: `vitfast --help` needs no torch
    from . import adapters, backend, ops
    from .adapters import accelerate, acceleration_report, restore
    from .eval.embedder import Embedder as Embedder
    from .eval.pixels import transform as transform
    from .model.checkpoint.load import load_checkpoint
    from .model.graphs import graphed
    from .model.vit import ViT
    from .ops import batch_invariant
    from .ops import reference as ref  # noqa: F401
    from .ops.packed import PackedImages, pack
else:  # with a `__getattr__`, type checkers would accept any name

    def __getattr__(name: str):
        """A public name, or a module by its name, imported at its first use."""
        if name in _HOMES:
            found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
            found = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


__all__ = [
    "InputError",
    "PackedImages",
    "ViT",
    "__version__",
    "accelerate",
    "acceleration_report",
    "adapters",
    "backend",
    "batch_invariant",
    "graphed",
    "load_checkpoint",
    "ops",
    "pack",
    "restore",
]  # not Embedder and transform: they need timm, torchvision and Pillow, and `from vitfast import *` only the core

_HOMES = {
    "Embedder": "eval.embedder",
    "PackedImages": "ops.packed",
    "ViT": "model.vit",
    "accelerate": "adapters",
    "acceleration_report": "adapters",
    "batch_invariant": "ops",
    "graphed": "model.graphs",
    "load_checkpoint": "model.checkpoint.load",
    "pack": "ops.packed",
    "restore": "adapters",
    "transform": "eval.pixels",
}


def __dir__() -> list[str]:
    return sorted({*__all__, "Embedder", "transform"})


class _WithTorch:
    """Finds torch, and imports the operations right after torch, which registers them there.

    An error of the operations does not stop torch's import: another thread may be importing them and wait for torch,
    and any other error is raised at their first use.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == "torch" else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module) -> None:
                run(module)
                with suppress(Exception):
                    importlib.import_module(f"{__name__}.ops")

            spec.loader.exec_module = exec_module
        return spec


if "torch" in sys.modules or os.environ.get("VITFAST_BATCH_INVARIANT"):  # the mode acts on PyTorch's operations too
    from . import ops  # noqa: F811
else:
    sys.meta_path.insert(0, _WithTorch)
