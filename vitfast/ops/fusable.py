"""Decides at each call whether an operation may read modules' parameters instead of calling them.

Nothing is kept between calls, so a layer that LoRA has replaced, or a hook or weight norm added later, is seen.
Modules are read through their dictionaries, which takes a tenth of the time of attribute access.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import nn
from torch.nn import Dropout
from torch.nn.modules.module import _has_any_global_hook

Entry = TypeVar("Entry", bound=Any)
Modules = dict[str, nn.Module | None]  # by their path in the layer; "" is the layer
ExpectedModules = tuple[tuple[str, str, str, tuple[type, ...], tuple[str, ...] | None], ...]


class Replacements(tuple[Entry, ...], Generic[Entry]):
    """Entries on parts of a model; `why` says why one was left, None that an operation replaces it."""

    @property
    def replaced(self) -> list[Entry]:
        return [entry for entry in self if entry.why is None]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self if entry.why is not None]


def expected_modules(
    modules: dict[str, type | tuple[type, ...]], sequences: dict[str, tuple[str, ...]] | None = None
) -> ExpectedModules:
    """{"attn.qkv": nn.Linear, ...}, parents first, as (path, parent's path, name there, types, sequence).

    sequences: for a module that calls all its children, as nn.Sequential does, their names in order.
    """
    sequences = sequences or {}
    found = []
    for path, types in modules.items():
        parent, _, name = path.rpartition(".")
        types = types if isinstance(types, tuple) else (types,)
        found.append((path, parent, name, types, sequences.get(path)))
    return tuple(found)


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def own_forward(module: nn.Module) -> bool:
    """Whether the instance has a forward of its own, and not its class's, which transformers puts back."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def modules_of(expected: ExpectedModules, layer: nn.Module) -> Modules:
    """The modules of a layer at the expected paths, None where there is none."""
    modules: Modules = {"": layer}
    for path, parent, name, *_ in expected:
        holder = modules[parent]
        modules[path] = None if holder is None else holder._modules.get(name)
    return modules


def fallback_reason(
    expected: ExpectedModules, modules: Modules, idle_hooks: Callable[[nn.Module], bool] = lambda module: False
) -> str | None:
    """Why the modules must be called; None where an operation may read their parameters instead.

    expected: their exact types. idle_hooks(module): True where none of a module's hooks does anything now. The text
    contains no number: torch.compile traces this function, and a number may be symbolic there.
    """
    if _has_any_global_hook():
        return "a hook on all modules is set"
    for path, _, _, types, sequence in expected:
        module = modules[path]
        cls = type(module)
        if cls not in types:
            return f"{path} is missing" if module is None else f"{path} is {full_name(cls)}"
        if module is None:
            continue
        if sequence is not None and tuple(module._modules) != sequence:
            return f"{path} holds other modules than it did"
        # A hook runs only if this module is called.
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            if not idle_hooks(module):
                return f"{path} has hooks"
        if own_forward(module):
            return f"{path} has a forward of its own, set on the instance"
        if cls is Dropout and module.p > 0 and module.training:
            return f"{path} is active in training"
    return None
