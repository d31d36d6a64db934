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
MOST_MODULES = 40  # of what stands around the layers: a decoder or a convolutional stem has more, and goes in pieces


class Part(NamedTuple):
    """A module that is run through the backend.

    name: its name in the model. group: equal for modules that share compiled code, the layers of one list.
    """

    name: str
    module: nn.Module
    group: str
    is_layer: bool


def require_module(function: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")


def is_norm(module: nn.Module) -> bool:
    """Whether a module without children scales channels, and divides by what an eps keeps from zero."""
    weight = module._parameters.get("weight")
    has_eps = any(isinstance(vars(module).get(name), float) for name in ("eps", "epsilon", "variance_epsilon"))
    known = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
    vectors = weight is not None and all(p is None or p.dim() == 1 for p in module._parameters.values())
    alone = not module._modules and not module._buffers
    return known or (has_eps and vectors and alone and not isinstance(module, nn.GroupNorm))


def is_patch_projection(module: nn.Module) -> bool:
    """Whether a convolution cuts images into patches that do not overlap."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.kernel_size != (1, 1)


def is_ours(module: nn.Module) -> bool:
    """Whether a module runs the operations by itself."""
    return type(module).__module__.startswith("vitfast.")


def _is_layer(module: nn.Module) -> bool:
    vectors = any(p.dim() == 1 for m in module.modules() if not m._modules and not _matrices(m) for p in m.parameters())
    return vectors and sum(_matrices(m) for m in module.modules()) >= 2


def _matrices(module: nn.Module) -> int:
    return sum(p is not None and p.dim() == 2 and min(p.shape) > 1 for p in module._parameters.values())


def layers_of(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """By name, the layers of a model with the list that each is in: a layer holds no other layer.

    A model without lists of layers may be a layer itself.
    """
    found: dict[str, tuple[str, nn.Module]] = {}
    for holder, module in model.named_modules():
        if isinstance(module, _HOLDERS):
            for name, child in module._modules.items():
                if child is not None and not isinstance(child, _HOLDERS) and _is_layer(child):
                    found[f"{holder}.{name}".lstrip(".")] = f"{holder} {type(child).__name__}", child
    outer = {name[:i] for name in found for i, letter in enumerate(name) if letter == "."}
    found = {name: layer for name, layer in found.items() if name not in outer and not is_ours(layer[1])}
    if (
        not found
        and _is_layer(model)
        and not is_ours(model)
        and not any(is_patch_projection(m) for m in model.modules())
    ):
        found[""] = "", model
    return found


def parts_of(model: nn.Module) -> list[Part]:
    """The parts of a model, in its order; a module in two places comes once."""
    layers = layers_of(model)
    found = [Part(name, module, group, True) for name, (group, module) in layers.items()]
    if "" not in layers:
        found += [Part(name, module, f"{name} alone", False) for name, module in _around(model, "", set(layers))]
    order = {id(module): i for i, module in enumerate(model.modules())}
    unique = {id(part.module): part for part in reversed(found)}
    return sorted(unique.values(), key=lambda part: order[id(part.module)])


def _around(module: nn.Module, name: str, layers: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules without layers that hold something to replace."""
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
