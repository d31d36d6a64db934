"""Rewrites the graphs of accelerated models that a plain `torch.compile(model)` hands to Inductor.

Dynamo traces through a layer that runs compiled code, and captures the library's operations. So the same rewriting is a
pass of Inductor, before gradients. It rewrites the graphs with nodes that were captured in modules of an accelerated
model, and leaves others. It runs before Inductor looks into its cache, where an equal graph of another model may be.
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

_TIMING = "pre_grad_pass_timing"  # torch 2.11 has no such option, and runs passes early
_models: weakref.WeakKeyDictionary[nn.Module, Choices] = weakref.WeakKeyDictionary()


class Rewrite(CustomGraphPass):
    """A pass of Inductor, after the passes `others`; its uuid is a part of the key of Inductor's cache."""

    def __init__(self, others: list):
        self.others = others

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        by_id = {id(module): chosen for model, chosen in list(_models.items()) for module in model.modules()}
        # Dynamo's keys begin with the id of a module that a node was captured in.
        keys = (key.partition("@")[0] for node in graph.nodes for key in node.meta.get("nn_module_stack") or {})
        chosen = next((by_id[int(key)] for key in keys if key.isdecimal() and int(key) in by_id), None)
        if chosen is not None:
            replace_blocks(graph.owning_module, chosen)

    def uuid(self) -> list | None:
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return None if None in others else [*others, f"vitfast {__version__} {_source()}"]


@cache
def _source() -> str:
    """Returns a hash of the backend's source files."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


_timing_before = "default"


def _passes() -> list:
    """Returns Inductor's passes before gradients; torch 2.11 takes one pass, later versions take several."""
    passes = inductor.pre_grad_custom_pass
    return [] if passes is None else list(passes) if isinstance(passes, (list, tuple)) else [passes]


def _is_in() -> bool:
    return any(isinstance(each, Rewrite) for each in _passes())


def add(model: nn.Module, chosen: Choices) -> None:
    """Makes Inductor rewrite the graphs of a model from now on."""
    global _timing_before
    _models[model] = chosen
    if _is_in():
        return
    inductor.pre_grad_custom_pass = Rewrite(_passes())
    if hasattr(inductor, _TIMING):
        _timing_before = getattr(inductor, _TIMING)
        setattr(inductor, _TIMING, "early")


def discard(model: nn.Module) -> None:
    """Makes Inductor leave the graphs of a model; with the last model, the pass is removed."""
    _models.pop(model, None)
    if _models or not _is_in():
        return
    left = [other for each in _passes() for other in (each.others if isinstance(each, Rewrite) else [each])]
    inductor.pre_grad_custom_pass = left if len(left) > 1 else left[0] if left else None
    if hasattr(inductor, _TIMING):
        setattr(inductor, _TIMING, _timing_before)
