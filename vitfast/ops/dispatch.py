"""Chooses kernels or plain PyTorch: by the thread's mode and what kernels cover. Applies autocast.

It remembers to which operation the checks of a public function led: later calls like that one skip the checks.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels import launch, tiles
from ..kernels.launch import INTERPRETED
from ..kernels.plans import MOST
from ..kernels.tiles import ThreadMode
from .checks import at_hand, transformed
from .operation import Call

try:
    import triton  # noqa: F401
except ImportError as error:  # on macOS and Windows, for example, where the operations run plain PyTorch
    NO_TRITON = f"triton cannot be imported ({error})"
else:
    from ..kernels.layer_norm import MAX_WIDTH

    NO_TRITON = None

Function = TypeVar("Function", bound=Callable)
Mode = Literal["auto", "on", "off"]
MODES = get_args(Mode)
_MODE = ThreadMode("vitfast.use_kernels", os.environ.get("VITFAST_KERNELS") or "auto")


def current_mode() -> str:
    """The mode in force in this thread. Raises InputError where VITFAST_KERNELS names none of MODES."""
    name = _MODE.current()
    if name not in MODES:
        raise InputError(f"VITFAST_KERNELS: must be one of {', '.join(MODES)}, got {name!r} in the environment")
    return name


class use_kernels:
    """Chooses between the kernels and plain PyTorch, as a context manager or a setter.

    "auto" (default): kernels if they can run, otherwise plain PyTorch. "on": kernels, or an error that says why not.
    "off": plain PyTorch.

    It works as torch.set_grad_enabled does: the mode belongs to one thread, a call sets it, and the end of a `with`
    restores the mode before it. Other threads begin with the mode in the environment variable VITFAST_KERNELS, by
    default "auto". Backward always uses the implementation that ran forward, even if the mode has changed. Forward code
    that backward runs again (activation checkpointing) has the mode of the thread that calls backward(). Raises
    ValueError for another mode.
    """

    def __init__(self, mode: Mode):
        if mode not in MODES:
            raise ValueError(f"use_kernels: mode must be one of {', '.join(MODES)}, got {mode!r}")
        self.mode, self._before = mode, _MODE.set_here()
        _MODE.set(mode)

    def __enter__(self):
        _MODE.set(self.mode)
        return self

    def __exit__(self, *_):
        _MODE.set(self._before)


# Autocast never casts these: factors and the norms' parameters act in fp32, whatever dtype the products run in.
_KEPT = frozenset({"layer_scale", "drop_path", "norm_weight", "norm_bias", "inner_norm_weight", "inner_norm_bias"})

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_warned: set[tuple[str, str]] = set()


def constant_when_compiled(function: Function) -> Function:
    """Decorates a function that torch.compile calls while it compiles, taking the result for a constant.

    It does what torch.compiler.assume_constant_result does, which imports torch._dynamo, and that takes longer than
    the rest of vitfast.
    """
    function._dynamo_marked_constant = True
    return function


@constant_when_compiled  # Dynamo would trace into the cache that is used: 2.14 warns, 2.11 cannot
def _too_old(device: torch.device) -> bool:
    """Whether a GPU is older than every generation that has kernels."""
    return tiles.generation(device) == 0


def unsupported_reason(x: Tensor, unsupported: str | None) -> str | None:
    """Why no kernel can run on x, None where one can."""
    if NO_TRITON is not None:
        return NO_TRITON
    if x.device.type == "cuda":
        if _too_old(x.device):
            return "the GPU is older than compute capability 8.0"
    elif x.device.type != "cpu" or not INTERPRETED:
        return f"tensors on {x.device.type} need TRITON_INTERPRET=1 before vitfast is imported"
    elif x.dtype == torch.bfloat16 and not launch.bfloat16_mended:
        return "Triton's interpreter computes bfloat16 wrongly (vitfast.tools.interpreter.mend_bfloat16() mends it)"
    if x.dtype not in KERNEL_DTYPES:
        return f"no kernel computes in {x.dtype}"
    if transformed():
        return "no kernel runs under torch.func's transforms or forward-mode differentiation"
    return unsupported


def norm_unsupported(width: int, drop_path: Tensor | None = None) -> str | None:
    """Why no kernel normalises rows of this width, or takes this drop_path; None where one does."""
    if NO_TRITON is None and width > MAX_WIDTH:
        return f"width above {MAX_WIDTH}"
    if width == 0:
        return "width 0"
    return "drop_path needs a gradient" if drop_path is not None and drop_path.requires_grad else None


def kernels_wanted(op: str, x: Tensor, unsupported: str | None = None, stacklevel: int = 5) -> bool:
    """Whether the kernel of `op` is to run on x.

    unsupported: why no kernel covers the other arguments, or None. Where no kernel covers a CUDA call, plain PyTorch
    runs with one warning, of the code at `stacklevel`; in mode "on" RuntimeError is raised, as for CPU tensors outside
    the interpreter. Export (torch.export, ONNX) always traces plain PyTorch.
    """
    # torch 2.11's Dynamo takes is_exporting() for true while it compiles; the flag behind it is right in every version.
    mode = current_mode()
    if mode == "off" or (mode == "auto" and x.device.type != "cuda") or torch.compiler._is_exporting_flag:
        return False
    reason = unsupported_reason(x, unsupported)
    if reason is None:
        return True
    if mode == "on":
        raise RuntimeError(f"{op}: kernels are switched on, but {reason}; use_kernels('auto') runs plain PyTorch there")
    if not torch.compiler.is_compiling() and (op, reason) not in _warned:
        _warned.add((op, reason))
        warnings.warn(f"vitfast {op}: {reason}; plain PyTorch runs in its place", stacklevel=stacklevel)
    return False


# Other names that arguments may be given by: flash-attention's for packed samples, and save_policy for `keep`. They are
# in the operations' signatures for type checkers; `autocasts` hands them on under the names that they stand for.
ALIASES = {"cu_seqlens": "offsets", "max_seqlen": "longest", "save_policy": "keep"}


def autocasts(*keep: str) -> Callable[[Function], Function]:
    """Decorates an operation: it takes ALIASES, and autocast casts all arguments but _KEPT and `keep`."""

    def decorate(function: Callable) -> Any:
        names, kept = tuple(inspect.signature(function).parameters), _KEPT.union(keep)
        aliases = [(alias, name) for alias, name in ALIASES.items() if name in names]

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for alias, name in aliases:
                if alias in kwargs:
                    if name in kwargs:
                        both = f"{name} and {alias} are two names of one argument, give one"
                        raise TypeError(f"{function.__name__}: {both}")
                    kwargs[name] = kwargs.pop(alias)
            device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "meta")
            if device == "meta" or not torch.is_autocast_enabled(device):  # is_autocast_enabled raises for "meta"
                return function(*args, **kwargs)
            dtype = torch.get_autocast_dtype(device)
            stream = names[0] if kwargs.get("residual_in_fp32", False) else None

            def cast(name, a):
                floating = isinstance(a, Tensor) and a.is_floating_point()
                return a.to(dtype) if floating and name not in kept and name != stream else a

            with torch.autocast(device, enabled=False):
                # Where there are too many arguments, the function itself is to refuse them.
                args = [cast(names[i] if i < len(names) else "", a) for i, a in enumerate(args)]
                return function(*args, **{name: cast(name, a) for name, a in kwargs.items()})

        return wrapper

    return decorate


# ---- routes

_NUMBERS = (int, float, bool, str, type(None))
_TENSORS = (Tensor, torch.nn.Parameter)


def _key(leaves: list) -> tuple | None:
    """All on which the checks of these arguments depend; None if they may read more, as offsets' values."""
    if torch.compiler._is_exporting_flag or transformed():
        return None
    key = [current_mode(), torch.is_grad_enabled(), tiles.state]
    for x in leaves:
        kind = type(x)
        if kind in _NUMBERS:
            key += kind, x
        elif kind in _TENSORS and x.layout is torch.strided and (x.is_floating_point() or not at_hand(x)):
            key += x.dtype, x.shape, x.device, x.requires_grad
        else:  # the checks read what is in offsets that the host has
            return None
    return tuple(key)


