"""Records calls that run a library's own code: the log says it once, the report until the next call."""

import logging
import weakref
from contextvars import ContextVar

import torch
from torch import nn

from ..ops._dispatch import constant_when_compiled
from ..ops.fusable import own_forward

PACKING = "packing"  # the part of a model around its layers
ATTENTION_ALONE = "attention only (set_attn_implementation)"  # the part of an attention layer in transformers' registry
DROPOUT = "attention dropout is active in training"
_log = logging.getLogger("vitfast")
quiet = ContextVar("vitfast.adapters.quiet", default=False)  # whether the log says nothing
said: set[tuple[str, str, str | None]] = set()  # class, part and reason, which the log does not say again
# By part, why the last call of a module ran the library's code: it asked for something that no operation does.
_asked: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()
# For modules with a forward of their own, set on the instance: the id of the forward in which an operation ran.
_wrapped: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@constant_when_compiled  # compiled code says it while it is compiled
def _say(kind: str, part: str, reason: str) -> None:
    if (kind, part, reason) not in said and not quiet.get():
        said.add((kind, part, reason))
        _log.warning("%s, %s: %s; the library's own code runs", kind, part, reason)


def library_runs(module: nn.Module, part: str, reason: str, of_this_call: bool = False) -> None:
    """Records that a part of this module runs the library's code.

    of_this_call: True for a reason that only the call shows, not the module.
    """
    if torch.compiler._is_exporting_flag:
        return
    _say(type(module).__name__, part, reason)
    if of_this_call and not torch.compiler.is_compiling():
        _asked.setdefault(module, {})[part] = reason


def operation_runs(module: nn.Module, part: str) -> None:
    """Records that a part of this module runs as an operation."""
    if torch.compiler.is_compiling():
        return
    if _asked and module in _asked:
        _asked[module].pop(part, None)
    if "forward" in module.__dict__:
        _wrapped[module] = id(module.__dict__["forward"])  # the forward itself would keep the module alive


def wrapped_away(module: nn.Module) -> bool:
    """Whether a module has a forward set on the instance in which no operation has run."""
    return own_forward(module) and _wrapped.get(module) != id(module.__dict__["forward"])


def last_call(module: nn.Module, part: str) -> str | None:
    """Why a module's last call, outside of compiled code, ran the library's code; None where not."""
    reason = _asked.get(module, {}).get(part)
    return reason and f"in its last call: {reason}"
