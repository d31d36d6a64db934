"""Runs a module of a model through the compile backend, in place: the rewritten graph runs eagerly.

Dynamo's guards notice what changes later: replaced modules (LoRA), hooks, other forwards, modes. `nn.Module` calls a
`CompiledCall` in place of the module's own code; copies and pickles have none, and run the library's.
"""

import contextlib
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch.fx import GraphModule
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..kernels.tiles import batch_invariant
from ..ops.fusable import has_instance_forward
from . import replace_blocks
from .packed import CheckedSplits, lengths_as_symbols
from .parts import Choices
from .reports import Entry, Report

# The modules of a group may have 64 graphs: for kinds of layers, modes and sizes. torch 2.11 takes no limit and allows
# eight graphs for one code object, so that a group has eight functions there, of which each begins where one is full.
_HAS_LIMIT = "recompile_limit" in inspect.signature(torch.compile).parameters
FUNCTIONS, _LIMIT = (1, dict(recompile_limit=64)) if _HAS_LIMIT else (8, {})
# Dynamo shall guard on hooks, and on their default arguments and the dtypes of weights, which torch 2.11 leaves out.
_GUARDS = dict(
    skip_nnmodule_hook_guards=False,
    use_recursive_dict_tags_for_guards=False,
    skip_guards_on_constant_func_defaults=False,
)
_ARGUMENT_TYPES = (Tensor, int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, tuple, list)
_WRAPPED_CALL = nn.Module._wrapped_call_impl.__code__
_count = itertools.count()
_compiling = contextlib.ExitStack()  # of Dynamo's configuration while it compiles a part
_compiled_by_others = {"before"} if torch._dynamo.utils.counters["frames"] else set()


class _Thread(threading.local):
    """Holds, for each thread, the call that it runs."""

    call: "CompiledCall | None" = None


_thread = _Thread()


def bernoulli_(x: Tensor, p: float) -> Tensor:
    """Tensor.bernoulli_ without a guard on p, so that layers with other rates of drop path share a graph."""
    return x.bernoulli_() if isinstance(p, torch.SymFloat) else x.bernoulli_(p)


torch.compiler.allow_in_graph(bernoulli_)


class _Draws(TorchFunctionMode):
    """Replaces Tensor.bernoulli_ by `bernoulli_` in a function that Dynamo captures."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.bernoulli_ and len(args) == 2 and not kwargs:
            return bernoulli_(*args)
        return func(*args, **(kwargs or {}))


class _Uncompiled(Exception):
    """Dynamo did not compile a call: it is switched off, or in a mode that it leaves alone."""


def _run(module, args, kwargs):
    """Runs a module's own forward if it is compiled, but raises _Uncompiled if it is not."""
    if not torch.compiler.is_compiling():
        raise _Uncompiled
    if module.training:
        with _Draws():
            return type(module).forward(module, *args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def _run_with_lengths(module, args, kwargs):
    with CheckedSplits():
        return _run(module, args, kwargs)


def _run_pieces(module, args, kwargs):
    return type(module).forward(module, *args, **kwargs)


# The ways to capture a layer, each tried where the one before has failed: in one graph, in one graph that may read
# lengths as numbers, and in several graphs that Dynamo cuts.
_WAYS = (_run, _run_with_lengths, _run_pieces)
PIECES = 2


def _compiled(name: str, compile_graph: Callable, way: int = 0, **how) -> Callable:
    """Compiles one of _WAYS as a new code object, by which Dynamo counts graphs and remembers sizes."""
    code = _WAYS[way].__code__.replace(co_name=f"vitfast_{next(_count)}_{name}")
    function = types.FunctionType(code, globals(), code.co_name)
    return torch.compile(function, backend=compile_graph, fullgraph=way != PIECES, **_LIMIT, **how)


class _Decided(Exception):
    """Ends a call after its graph was captured, before the graph runs."""


def _capture_graph(module: GraphModule, inputs: list) -> Callable:
    """The backend that reports what would be replaced in a graph; its calls raise _Decided."""
    report = replace_blocks(module, _thread.call.group.choices, is_probe=True)

    def call(*_):
        _thread.call.ran.append(report)
        raise _Decided

    return call


def _patch_config(_) -> None:
    """Dynamo's callback before it compiles: sets the configuration that a call of ours needs."""
    if _thread.call is None:
        _compiled_by_others.add("later")
    else:
        _thread.call.group.patch_config(_compiling, _thread.call.way)


def _watch_dynamo() -> None:
    """Registers `_patch_config` and its undoing with Dynamo again, since its `reset` discards both."""
    if _patch_config not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_patch_config)
        callback_handler.register_end_callback(lambda _: _compiling.close())


