"""The classes that vitfast has a subclass of, and how a module gets it."""

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from ..ops import use_kernels
from ..submodules import full_name
from . import leaves
from .fallbacks import quiet
from .fused_blocks import unknown_member_reason

_ADAPTERS = {"timm": "timm", "transformers": "hugging_face", "torchvision": "torchvision"}


class Known(NamedTuple):
    """The classes that a model's libraries have.

    ours: library class -> our subclass. places: parent class -> its children that are leaves. left: a class's full
    name, or a library's -> why it is left, in words or from the module and those that it is in.
    """

    ours: dict[type, type]
    places: dict[type, tuple[str, ...]]
    left: dict[str, str | Callable[[nn.Module, tuple[nn.Module, ...]], str]]

    @property
    def originals(self) -> dict[type, type]:
        """Our subclass -> the library's class."""
        return {own: cls for cls, own in self.ours.items()}


def library_class(cls: type) -> type:
    """The library's class that one of ours is a subclass of."""
    return cls.__bases__[-1]


@functools.cache
def _adapter(library: str) -> tuple[ModuleType | None, dict[type, type], dict[str, str]]:
    """(adapter, None if not importable; library class -> ours; full name -> why it is left)."""
    version = f"{library} {getattr(sys.modules[library], '__version__', 'of this version')}"
    try:
        adapter = importlib.import_module(f".{_ADAPTERS[library]}", __package__)
    except (ImportError, AttributeError) as error:
        return None, {}, {library: f"{version} has other layers than vitfast knows ({error})"}
    ours, left = {library_class(cls): cls for cls in adapter.LEAVES}, dict(adapter.LEFT)
    for cls, make in adapter.BLOCKS.items():
        if _agrees(cls, make):
            ours[library_class(cls)] = cls
        else:
            left[full_name(library_class(cls))] = f"{version} computes it in another way than vitfast"
    return adapter, ours, left


def _agrees(cls: type, make: Callable[[], nn.Module]) -> bool:
    """Whether our class gives a small layer's numbers, by the operations and by the modules.

    Versions of a library differ; what this one does is found out once, on a layer of width 16 and three tokens.
    """
    plain = torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad(), use_kernels("off"), quiet()
    with contextlib.ExitStack() as stack:
        for context in (torch.random.fork_rng(devices=[]), *plain):
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


def known_classes(model: nn.Module) -> Known:
    """The known classes of this model's libraries. Imports no library that the model does not use."""
    found = Known({nn.Conv2d: leaves.Conv2d, nn.LayerNorm: leaves.LayerNorm}, {}, {})
    libraries = {cls.__module__.partition(".")[0] for module in model.modules() for cls in type(module).__mro__}
    for library in sorted(libraries & _ADAPTERS.keys()):
        adapter, ours, left = _adapter(library)
        found.ours.update(ours)
        found.left.update(left)
        found.places.update(adapter.PLACES if adapter else {})
    return found


def replacement_class(cls: type, table: dict[type, type]) -> type | None:
    """The table's entry for a class, or for the one below a class that torch mixed in.

    fully_shard, replicate and parametrisations mix one in.
    """
    if cls in table:
        return table[cls]
    by_torch = cls.__module__.startswith("torch.") and (len(cls.__bases__) > 1 or "parametri" in cls.__module__)
    return _mixed(cls, table[cls.__bases__[-1]]) if by_torch and cls.__bases__[-1] in table else None


_mixtures: dict[tuple[type, type], type] = {}


def _mixed(cls: type, below: type) -> type:
    """The same torch mix-in over another base class."""
    if (cls, below) not in _mixtures:
        # transformers' layers wrap the forward of every subclass: the new one gets its own.
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "forward")}
        _mixtures[cls, below] = type(cls)(cls.__name__, (*cls.__bases__[:-1], below), body)
        _mixtures[_mixtures[cls, below], cls.__bases__[-1]] = cls
    return _mixtures[cls, below]


def replaceable_modules(model: nn.Module, known: Known) -> dict[str, nn.Module]:
    """Blocks anywhere, leaves at their places, and classes listed in `left`, by name."""
    blocks = tuple(cls for cls, own in known.ours.items() if hasattr(own, "fused_blocks"))
    modules, found = dict(model.named_modules()), {}
    for name, module in modules.items():
        if isinstance(module, blocks) or full_name(type(module)) in known.left:
            found[name] = module
        children = (children for parent, children in known.places.items() if isinstance(module, parent))
        for child in itertools.chain.from_iterable(children):
            path = f"{name}.{child}".lstrip(".")
            if modules.get(path) is not None and not isinstance(modules[path], nn.Identity):
                found[path] = modules[path]
    return found


def unsupported_reason(module: nn.Module, known: Known, above: tuple[nn.Module, ...] = ()) -> str | None:
    """Why accelerate leaves a module, which is in those `above`; None where it gives it a class of ours."""
    cls = type(module)
    if full_name(cls) in known.left:
        reason = known.left[full_name(cls)]
        return reason if isinstance(reason, str) else reason(module, above)
    own = replacement_class(cls, known.ours)
    if own is None:
        derived = isinstance(module, tuple(known.ours))
        return f"{full_name(cls)} {'may have code of its own' if derived else 'is nothing that vitfast replaces'}"
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the instance"
    if issubclass(own, nn.Conv2d) and not leaves.is_patch_projection(module):
        return "not a patch projection"
    return unknown_member_reason(module, own.fused_blocks) if hasattr(own, "fused_blocks") else None