def _route(call: Call, leaves: list) -> tuple | None:
    """(operation, arguments as (index in leaves or -1, constant)); None if leaves do not fix its tensors."""
    at = {id(x): i for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    computed = any(isinstance(value, Tensor) and id(value) not in at for value in call.values)
    if computed or len(at) < sum(isinstance(x, Tensor) for x in leaves):  # or two leaves are one tensor
        return None
    return call.operation, [(at[id(x)], None) if isinstance(x, Tensor) else (-1, x) for x in call.values]


def routed(function: Function) -> Function:
    """Decorates a public operation that returns its results, or a Call, which is remembered and run."""
    routes: dict[tuple, tuple | None] = {}

    @functools.wraps(function)
    def call(*args, **kwargs):
        leaves = [*args, *kwargs.values()]
        if isinstance(rope := kwargs.get("rope"), tuple):
            leaves += rope
            leaves[len(args) + list(kwargs).index("rope")] = None
        key = None if torch.compiler.is_compiling() else _key(leaves)
        key = key and (len(args), *kwargs, *key)
        route = routes.get(key) if key else None
        if route is not None:
            operation, arguments = route
            return operation.run(*[value if i < 0 else leaves[i] for i, value in arguments])
        result = function(*args, **kwargs)
        if not isinstance(result, Call):
            return result
        if key is not None:
            if len(routes) >= MOST:
                routes.clear()
            routes[key] = _route(result, leaves)
        return result.run()

    return call  # type: ignore[return-value]