def forget_others() -> None:
    """Discards all graphs of torch.compile from before a model was accelerated or restored."""
    if _compiled_by_others:
        torch._dynamo.reset()
        _compiled_by_others.clear()
    _watch_dynamo()


class Group:
    """Compiled functions that modules share: for the sizes of the first call, and for all other sizes.

    is_layer: whether the modules are encoder layers.
    """

    def __init__(self, name: str, choices: Choices, is_layer: bool = True):
        self.name, self.choices, self.is_layer = name, choices, is_layer
        self.sizes: torch.Size | None = None
        self.functions: dict[tuple[bool, int], list[Callable]] = {}
        self.capture: Callable | None = None

    def compile_graph(self, module: GraphModule, inputs: list) -> Callable:
        """The backend of these modules: a graph's run adds the graph's report to `ran` of the current call."""
        report, run = replace_blocks(module, self.choices), module.forward

        def call(*arguments):
            _thread.call.ran.append(report)
            return run(*arguments)

        return call

    def patch_config(self, until_compiled: contextlib.ExitStack, way: int) -> None:
        """Sets Dynamo's options: _GUARDS, and for the second of _WAYS symbols for lengths that layers read."""
        until_compiled.enter_context(torch._dynamo.config.patch(**_GUARDS))
        if way == 1:
            until_compiled.enter_context(lengths_as_symbols())

    def run_library(self, call: "CompiledCall", args: tuple, kwargs: dict):
        """Runs a module's own code, for the reason call.why."""
        module = call.module()
        return type(module).forward(module, *args, **kwargs)

    def is_first(self, x: Tensor) -> bool:
        """Whether an input takes the functions of the first call: by its sizes, or as an image (4 axes).

        For images, Dynamo finds out by itself which sizes change: a layer with windows takes half a minute to compile
        if all are dynamic from the start.
        """
        self.sizes = x.shape if self.sizes is None else self.sizes
        return x.shape == self.sizes or (self.is_layer and x.dim() == 4)

    def function(self, x: Tensor, place: int, way: int) -> Callable:
        """Returns function number `place` of those for this input's sizes and way, compiled if it is new."""
        functions = self.functions.setdefault((first := self.is_first(x), way), [])
        if place == len(functions):
            functions.append(_compiled(self.name, self.compile_graph, way, dynamic=None if first else True))
        return functions[place]


def why_library(x: Tensor | None, args: tuple, kwargs: dict) -> str | None:
    """Returns why a call must run the library's own code, or None; x: its first tensor."""
    if torch._C._len_torch_function_stack():
        if not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
            return "a TorchFunctionMode is at work"
    if x is None or type(x) not in (Tensor, nn.Parameter) or x.is_nested:
        return "its input is no tensor" if x is None else f"its input is a {type(x).__name__}"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is at work"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is at work"
    if _has_any_global_hook():
        return "a hook on all modules is set"
    for value in (*args, *kwargs.values()):
        if not isinstance(value, _ARGUMENT_TYPES):
            return f"the call has a {type(value).__name__}"
    return None


def replica_of(module: nn.Module | None, caller: types.FrameType) -> nn.Module | None:
    """Returns nn.DataParallel's replica of a module if that is what a frame calls, else None."""
    called = caller.f_locals["self"] if caller.f_code is _WRAPPED_CALL else module
    return None if called is module else called


class _Forward:
    """A module's `forward` while its hooks run; it is pickled and copied as the class's forward."""

    def __init__(self, call: "CompiledCall"):
        self.call = call

    def __call__(self, *args, **kwargs):
        return self.call.forward(*args, **kwargs)

    def __reduce__(self):
        return getattr, (self.call.module(), "forward")


