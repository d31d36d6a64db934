"""Rewrites the graphs of accelerated models that a plain `torch.compile(model)` hands to Inductor.

Dynamo looks through a layer that runs compiled code, and hands its own operations on. So the same rewriting is a pass
of Inductor, before gradients. A graph is told by the modules that its nodes were captured in; others are left. The pass
runs before Inductor looks into its cache, as equal graphs of other models have other results there.
"""

import hashlib
import weakref
from functools import cache
from pathlib import Path

import torch._inductor.config as inductor
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from ..version import __version__
from . import replace_blocks
from .parts import Choices

_TIMING = "pre_grad_pass_timing"  # torch 2.11 has none, and runs passes early
_models: weakref.WeakKeyDictionary[nn.Module, Choices] = weakref.WeakKeyDictionary()


class Rewrite(CustomGraphPass):
    """The pass, behind the user's own; its uuid keeps Inductor's results apart from those without it."""

    def __init__(self, others: list):
        self.others = others

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        found = {id(module): chosen for model, chosen in list(_models.items()) for module in model.modules()}
        # Dynamo's keys begin with the id of a module that a node was captured in.
        keys = (key.partition("@")[0] for node in graph.nodes for key in node.meta.get("nn_module_stack") or {})
        chosen = next((found[int(key)] for key in keys if key.isdecimal() and int(key) in found), None)
        if chosen is not None:
            replace_blocks(graph.owning_module, chosen)

    def uuid(self) -> list | None:
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if None in others else [*others, f"vitfast {__version__} {_source()}"]


@cache
def _source() -> str:
    """Changes with the backend's code."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


_timing_before = "default"


def _passes() -> list:
    """Inductor's passes before gradients: torch 2.11 takes one, later versions several."""
    found = inductor.pre_grad_custom_pass
    return [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]


def _is_in() -> bool:
    return any(isinstance(each, Rewrite) for each in _passes())


def add(model: nn.Module, chosen: Choices) -> None:
    """Rewrites the graphs of a model from now on."""
    global _timing_before
    _models[model] = chosen
    if _is_in():
        return
    inductor.pre_grad_custom_pass = Rewrite(_passes())
    if hasattr(inductor, _TIMING):
        _timing_before = getattr(inductor, _TIMING)
        setattr(inductor, _TIMING, "early")


def discard(model: nn.Module) -> None:
    """Leaves the graphs of a model; after the last one the pass is taken out."""
    _models.pop(model, None)
    if _models or not _is_in():
        return
    left = [other for each in _passes() for other in (each.others if isinstance(each, Rewrite) else [each])]
    inductor.pre_grad_custom_pass = left if len(left) > 1 else left[0] if left else None
    if hasattr(inductor, _TIMING):
        setattr(inductor, _TIMING, _timing_before)
