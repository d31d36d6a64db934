"""Runs an attention or MLP block of a library's encoder layer as one operation.

Where that cannot give the same result, the library's own modules run. Everything is looked up at the call and nothing
is kept: see submodules.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops._dispatch import KERNEL_DTYPES
from ..submodules import Layout, Modules, find_modules, full_name
from .fallbacks import library_runs, operation_runs

# An operation may read these: not DTensor, a quantised tensor, FakeTensor of an export, or a proxy of FX.
_PLAIN = (Tensor, nn.Parameter)
ABSENT = type(None)


class FusedBlock(NamedTuple):
    """One pre-norm residual block of an encoder layer, attention or MLP, as data.

    name: for reports. operation: ops.attention_block or ops.mlp_block. modules: those whose calls the
    operation replaces, and their exact types. weights: path and name of the operation's
    tensors from norm_weight on. options(modules): its numbers. pack(weights): its six tensors where the library keeps
    q, k and v apart. layer_scale: path and name. drop_path(modules, batch, device, dtype): (B,) factors or None, drawn
    as the library draws. unsupported_reason(modules): what types do not tell. idle_hooks(module): True where all hooks
    on a module do nothing now.
    """

    name: str
    operation: Callable[..., Tensor]
    modules: Layout
    weights: tuple[tuple[str, str], ...]
    options: Callable[[Modules], dict]
    pack: Callable[[list], list] = list
    layer_scale: tuple[str, str] | None = None
    drop_path: Callable[..., Tensor | None] = lambda modules, batch, device, dtype: None
    unsupported_reason: Callable[[Modules], str | None] = lambda modules: None
    idle_hooks: Callable[[nn.Module], bool] = lambda module: False


def weights_and_biases(*paths: str) -> tuple[tuple[str, str], ...]:
    """Path and name of the weight and the bias of each module."""
    return tuple((path, name) for path in paths for name in ("weight", "bias"))


def input_unsupported(x: Tensor) -> str | None:
    """Why no operation reads an input: a class or device of its own, or a transform; None where one does."""
    if type(x) not in _PLAIN:
        return f"its input is {full_name(type(x))}"
    if x.device.type not in ("cuda", "cpu"):
        return f"its input is on {x.device.type}"
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return None
    return "a transform of torch.func is at work"


def asked(arguments: dict, harmless: tuple[str, ...] = ()) -> str | None:
    """The reason for a library to run: a call gives more than tokens, a mask say; None where not."""
    for name, value in arguments.items():
        if value is not None and value is not False and name not in harmless:
            return f"the call has {name}"
    return None


def are_plain(*tensors: Tensor | None) -> bool:
    """True for tensors that an operation may read: none is of a class with rules of its own."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    return True


def find(block: FusedBlock, layer: nn.Module) -> tuple[Modules, list[Tensor | None]] | str:
    """The modules and weights of a fused block, or, as text, why the library's own modules must run.

    No number is put into a text: torch.compile traces this, and a number may be symbolic there.
    """
    modules = find_modules(block.modules, layer, block.idle_hooks)
    if isinstance(modules, str):
        return modules
    reason = block.unsupported_reason(modules)
    if reason is not None:
        return reason
    weights, dtype = [], None
    for path, name in block.weights:
        parameters = modules[path]._parameters
        # The first FSDP puts views in the place of parameters.
        weight = parameters[name] if name in parameters else getattr(modules[path], name, None)
        weights.append(weight)
        if weight is None:
            continue
        if type(weight) not in _PLAIN:
            return f"a weight of {path} is {full_name(type(weight))}"
        if dtype is not None and weight.dtype != dtype:
            return "its weights have several dtypes"
        dtype = weight.dtype
    if weights[0] is None or weights[0].dim() != 1:
        return "LayerNorm has no weight per channel"
    return modules, weights


def unknown_member_reason(layer: nn.Module, blocks: tuple[FusedBlock, ...]) -> str | None:
    """Why a layer is left: a module or parameter of it that no fused block covers; None if there is none."""
    known = {"": (type(layer),)}
    known.update((path, types) for block in blocks for path, _, _, types in block.modules)
    for path in sorted({parent for block in blocks for _, parent, _, _ in block.modules}):
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            continue  # `find` says so
        if type(module) not in known[path]:
            continue
        members = list(module._modules)
        if not type(module).__module__.startswith("torch."):
            members += [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in (f"{path}.{name}".lstrip(".") for name in members):
            if name not in known:
                return f"{name} is not known to vitfast"
    return None


def _stream_dtype(x: Tensor, weight: Tensor, layer_scale: Tensor | None, in_fp32: bool | None) -> torch.dtype | None:
    """The residual stream's dtype after a fused block; None where the original's is another.

    Outside autocast x and the weights agree. Under it the matrix products run in its dtype and `residual + branch`
    promotes.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype == weight.dtype and (layer_scale is None or layer_scale.dtype == x.dtype) else None
    if x.dtype not in KERNEL_DTYPES or weight.dtype not in KERNEL_DTYPES:
        return None  # autocast leaves float64 alone
    compute = torch.get_autocast_dtype(device)
    if in_fp32 is not None:
        return torch.float32 if in_fp32 else compute
    out = torch.promote_types(x.dtype, compute)
    out = out if layer_scale is None else torch.promote_types(out, layer_scale.dtype)
    return out if out in (compute, torch.float32) else None


def _call_unsupported(x: Tensor, asked: str | None) -> str | None:
    """Why no operation can serve a call, whatever the layer; None where one can. asked: see `run`."""
    if asked is not None:
        return asked
    return input_unsupported(x) or (None if x.dim() == 3 else "its input is not (B, N, D)")


def run(block: FusedBlock, layer: nn.Module, x: Tensor, asked: str | None = None) -> Tensor | None:
    """x (B, N, D) after a fused block of this layer; None where the library's own modules must run.

    asked: what the call asks for besides, which no operation does.
    """
    reason = _call_unsupported(x, asked)
    if reason is not None:
        if isinstance(x, Tensor):  # not a proxy of FX
            library_runs(layer, block.name, reason, of_this_call=True)
        return None
    found = find(block, layer)
    if isinstance(found, str):
        library_runs(layer, block.name, found)
        return None
    modules, weights = found
    layer_scale = None
    if block.layer_scale is not None:
        path, name = block.layer_scale
        layer_scale = modules[path]._parameters.get(name)
    dtype = _stream_dtype(x, weights[0], layer_scale, layer.residual_in_fp32) if are_plain(layer_scale) else None
    if dtype is None:
        library_runs(layer, block.name, "its input and weights differ in dtype or class", of_this_call=True)
        return None
    operation_runs(layer, block.name)
    in_fp32 = dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    drop_path = block.drop_path(modules, x.shape[0], x.device, dtype)
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, residual_in_fp32=in_fp32)
    return block.operation(x.float() if in_fp32 else x, *block.pack(weights), **block.options(modules), **factors)
