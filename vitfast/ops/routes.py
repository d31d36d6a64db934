"""Remembers which operation a call of a public function ended in: a call like it goes there without the checks."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels import tiles
from ..kernels.plans import MOST
from . import reference as ref
from .dispatch import current_mode
from .operation import noted

Function = TypeVar("Function", bound=Callable)
_SIMPLE = (int, float, bool, str, type(None))
_TENSORS = (Tensor, torch.nn.Parameter)


def _key(leaves: list) -> tuple | None:
    """All that the checks of these arguments go by; None where it may be more."""
    if torch.compiler._is_exporting_flag or tiles.changed() or ref.transformed():
        return None
    found = [current_mode(), torch.is_grad_enabled(), tiles.user_tables]
    for x in leaves:
        kind = type(x)
        if kind in _SIMPLE:
            found += kind, x
        elif kind in _TENSORS and x.layout is torch.strided and (x.is_floating_point() or not ref.at_hand(x)):
            found += x.dtype, x.shape, x.device, x.requires_grad
        else:  # the checks read what is in offsets that the host has
            return None
    return tuple(found)


def _route(calls: list[tuple], leaves: list, found: Any) -> tuple | None:
    """The operation whose result a call returned, and its arguments: (index in leaves, -1 for a constant; constant)."""
    if len(calls) != 1 or calls[0][-1] is not found:
        return None
    (operation, values, _), at = calls[0], {id(x): i for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    places = [at.get(id(value)) if isinstance(value, Tensor) else -1 for value in values]
    if None in places or len(at) < sum(isinstance(x, Tensor) for x in leaves):  # it was made of others, or is two
        return None
    return operation, [(i, None if i >= 0 else value) for i, value in zip(places, values)]


def routed(function: Function) -> Function:
    """Decorates a public operation."""
    routes: dict[tuple, tuple | None] = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        leaves = [*args, *kwargs.values()]
        if isinstance(rope := kwargs.get("rope"), tuple):
            leaves += rope
            leaves[len(args) + list(kwargs).index("rope")] = None
        key = _key(leaves)
        key = key and (len(args), *kwargs, *key)
        route = routes.get(key)
        if route is not None:
            operation, arguments = route
            return operation.run(*[value if i < 0 else leaves[i] for i, value in arguments])
        with noted() as calls:
            found = function(*args, **kwargs)
        if key is not None:
            if len(routes) >= MOST:
                routes.clear()
            routes[key] = _route(calls, leaves, found)
        return found

    return call  # type: ignore[return-value]
