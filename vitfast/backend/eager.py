"""Runs a module of a model through the compile backend, in place: the rewritten graph runs eagerly.

Dynamo's guards see what was changed since: replaced modules (LoRA), hooks, other forwards, modes. `nn.Module` calls a
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
from .packed import Lengths, lengths_as_symbols
from .parts import Choices
from .reports import Entry, Report

# How many graphs the modules of a group may have: kinds of layers, modes, sizes. torch 2.11 cannot be told, and allows
# eight for each code, so that several functions follow one another.
_TOLD = "recompile_limit" in inspect.signature(torch.compile).parameters
FUNCTIONS, _LIMIT = (1, dict(recompile_limit=64)) if _TOLD else (8, {})
# Guards are whole: on hooks, and on their default arguments and the dtypes of weights, which torch 2.11 leaves out.
_GUARDS = dict(
    skip_nnmodule_hook_guards=False,
    use_recursive_dict_tags_for_guards=False,
    skip_guards_on_constant_func_defaults=False,
)
_KNOWN = (Tensor, int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, tuple, list)
_WRAPPED_CALL = nn.Module._wrapped_call_impl.__code__
_count = itertools.count()
_compiling = contextlib.ExitStack()  # what is set while Dynamo compiles a part
_compiled_by_others = {"before"} if torch._dynamo.utils.counters["frames"] else set()


class _Thread(threading.local):
    """The call that a thread runs."""

    call: "CompiledCall | None" = None


_thread = _Thread()


def bernoulli_(x: Tensor, p: float) -> Tensor:
    """Tensor.bernoulli_, of which Dynamo need not know p: drop path's rate rises from layer to layer."""
    return x.bernoulli_() if isinstance(p, torch.SymFloat) else x.bernoulli_(p)


torch.compiler.allow_in_graph(bernoulli_)


class _Draws(TorchFunctionMode):
    """Makes one graph of layers that draw with different probabilities."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.bernoulli_ and len(args) == 2 and not kwargs:
            return bernoulli_(*args)
        return func(*args, **(kwargs or {}))


class _Uncompiled(Exception):
    """Dynamo did not compile a call: it is switched off, or in a mode that it leaves alone."""


def _run(module, args, kwargs):
    if not torch.compiler.is_compiling():
        raise _Uncompiled
    if module.training:
        with _Draws():
            return type(module).forward(module, *args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def _run_with_lengths(module, args, kwargs):
    with Lengths():
        return _run(module, args, kwargs)


def _run_pieces(module, args, kwargs):
    return type(module).forward(module, *args, **kwargs)


# The ways of capturing a layer, each where the one before fails: in one graph, in one graph in which lengths are read
# as numbers, and in the pieces of a graph that is cut.
_WAYS = (_run, _run_with_lengths, _run_pieces)
PIECES = 2


def _compiled(name: str, compile_graph: Callable, way: int = 0, **how) -> Callable:
    """A function with code of its own, as Dynamo counts graphs and remembers sizes by code."""
    code = _WAYS[way].__code__.replace(co_name=f"vitfast_{next(_count)}_{name}")
    function = types.FunctionType(code, globals(), code.co_name)
    return torch.compile(function, backend=compile_graph, fullgraph=way != PIECES, **_LIMIT, **how)


class _Decided(Exception):
    """Ends a call after its graph was captured."""


def _capture_graph(module: GraphModule, inputs: list) -> Callable:
    """The backend that finds out what would be replaced, and computes nothing."""
    report = replace_blocks(module, _thread.call.group.choices, is_probe=True)

    def call(*_):
        _thread.call.ran.append(report)
        raise _Decided

    return call


def _patch_config(_) -> None:
    """Sets what a call needs while Dynamo compiles it."""
    if _thread.call is None:
        _compiled_by_others.add("later")
    else:
        _thread.call.group.patch_config(_compiling, _thread.call.way)


def _watch_dynamo() -> None:
    """Has Dynamo call the function above, and undo it; `torch._dynamo.reset` discards both calls."""
    if _patch_config not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_patch_config)
        callback_handler.register_end_callback(lambda _: _compiling.close())


def forget_others() -> None:
    """Discards what torch.compile made of a model before it was accelerated or restored."""
    if _compiled_by_others:
        torch._dynamo.reset()
        _compiled_by_others.clear()
    _watch_dynamo()


class Group:
    """Compiled code that modules share: for the sizes of the first call, and for all others.

    is_layer: whether these are encoder layers.
    """

    def __init__(self, name: str, choices: Choices, is_layer: bool = True):
        self.name, self.choices, self.is_layer = name, choices, is_layer
        self.sizes: torch.Size | None = None
        self.functions: dict[tuple[bool, int], list[Callable]] = {}
        self.capture: Callable | None = None

    def compile_graph(self, module: GraphModule, inputs: list) -> Callable:
        """The backend of a part: each run of the graph tells the call what was replaced in it."""
        report, run = replace_blocks(module, self.choices), module.forward

        def call(*arguments):
            _thread.call.ran.append(report)
            return run(*arguments)

        return call

    def patch_config(self, until_compiled: contextlib.ExitStack, way: int) -> None:
        """Sets _GUARDS, and keeps graphs whole where lengths are read."""
        until_compiled.enter_context(torch._dynamo.config.patch(**_GUARDS))
        if way == 1:
            until_compiled.enter_context(lengths_as_symbols())

    def run_library(self, call: "CompiledCall", args: tuple, kwargs: dict):
        """Runs a module's own code, where the call has said why."""
        module = call.module()
        return type(module).forward(module, *args, **kwargs)

    def is_first(self, x: Tensor) -> bool:
        """Whether this input has the sizes of the first call, or is of layers on images.

        Dynamo sees itself which of their sizes change: all at once take half a minute for a layer of windows.
        """
        self.sizes = x.shape if self.sizes is None else self.sizes
        return x.shape == self.sizes or (self.is_layer and x.dim() == 4)

    def function(self, x: Tensor, place: int, way: int) -> Callable:
        """The function at a place in the row of those for this input's sizes and one of _WAYS."""
        functions = self.functions.setdefault((first := self.is_first(x), way), [])
        if place == len(functions):
            functions.append(_compiled(self.name, self.compile_graph, way, dynamic=None if first else True))
        return functions[place]


