"""Installs compiled calls in place of the code of a model's parts, and removes them."""

from torch import nn

from ..backend import inductor, padding
from ..backend.eager import CompiledCall, Group, forget_others
from ..backend.parts import Choices
from .structure import Part


def install(model: nn.Module, parts: list[Part], residual_in_fp32: bool | None, keep: str, pack: bool) -> None:
    """Gives parts of a model compiled calls, in place of those of an earlier `accelerate`."""
    padding.discard(model)
    groups, chosen = {}, Choices(residual_in_fp32, keep)
    for part in parts:
        group = groups.get(part.group)
        if group is None:
            group = groups[part.group] = Group(type(part.module).__name__, chosen, part.is_layer)
        call = part.module._compiled_call_impl
        if call is None or isinstance(call, CompiledCall):  # else the user's own
            part.module._compiled_call_impl = CompiledCall(part.module, group)
    if not groups:
        return
    if pack:
        padding.add(model, chosen)
    inductor.add(model, chosen)
    forget_others()


def remove(model: nn.Module) -> None:
    """Undoes `install`."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, CompiledCall):
            del module.__dict__["_compiled_call_impl"]
    padding.discard(model)
    inductor.discard(model)
    forget_others()
