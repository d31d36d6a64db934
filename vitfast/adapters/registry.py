"""The classes that vitfast has a subclass of, and how a module gets it."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from ..errors import InputError
from ..ops.fusable import full_name, own_forward
from . import hugging_face, leaves, libraries, subclasses, timm
from .check import checked_class, checked_mlp, checked_norm, refused
from .descriptions import Layer
from .kinds import LAYER_NORMS, RMS_NORMS
from .layers import unknown_member_reason
from .towers import TOWERS, tower_class

_TABLES = (timm, hugging_face, libraries)
# By full names, so that no library is imported for them: descriptions of layers; children of models and modules that
# are leaves; classes that are left, with the reason.
LAYERS: dict[str, tuple[Layer, ...]] = {name: found for table in _TABLES for name, found in table.LAYERS.items()}
PLACES: dict[str, tuple[str, ...]] = {name: found for table in _TABLES for name, found in table.PLACES.items()}
LEFT: dict[str, str | Callable] = {name: found for table in _TABLES for name, found in table.LEFT.items()}

MLPS = {name: found for table in _TABLES for name, found in table.MLPS.items()}

_registered: dict[type, tuple[tuple[Layer, ...], tuple[str, ...]]] = {}  # by users: descriptions and places
_checked: dict[type, type | str | None] = {nn.Conv2d: leaves.Projection}  # what the checks gave


# Stems for which there is no operation.
_STEMS = {
    nn.Linear: "a linear layer of patches that were cut before",
    nn.Conv3d: "a patch projection in three dimensions",
}


class Known(NamedTuple):
    """The classes in a model.

    ours: library class -> our subclass. left: library class -> why it has none. originals: our subclass -> the
    library's class, of classes that are described otherwise by now too.
    """

    ours: dict[type, type]
    left: dict[type, str | Callable[[nn.Module, tuple[nn.Module, ...]], str]]
    originals: dict[type, type]


def _class_for(cls: type) -> type | str | None:
    """Our subclass of a library's class, why there is none, or None for one that vitfast does not know."""
    if "vitfast_class" in vars(cls):
        return None
    if cls not in _checked:
        name = full_name(cls)
        descriptions = _registered[cls][0] if cls in _registered else LAYERS.get(name, ())
        if descriptions:
            _checked[cls] = checked_class(cls, descriptions, of_users=cls in _registered)
        elif name in (*LAYER_NORMS, *RMS_NORMS):
            _checked[cls] = checked_norm(cls)
        elif name in TOWERS:
            _checked[cls] = tower_class(cls, name)
        else:
            _checked[cls] = checked_mlp(cls, *MLPS[name]) if name in MLPS else None
    return _checked[cls]


def _subclass_of(cls: type) -> type | None:
    own = _class_for(cls)
    return own if isinstance(own, type) else None


subclasses.subclass_of.append(_subclass_of)


def register(cls: type, *layers: Layer, places: tuple[str, ...] = ()) -> None:
    """Makes `accelerate` know a layer class, or a model, of your own.

    layers: how the layer is built, a description for each kind of attention and MLP it is used with. places: in a model
    (or any module), the paths of its patch projection (nn.Conv2d) and of norms outside of the layers. Raises InputError
    where a small layer gives other numbers by the operations than by its own forward, with what was found.
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise InputError(f"register: cls must be a class of modules, got {cls!r}")
    if isinstance(places, str) or not all(isinstance(place, str) for place in places):
        raise InputError(f"register: places must be a tuple of paths, got {places!r}")
    if not layers and not places:
        raise InputError(f"register: give a Layer, or places, for {cls.__name__}")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise InputError(f"register: layers must be vitfast.adapters.Layer, got {type(layer).__name__}")
    for layer in layers:
        why = refused(cls, layer)
        if why is not None:
            raise InputError(f"register: {cls.__name__} is not as described: {why}")
    _registered[cls] = layers, tuple(places)
    _checked.pop(cls, None)


def known_classes(model: nn.Module) -> Known:
    """The known classes in a model."""
    found = Known({}, {}, {})
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
    if any(cls.__module__.startswith("transformers.") for cls in classes):
        with contextlib.suppress(ImportError):  # transformers 4 has no registry of masks
            from . import attention_interface  # noqa: F401
    for cls in classes:
        own = _class_for(cls) or LEFT.get(full_name(cls))
        if "vitfast_class" in vars(cls):
            found.originals[cls] = cls.vitfast_class
        if isinstance(own, type):
            found.ours[cls], found.originals[own] = own, cls
        elif own is not None:
            found.left[cls] = own
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


def _places(module: nn.Module) -> tuple[str, ...]:
    """Paths of the leaves in a module."""
    found: list[str] = []
    for cls in type(module).__mro__:
        found += _registered[cls][1] if cls in _registered else PLACES.get(full_name(cls), ())
    return tuple(found)


def replaceable_modules(model: nn.Module, known: Known) -> dict[str, nn.Module]:
    """Blocks anywhere, leaves at their places, and classes listed in `left`, by name."""
    blocks = tuple(cls for cls, own in known.ours.items() if hasattr(own, "vitfast_layer"))
    modules, found = dict(model.named_modules()), {}
    for name, module in modules.items():
        if isinstance(module, blocks) or type(module) in known.left:
            found[name] = module
        for child in _places(module):
            path = f"{name}.{child}".lstrip(".")
            if modules.get(path) is not None and not isinstance(modules[path], nn.Identity):
                found[path] = modules[path]
    return found


def towers(model: nn.Module, known: Known) -> list[nn.Module]:
    """Modules around layers, which bring tokens into another form for them."""
    classes = ((module, replacement_class(type(module), known.ours)) for module in model.modules())
    return [module for module, own in classes if hasattr(own, "vitfast_tower")]


def unsupported_reason(module: nn.Module, known: Known, above: tuple[nn.Module, ...] = ()) -> str | None:
    """Why accelerate leaves a module, which is in those `above`; None where it gives it a class of ours."""
    cls = type(module)
    if cls in known.left:
        reason = known.left[cls]
        return reason if isinstance(reason, str) else reason(module, above)
    own = replacement_class(cls, known.ours)
    if cls in _STEMS:
        return _STEMS[cls]
    if own is None:
        derived = isinstance(module, tuple(known.ours))
        return f"{full_name(cls)} {'may have code of its own' if derived else 'is nothing that vitfast replaces'}"
    if own_forward(module):
        return "has a forward of its own, set on the instance"
    if issubclass(own, nn.Conv2d) and not leaves.is_patch_projection(module):
        return "not a patch projection"
    if not hasattr(own, "vitfast_layer"):
        return None
    return unknown_member_reason(module, own.vitfast_class, own.vitfast_blocks)