def _first_tensor(args: tuple, kwargs: dict) -> Tensor | None:
    if args and isinstance(args[0], Tensor):
        return args[0]
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)


def why_library(x: Tensor | None, args: tuple, kwargs: dict) -> str | None:
    """Why a call runs the library's own code; None where it is compiled."""
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
        if not isinstance(value, _KNOWN):
            return f"the call has a {type(value).__name__}"
    return None


def replica_of(module: nn.Module | None, caller: types.FrameType) -> nn.Module | None:
    """The module that was called with the attributes of this one, as nn.DataParallel's replicas are."""
    called = caller.f_locals["self"] if caller.f_code is _WRAPPED_CALL else module
    return None if called is module else called


class _Forward:
    """A call's `forward`, for the time of a module's hooks; in copies that hooks make, it is the class's."""

    def __init__(self, call: "CompiledCall"):
        self.call = call

    def __call__(self, *args, **kwargs):
        return self.call.forward(*args, **kwargs)

    def __reduce__(self):
        return getattr, (self.call.module(), "forward")


def _text_of(error: Exception) -> str:
    error = getattr(error, "inner_exception", error)  # of our own backend
    first = str(error).strip().partition("\n")[0]
    return f"it cannot be captured ({first or type(error).__name__})"


class CompiledCall:
    """The call that runs in place of a module's own code.

    ran: the reports on the graphs of the last call, captured in a way of _WAYS. why: why the last call ran the
    library's code. failed: by the module's mode and hooks, why ways fail, which are not tried again.
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
        if torch.compiler.is_compiling():  # what compiles the model around it has its graph rewritten, or exports it
            return module._call_impl(*args, **kwargs)
        if (replica := replica_of(module, sys._getframe(1))) is not None:
            return replica._call_impl(*args, **kwargs)
        if torch._C._get_tracing_state() is not None:
            self.ran, self.why = [], "torch.jit.trace is at work"
            return module._call_impl(*args, **kwargs)
        own = module.__dict__.get("forward")
        if has_instance_forward(module) and own is not self.around_forward:
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
                if own is not None and own is not self.around_forward:
                    module.__dict__["forward"] = own

    def forward(self, *args, **kwargs):
        """The module's forward, compiled where it can be."""
        module, x = self.module(), _first_tensor(args, kwargs)
        failed = self.failed.get(_mode_of(module), []) if self.failed else []
        self.way, self.ran = len(failed), []
        self.why = why_library(x, args, kwargs) or (None if self.way < self.ways else failed[0])
        if self.why is not None:
            return self.group.run_library(self, args, kwargs)
        before, _thread.call = _thread.call, self
        _watch_dynamo()
        try:
            if batch_invariant():  # which has switched torch.compile off, but its graphs here run eagerly
                with torch.compiler.set_stance("default"):
                    return self._run(module, x, args, kwargs)
            return self._run(module, x, args, kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self.why = "there are as many graphs of such layers as there may be"
        except torch._dynamo.exc.TorchRuntimeError as error:  # the library's code says what is wrong with the input
            self.why = _text_of(error)
        except torch._dynamo.exc.TorchDynamoException as error:
            return self._run_next_way(module, _text_of(error), args, kwargs)
        except _Uncompiled:
            self.why = "torch.compile is switched off here"
        except RuntimeError as error:  # of a graph whose lengths must be above one
            if "Runtime assertion failed" not in str(error):
                raise
            self.why = "an image has one token"
        finally:
            _thread.call = before
        return self.group.run_library(self, args, kwargs)

    def _run_next_way(self, module: nn.Module, why: str, args: tuple, kwargs: dict):
        """Runs the next way and remembers why, unless the library's code raises an error too."""
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
        """Entries on the last call, or on a first one; None where only a call can tell."""
        if not self.ran and not self.failed and self.why is None:
            ran = self._captured()
            return None if ran is None else list(ran)
        whys = [failed[-1] for failed in self.failed.values() if failed and self.way == PIECES]
        cut = [Entry("whole", "", f"{why}; pieces are compiled") for why in whys[:1]]
        return [*cut, *(entry for report in self.ran for entry in report)]

    def _captured(self) -> Report | None:
        """The report on the graph of tokens in the module's width, without a call."""
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
    """Where a way fails, another may not: (training, gradients, modules with hooks)."""
    return module.training, torch.is_grad_enabled(), sum(map(_has_hooks, module.modules()))
