"""Decides at each call whether an operation may read modules' parameters instead of calling them.

Nothing is kept between calls, so a layer that LoRA has replaced, or a hook or weight norm added later, is noticed.
Modules are read through their dictionaries, which takes a tenth of the time of attribute access.
"""

from typing import Any

from torch import nn
from torch.nn import Dropout
from torch.nn.modules.module import _has_any_global_hook

ExpectedModules = tuple[tuple[str, str, str, tuple[type, ...]], ...]


def expected_modules(modules: dict[str, type | tuple[type, ...]]) -> ExpectedModules:
    """(path, parent's path, name in it, types) for each of {"attn.qkv": nn.Linear, ...}, parents first."""
    expected = []
    for path, types in modules.items():
        parent, _, name = path.rpartition(".")
        expected.append((path, parent, name, types if isinstance(types, tuple) else (types,)))
    return tuple(expected)


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def has_instance_forward(module: nn.Module) -> bool:
    """Whether an instance has its own forward; the class's, which transformers sets there, is none."""
    forward = module.__dict__.get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def fallback_reason(expected: ExpectedModules, layer: nn.Module) -> str | None:
    """Why the modules of a layer must be called; None where an operation may read their parameters.

    expected: their exact types. The text contains no number: torch.compile traces this function, and a number may be
    symbolic there.
    """
    if _has_any_global_hook():
        return "a hook on all modules is set"
    modules: dict[str, Any] = {"": layer}  # by their path
    for path, parent, name, types in expected:
        module = modules[path] = modules[parent]._modules.get(name)
        cls = type(module)
        if cls not in types:
            return f"{path} is missing" if module is None else f"{path} is {full_name(cls)}"
        # A hook runs only if this module is called.
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"{path} has hooks"
        if has_instance_forward(module):
            return f"{path} has a forward of its own, set on the instance"
        if cls is Dropout and module.p > 0 and module.training:
            return f"{path} is active in training"
    return None