def _text_of(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # Dynamo wraps errors of our backend
    first = str(error).strip().partition("\n")[0]
    return f"it cannot be captured ({first or type(error).__name__})"


class CompiledCall:
    """The call that runs in place of a module's own code.

    way: the one of _WAYS that captured the last call. ran: the reports on the graphs that it ran. why: why it ran the
    library's code. failed: for each `_mode_of` the module, the errors of the ways that are not tried again.
    """

    def __init__(self, module: nn.Module, group: Group):
        self.module, self.group = weakref.ref(module), group
        self.ways, self.way = len(_WAYS) if group.is_layer else 1, 0
        self.ran: list[Report] = []
        self.why: str | None = None
        self.failed: dict[tuple, list[str]] = {}
        self.around_forward = _Forward(self)

    def __call__(self, *args, **kwargs):
        module = self.module()
        if torch.compiler.is_compiling():  # the graph of the model around it is rewritten as a whole, or exported
            return module._call_impl(*args, **kwargs)
        if (replica := replica_of(module, sys._getframe(1))) is not None:
            return replica._call_impl(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            self.ran, self.why = [], "torch.jit.trace is at work"
            return module._call_impl(*args, **kwargs)
        set_forward = module.__dict__.get("forward")  # on the instance
        if has_instance_forward(module) and set_forward is not self.around_forward:
            self.ran, self.why = [], "it has a forward of its own, set on the instance"
            return module._call_impl(*args, **kwargs)
        if not _has_hooks(module):
            return self.forward(*args, **kwargs)
        module.__dict__["forward"] = self.around_forward  # its hooks run as ever, around the compiled code
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            if module.__dict__.get("forward") is self.around_forward:  # a hook may have set another one
                del module.__dict__["forward"]
                if set_forward is not None and set_forward is not self.around_forward:
                    module.__dict__["forward"] = set_forward

    def forward(self, *args, **kwargs):
        """Runs the module's forward, compiled where it can be."""
        module, x = self.module(), next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        failed = self.failed.get(_mode_of(module), []) if self.failed else []
        self.way, self.ran = len(failed), []
        self.why = why_library(x, args, kwargs) or (None if self.way < self.ways else failed[0])
        if self.why is not None:
            return self.group.run_library(self, args, kwargs)
        before, _thread.call = _thread.call, self
        _watch_dynamo()
        try:
            if batch_invariant():  # it has switched torch.compile off, which is needless for graphs that run eagerly
                with torch.compiler.set_stance("default"):
                    return self._run(module, x, args, kwargs)
            return self._run(module, x, args, kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self.why = "there are as many graphs of such layers as there may be"
        except torch._dynamo.exc.TorchRuntimeError as error:  # the library's code raises its own error for this input
            self.why = _text_of(error)
        except torch._dynamo.exc.TorchDynamoException as error:
            return self._run_next_way(module, _text_of(error), args, kwargs)
        except _Uncompiled:
            self.why = "torch.compile is switched off here"
        except RuntimeError as error:  # from the check in packed.split_pieces
            if "Runtime assertion failed" not in str(error):
                raise
            self.why = "an image has one token"
        finally:
            _thread.call = before
        return self.group.run_library(self, args, kwargs)

    def _run_next_way(self, module: nn.Module, why: str, args: tuple, kwargs: dict):
        """Adds `why` to the failed ways and runs the next way; if that raises too, removes `why` again."""
        failed = self.failed.setdefault(_mode_of(module), [])
        place = len(failed)
        failed.append(why)
        try:
            return self.forward(*args, **kwargs)
        except BaseException:
            del failed[place:]
            raise

    def _run(self, module: nn.Module, x: Tensor, args: tuple, kwargs: dict):
        for place in range(FUNCTIONS - 1):
            with contextlib.suppress(torch._dynamo.exc.FailOnRecompileLimitHit):
                return self.group.function(x, place, self.way)(module, args, kwargs)
        return self.group.function(x, FUNCTIONS - 1, self.way)(module, args, kwargs)

    def entries(self) -> list[Entry] | None:
        """Returns entries on the last call, or, before any, on a captured graph; None if that needs a call."""
        if not self.ran and not self.failed and self.why is None:
            ran = self._captured()
            return None if ran is None else list(ran)
        whys = [failed[-1] for failed in self.failed.values() if failed and self.way == PIECES]
        cut = [Entry("whole", "", f"{why}; pieces are compiled") for why in whys[:1]]
        return [*cut, *(entry for report in self.ran for entry in report)]

    def _captured(self) -> Report | None:
        """Captures a graph of tokens in the module's width without running it; returns the report on it."""
        module, probe = self.module(), CompiledCall(self.module(), self.group)
        vectors = [p for p in module.parameters() if p.dim() == 1]
        if not vectors or any(isinstance(m, nn.Conv2d) for m in module.modules()):
            return None
        self.group.capture = self.group.capture or _compiled(self.group.name, _capture_graph)
        tokens = vectors[0].new_zeros(2, 9, len(vectors[0]))
        before, _thread.call = _thread.call, probe
        try:
            self.group.capture(module, (tokens,), {})
        except Exception:  # _Decided, or the module needs other arguments
            pass
        finally:
            _thread.call = before
        return probe.ran[0] if probe.ran else None


def _has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or _has_any_global_hook())


def _mode_of(module: nn.Module) -> tuple[bool, bool, int]:
    """Returns (training, gradients on, the number of modules with hooks), by which ways fail."""
    return module.training, torch.is_grad_enabled(), sum(map(_has_hooks, module.modules()))
