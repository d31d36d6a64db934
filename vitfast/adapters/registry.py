"""The classes that vitfast has a subclass of, and how a module gets it."""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

from torch import nn

from ..errors import InputError
from ..ops.fusable import full_name, own_forward
from . import hugging_face, libraries, patch_and_norm, subclasses, timm
from .check import checked_class, checked_leaf, message
from .known_classes import LAYER_NORMS, RMS_NORMS
from .layers import unknown_member_reason
from .mlp import mlp_and_class
from .packed_models import TOWERS, tower_class
from .specs import Known, Layer

# By full names, so that no library is imported for them.
CLASSES: dict[str, Known] = timm.CLASSES | hugging_face.CLASSES | libraries.CLASSES
_NOTHING = Known()
_registered: dict[type, Known] = {}  # by users
_checked: dict[type, type | str | None] = {nn.Conv2d: patch_and_norm.Projection}  # what the checks gave

# Stems for which there is no operation.
_STEMS = {
    nn.Linear: "a linear layer of patches that were cut before",
    nn.Conv3d: "a patch projection in three dimensions",
}


def _known(cls: type) -> Known:
    return _registered.get(cls) or CLASSES.get(full_name(cls), _NOTHING)


def _class_for(cls: type) -> type | str | None:
    """Our subclass of a library's class, why it is left, or None for one that vitfast does not know."""
    if "vitfast_class" in vars(cls):
        return None
    if cls not in _checked or _patched(cls):
        name, known = full_name(cls), _known(cls)
        if known.layers:
            _checked[cls] = checked_class(cls, known.layers)
        elif known.mlp is not None:
            _checked[cls] = checked_leaf(cls, partial(mlp_and_class, known.mlp))
        elif name in (*LAYER_NORMS, *RMS_NORMS):
            _checked[cls] = checked_leaf(cls, patch_and_norm.norm_and_class)
        else:
            _checked[cls] = tower_class(cls, name) if name in TOWERS else known.left
    return _checked[cls]


def _patched(cls: type) -> bool:
    """Whether a library's layer class, or one in it, was given another forward after it was checked."""
    forwards = getattr(_checked[cls], "vitfast_forwards", {})
    return cls not in _registered and any(each.forward is not forward for each, forward in forwards.items())


def _subclass_of(cls: type) -> type | None:
    own = _class_for(cls)
    return own if isinstance(own, type) else None


subclasses.subclass_of.append(_subclass_of)


def require_module(function: str, model: nn.Module) -> None:
    """Raises InputError if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def register(cls: type, *layers: Layer, places: tuple[str, ...] = ()) -> None:
    """Tells `accelerate` how your own layer class, or model, is built.

    layers: descriptions of the layer, one for each kind of attention and MLP that it is built with. places: in a model
    (or any module), the paths of its patch projection (nn.Conv2d) and of norms outside of the layers. Raises InputError
    if a description does not fit, or if a small layer's own forward and the operations give different results.
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
    try:
        checked = {cls: checked_class(cls, layers, of_users=True)} if layers else {}
    except Exception as error:
        raise InputError(f"register: {cls.__name__} is not as described: {message(error)}") from None
    _registered[cls] = Known(layers, tuple(places))
    _checked.pop(cls, None)
    _checked.update(checked)


def _instead(cls: type, lookup: Callable[[type], type | None]) -> type | None:
    """The class that `lookup` has for a class, or for the one below a class that torch mixed in.

    fully_shard, replicate and parametrisations mix one in.
    """
    found = lookup(cls)
    by_torch = cls.__module__.startswith("torch.") and (len(cls.__bases__) > 1 or "parametri" in cls.__module__)
    if found is not None or not by_torch:
        return found
    below = lookup(cls.__bases__[-1])
    return below and _mixed(cls, below)


def accelerated_class(cls: type) -> type | None:
    """Our subclass of a module's class; None where there is none."""
    return _instead(cls, _subclass_of)


def original_class(cls: type) -> type | None:
    """The library's class that ours is a subclass of; None where it is none of ours."""
    return _instead(cls, lambda cls: vars(cls).get("vitfast_class"))


_mixtures: dict[tuple[type, type], type] = {}


def _mixed(cls: type, below: type) -> type:
    """The same torch mix-in over another base class."""
    if (cls, below) not in _mixtures:
        # transformers' layers wrap the forward of every subclass, so the new class must not copy it.
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__", "forward")}
        _mixtures[cls, below] = type(cls)(cls.__name__, (*cls.__bases__[:-1], below), body)
        _mixtures[_mixtures[cls, below], cls.__bases__[-1]] = cls
    return _mixtures[cls, below]


def transformers_attention() -> ModuleType | None:
    """attention_interface.py, whose import registers "vitfast"; None where transformers is not imported."""
    if "transformers.modeling_utils" in sys.modules:
        with contextlib.suppress(ImportError):  # transformers 4 has no registry of masks
            from . import attention_interface

            return attention_interface
    return None


def replaceable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the layers, the modules that are replaced alone, and modules of classes that are left."""
    modules, found = dict(model.named_modules()), {}
    for name, module in modules.items():
        classes = type(module).__mro__
        if isinstance(_class_for(classes[0]), str) or any(hasattr(_class_for(cls), "vitfast_layer") for cls in classes):
            found[name] = module
        for child in (place for cls in classes for place in _known(cls).places):
            path = f"{name}.{child}".lstrip(".")
            if modules.get(path) is not None and not isinstance(modules[path], nn.Identity):
                found[path] = modules[path]
    return found


def replacement(module: nn.Module) -> type | str:
    """The class of ours that accelerate gives a module; or why it leaves the module."""
    cls = type(module)
    left, own = _class_for(cls), accelerated_class(cls)
    if isinstance(left, str):
        return left
    if cls in _STEMS:
        return _STEMS[cls]
    if own is None:
        derived = any(_subclass_of(base) for base in cls.__mro__)
        return f"{full_name(cls)} {'may have code of its own' if derived else 'is nothing that vitfast replaces'}"
    if own_forward(module):
        return "has a forward of its own, set on the instance"
    if issubclass(own, nn.Conv2d) and not patch_and_norm.is_patch_projection(module):
        return "not a patch projection"
    unknown = hasattr(own, "vitfast_layer") and unknown_member_reason(module, own.vitfast_class, own.vitfast_blocks)
    return unknown or own
