"""Finds by structure the encoder layers of a model, and the modules around them.

A layer is a module in a list or sequence of modules of its class, with a norm and at least two weight matrices inside.
Around the layers are the largest modules without layers that hold a norm or a projection of patches: embeddings,
norms, pooling heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ..errors import InputError

_HOLDERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
MOST_MODULES = 40  # in one part around the layers: a decoder or a convolutional stem has more, and is taken apart


class Part(NamedTuple):
    """A module that is run through the backend.

    name: its name in the model. group: the same for modules that share compiled code, as the layers of one list do.
    """

    name: str
    module: nn.Module
    group: str
    is_layer: bool


def require_module(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: of a class of PyTorch, or with an eps, a weight (D,) and no children."""
    weight = module._parameters.get("weight")
    has_eps = any(isinstance(vars(module).get(name), float) for name in ("eps", "epsilon", "variance_epsilon"))
    of_torch = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    vectors = weight is not None and all(p is None or p.dim() == 1 for p in module._parameters.values())
    alone = not module._modules and not module._buffers
    return of_torch or (has_eps and vectors and alone and not isinstance(module, nn.GroupNorm))


def is_patch_projection(module: nn.Module) -> bool:
    """Whether a convolution cuts images into patches that do not overlap."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.kernel_size != (1, 1)


def is_ours(module: nn.Module) -> bool:
    """Whether a module is one of vitfast's own, which call the operations themselves."""
    return type(module).__module__.startswith("vitfast.")


def _is_layer(module: nn.Module) -> bool:
    vectors = any(p.dim() == 1 for m in module.modules() if not m._modules and not _matrices(m) for p in m.parameters())
    return vectors and sum(_matrices(m) for m in module.modules()) >= 2


def _matrices(module: nn.Module) -> int:
    return sum(p is not None and p.dim() == 2 and min(p.shape) > 1 for p in module._parameters.values())


def layers_of(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Returns the layers of a model that hold no other layer: name -> (group, layer).

    A model without lists of layers may be a layer itself.
    """
    layers: dict[str, tuple[str, nn.Module]] = {}
    for holder, module in model.named_modules():
        if isinstance(module, _HOLDERS):
            for name, child in module._modules.items():
                if child is not None and not isinstance(child, _HOLDERS) and _is_layer(child):
                    layers[f"{holder}.{name}".lstrip(".")] = f"{holder} {type(child).__name__}", child
    outer = {name[:i] for name in layers for i, letter in enumerate(name) if letter == "."}
    layers = {name: layer for name, layer in layers.items() if name not in outer and not is_ours(layer[1])}
    if layers or is_ours(model) or any(is_patch_projection(m) for m in model.modules()):
        return layers
    return {"": ("", model)} if _is_layer(model) else {}


def parts_of(model: nn.Module) -> list[Part]:
    """Returns the parts of a model, in its order; a module in two places comes once."""
    layers = layers_of(model)
    parts = [Part(name, module, group, True) for name, (group, module) in layers.items()]
    if "" not in layers:
        parts += [Part(name, module, f"{name} alone", False) for name, module in _around(model, "", set(layers))]
    order = {id(module): i for i, module in enumerate(model.modules())}
    unique = {id(part.module): part for part in reversed(parts)}
    return sorted(unique.values(), key=lambda part: order[id(part.module)])


def _around(module: nn.Module, name: str, layers: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the largest modules without layers that hold a norm or a projection of patches, by name."""
    holds_layers = any(layer == name or layer.startswith(f"{name}.") or not name for layer in layers)
    if is_ours(module):
        return
    if not holds_layers:
        inner = list(module.modules())
        if not any(is_norm(m) or is_patch_projection(m) for m in inner):
            return
        if len(inner) <= MOST_MODULES and type(module).forward is not nn.Module.forward:
            yield name, module
            return
    for child, inside in module._modules.items():
        path = f"{name}.{child}" if name else child
        if inside is not None and path not in layers:
            yield from _around(inside, path, layers)
