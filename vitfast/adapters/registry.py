"""Which classes vitfast has a subclass of, in the libraries that a model is made of; and how a module's class is exchanged."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from ..ops import use_kernels
from . import leaves
from .halves import full_name, stranger

_ADAPTERS = {"timm": "timm", "transformers": "hugging_face", "torchvision": "torchvision"}


class Known(NamedTuple):
    """ours: library class -> our subclass. places: parent class -> its children that are leaves. left: why, by a class's full name."""

    ours: dict[type, type]
    places: dict[type, tuple[str, ...]]
    left: dict[str, str]


def base(cls: type) -> type:
    """The library's class that one of ours is a subclass of."""
    return cls.__bases__[-1]


@functools.cache
def _adapter(library: str) -> tuple[ModuleType | None, dict[type, type], dict[str, str]]:
    """(the adapter, library class -> ours, why classes are left by their full name); the adapter is None where it cannot be imported."""
    version = f"{library} {getattr(sys.modules[library], '__version__', 'of this version')}"
    try:
        adapter = importlib.import_module(f".{_ADAPTERS[library]}", __package__)
    except (ImportError, AttributeError) as error:
        return None, {}, {library: f"{version} has other layers than vitfast knows ({error})"}
    ours, left = {base(cls): cls for cls in adapter.LEAVES}, dict(adapter.LEFT)
    for cls, make in adapter.BLOCKS.items():
        if _agrees(cls, make):
            ours[base(cls)] = cls
        else:
            left[full_name(base(cls))] = f"{version} computes it in another way than vitfast"
    return adapter, ours, left


def _agrees(cls: type, make: Callable[[], nn.Module]) -> bool:
    """True where our class gives a small layer's numbers, both by the operations and by the library's modules.

    Versions of a library differ; what this one does is found out once, on a layer of width 16 and three tokens.
    """
    quiet = (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
        use_kernels("off"),
    )
    with contextlib.ExitStack() as stack:
        for context in quiet:
            stack.enter_context(context)
        try:
            block = make().float().eval()
            for parameter in block.parameters():
                nn.init.normal_(parameter, std=0.3)
            x = torch.randn(2, 3, 16, dtype=torch.float32)
            expected = block(x)
            block.__class__ = cls
            by_operations = block(x)
            for module in list(block.modules())[1:]:
                module.register_forward_hook(lambda *_: None)
            return all(torch.allclose(out, expected, atol=1e-4, rtol=1e-4) for out in (by_operations, block(x)))
        except Exception:  # another signature, other modules: not ours to know
            return False


def known(model: nn.Module) -> Known:
    """What the libraries of this model's classes have. Imports no library that the model does not use."""
    found = Known({nn.Conv2d: leaves.Conv2d, nn.LayerNorm: leaves.LayerNorm}, {}, {})
    libraries = {cls.__module__.partition(".")[0] for module in model.modules() for cls in type(module).__mro__}
    for library in sorted(libraries & _ADAPTERS.keys()):
        adapter, ours, left = _adapter(library)
        found.ours.update(ours)
        found.left.update(left)
        found.places.update(adapter.PLACES if adapter else {})
    return found


def exchanged(cls: type, table: dict[type, type]) -> type | None:
    """What the table has for a class, or for the class below one that torch mixed in (fully_shard, replicate, a parametrisation)."""
    if cls in table:
        return table[cls]
    below = cls.__bases__[-1] if cls.__bases__ else None
    return _mixed(cls, table[below]) if below in table and _mixed_by_torch(cls) else None


def _mixed_by_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.") and (len(cls.__bases__) > 1 or "parametri" in cls.__module__)


_mixtures: dict[tuple[type, type], type] = {}


def _mixed(cls: type, below: type) -> type:
    """The same mixture over another class; and back, the very class it was."""
    if (cls, below) not in _mixtures:
        # transformers' layers wrap the forward of every subclass: the new one gets its own.
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "forward")}
        _mixtures[cls, below] = type(cls)(cls.__name__, (*cls.__bases__[:-1], below), body)
        _mixtures[_mixtures[cls, below], cls.__bases__[-1]] = cls
    return _mixtures[cls, below]


def candidates(model: nn.Module, found: Known) -> dict[str, nn.Module]:
    """The modules that accelerate has an eye on, by name: blocks wherever they are, leaves at their places, and classes listed as left."""
    blocks = tuple(cls for cls, own in found.ours.items() if hasattr(own, "halves"))
    parts = dict(model.named_modules())
    chosen = {}
    for name, module in parts.items():
        if isinstance(module, blocks) or full_name(type(module)) in found.left:
            chosen[name] = module
        for child in (
            child for parent, children in found.places.items() if isinstance(module, parent) for child in children
        ):
            leaf = parts.get(f"{name}.{child}".lstrip("."))
            if leaf is not None and not isinstance(leaf, nn.Identity):
                chosen[f"{name}.{child}".lstrip(".")] = leaf
    return chosen


def refusal(module: nn.Module, found: Known) -> str | None:
    """Why accelerate leaves a candidate alone; None where it gives it a class of ours."""
    cls = type(module)
    if full_name(cls) in found.left:
        return found.left[full_name(cls)]
    own = exchanged(cls, found.ours)
    if own is None:
        return f"{full_name(cls)} {'may have code of its own' if isinstance(module, tuple(found.ours)) else 'is nothing that vitfast replaces'}"
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the instance"
    if issubclass(own, nn.Conv2d) and not leaves.is_patch_projection(module):
        return "not a patch projection"
    return stranger(module, own.halves) if hasattr(own, "halves") else None
