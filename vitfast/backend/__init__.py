"""`torch.compile(model, backend="vitfast")`: vitfast's operations in any ViT that is compiled.

In the graph of torch.compile all encoder blocks look alike, whatever the classes are called. The backend finds them by
structure, proves each one by numbers (proof.py), replaces it (rewrite.py) and hands the graph on to
another backend, Inductor unless told otherwise. `report()` says what it did.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, get_args, overload

import torch
from torch import nn
from torch.fx import GraphModule

from ..ops.blocks import Keep
from .parts import AS_THE_ORIGINAL, Choices, choices
from .reports import Entry, Report, joined
from .rewrite import rewrite_graph

__all__ = ["Entry", "Report", "compile", "compile_graph", "report"]

Model = TypeVar("Model")  # a module or a function
_log = logging.getLogger("vitfast")
_reports: deque[Report] = deque(maxlen=1000)  # one for each graph, the last one last


@overload
def compile(model: None = None, **options) -> Callable[[Model], Model]: ...
@overload
def compile(model: Model, **options) -> Model: ...
def compile(model: Any = None, **options) -> Any:
    """Calls torch.compile(model, backend="vitfast", **options), also if no entry point is installed.

    options: the arguments of torch.compile. Its own `options` may hold "inner", the backend for the rewritten graph
    ("inductor" by default, "eager", the name of another backend or a callable), "mode", Inductor's mode, "keep" and
    "residual_in_fp32" as in vitfast.accelerate, and options of the inner backend.
    """
    return torch.compile(model, backend=compile_graph, **options)


def compile_graph(module: GraphModule, inputs: list, *, mode: str | None = None, options: dict | None = None):
    """The backend that torch.compile calls with each graph; raises for unknown or invalid options.

    An error in recognition is logged by the logger "vitfast"; the graph keeps the replacements made before it.
    """
    options = dict(options or {})
    inner, mode = options.pop("inner", "inductor"), options.pop("mode", mode)
    chosen = Choices(**{name: options.pop(name) for name in Choices._fields if name in options})
    compiler = _inner_compiler(inner, mode, options)
    replace_blocks(module, chosen)
    return compiler(module, inputs)


def replace_blocks(module: GraphModule, chosen: Choices = AS_THE_ORIGINAL, is_probe: bool = False) -> Report:
    """Rewrites a captured graph in place, and reports on it; an error leaves the rest as it is.

    is_probe: whether the graph will not run, so that `report` leaves it out.
    """
    if chosen.keep not in get_args(Keep):
        raise ValueError(f"vitfast backend: keep must be 'least' or 'all', got {chosen.keep!r}")
    if chosen.residual_in_fp32 not in (None, True, False):
        raise ValueError(f"vitfast backend: residual_in_fp32 must be None or a bool, got {chosen.residual_in_fp32!r}")
    before, unchanged = choices.set(chosen), lambda x: x
    try:
        # These hooks keep those of an activation checkpoint around the call away from the proofs.
        with torch.autograd.graph.saved_tensors_hooks(unchanged, unchanged):
            done = joined([rewrite_graph(module), Report(_cut_by_ddp())])
    except Exception as error:
        _log.warning("vitfast backend: nothing more is replaced in this graph, an error in recognition", exc_info=True)
        done = Report([Entry("graph", "", f"{type(error).__name__}: {error}")])
        module.recompile()  # with the replacements before the error, of which none is left half written
    finally:
        choices.reset(before)
    if not is_probe:
        _reports.append(done)
        _log.info("vitfast backend: %s", done.summary())
    return done


def _cut_by_ddp() -> list[Entry]:
    """Returns an entry if Dynamo has cut the graph where the buckets of DistributedDataParallel end."""
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if ddp is None or torch._dynamo.utils.get_optimize_ddp_mode() != "ddp_optimizer":
        return []
    if sum(p.nbytes for p in ddp.parameters() if p.requires_grad) <= ddp.bucket_bytes_cap:
        return []
    why = "Dynamo has cut it at the buckets of DDP, within blocks too"
    return [Entry("graph", "", f"{why}; torch._dynamo.config.optimize_ddp = False does not")]


def _inner_compiler(inner: str | Callable, mode: str | None, options: dict) -> Callable:
    """Returns the inner backend with its mode and options, as torch.compile itself would pass them."""
    if inner == "vitfast" or inner is compile_graph:
        raise ValueError("vitfast backend: inner must be another backend, got vitfast itself")
    if not isinstance(inner, str) and not callable(inner):
        raise ValueError(f"vitfast backend: inner must be the name of a backend or a callable, got {inner!r}")
    if inner == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, None)
    return torch._TorchCompileWrapper(inner, mode, options, None)


def report(graphs: int = 1) -> Report:
    """Reports which parts of the last compiled graphs were replaced, and which were left and why.

    graphs: how many of the last graphs to join; a model with graph breaks is compiled as several. Print the result;
    `.replaced` and `.left` are lists of entries.
    """
    if not isinstance(graphs, int) or graphs < 1:
        raise ValueError(f"report: graphs must be a whole number of at least 1, got {graphs!r}")
    return joined(list(_reports)[-graphs:])
