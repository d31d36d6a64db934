"""Runs one half of a library's encoder layer as one operation, where nothing in the layer needs its own modules to be called.

Everything is looked up at the call and nothing is kept: a layer that LoRA has replaced, a hook or a weight norm added a minute ago is seen.
Modules are read through their dictionaries, which takes a tenth of the time of attribute access.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Dropout
from torch.nn.modules.module import _has_any_global_hook

from ..ops._dispatch import KERNEL_DTYPES

Parts = dict[str, nn.Module | None]  # the modules of a half by their path in the block; "" is the block

# What may be read in place of called: not DTensor, a quantised tensor, FakeTensor of an export, or a proxy of FX.
_PLAIN = (Tensor, nn.Parameter)
ABSENT = type(None)


def no_drop_path(parts: Parts, batch: int, device: torch.device, dtype: torch.dtype) -> None:
    return None


def _nothing(parts: Parts) -> None:
    return None


def _never(module: nn.Module) -> bool:
    return False


class Half(NamedTuple):
    """One pre-norm half of an encoder layer, as data.

    name: for reports. operation: ops.attention_block or ops.mlp_block. modules: the modules whose calls the operation replaces and the exact
    types that it can stand in for, from `layout`. weights: path and name of the operation's tensors from norm_weight on.
    options(parts): its numbers. pack(weights): its six tensors where the library keeps q, k and v apart. layer_scale: path and name.
    drop_path(parts, batch, device, dtype): (B,) factors or None, drawn as the library draws. obstacle(parts): what types do not tell.
    idle(module): True where the hooks on a module wait for nothing now.
    """

    name: str
    operation: Callable[..., Tensor]
    modules: tuple[tuple[str, str, str, tuple[type, ...]], ...]
    weights: tuple[tuple[str, str], ...]
    options: Callable[[Parts], dict]
    pack: Callable[[list], list] = list
    layer_scale: tuple[str, str] | None = None
    drop_path: Callable[..., Tensor | None] = no_drop_path
    obstacle: Callable[[Parts], str | None] = _nothing
    idle: Callable[[nn.Module], bool] = _never


def takes(x: Tensor) -> bool:
    """True for an input that the operations run on: of no class of its own, on a GPU or CPU, under no transform of torch.func."""
    if type(x) not in _PLAIN or x.device.type not in ("cuda", "cpu"):
        return False
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None


def layout(modules: dict[str, type | tuple[type, ...]]) -> tuple[tuple[str, str, str, tuple[type, ...]], ...]:
    """{"attn.qkv": nn.Linear, ...}, parents first, as (path, parent's path, name in the parent, types)."""
    split = ((path, path.rpartition("."), kinds) for path, kinds in modules.items())
    return tuple(
        (path, above, name, kinds if isinstance(kinds, tuple) else (kinds,)) for path, (above, _, name), kinds in split
    )


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def plain(*tensors: Tensor | None) -> bool:
    """True for tensors that an operation may read: none is of a class with rules of its own."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in _PLAIN:
            return False
    return True


def look(half: Half, block: nn.Module) -> tuple[Parts, list[Tensor | None]] | str:
    """The modules and weights of this half, or, as text, why the library's own modules must run.

    No number is put into a text: torch.compile traces this, and a number may be symbolic there.
    """
    if _has_any_global_hook():
        return "a hook on all modules is set"
    parts = {"": block}
    for path, above, name, kinds in half.modules:
        module = parts[path] = parts[above]._modules.get(name)
        kind = type(module)
        if kind not in kinds:
            return f"{path} is missing" if module is None else f"{path} is {full_name(kind)}"
        if module is None:
            continue
        # Someone waits for the call of this module.
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            if not half.idle(module):
                return f"{path} has hooks"
        if "forward" in module.__dict__:
            return f"{path} has a forward of its own, set on the instance"
        if kind is Dropout and module.p > 0 and module.training:
            return f"{path} is active in training"
    reason = half.obstacle(parts)
    if reason is not None:
        return reason
    weights, dtype = [], None
    for path, name in half.weights:
        held = parts[path]._parameters
        weight = (
            held[name] if name in held else getattr(parts[path], name, None)
        )  # FSDP of old puts views in the place of parameters
        weights.append(weight)
        if weight is None:
            continue
        if type(weight) not in _PLAIN:
            return f"a weight of {path} is {full_name(type(weight))}"
        if dtype is not None and weight.dtype != dtype:
            return "its weights have several dtypes"
        dtype = weight.dtype
    return (
        (parts, weights) if weights[0] is not None and weights[0].dim() == 1 else "LayerNorm has no weight per channel"
    )


def stranger(block: nn.Module, halves: tuple[Half, ...]) -> str | None:
    """What this version of the library has in its layer that vitfast does not know of; looked for once, by `accelerate`."""
    kinds = {"": (type(block),)}
    kinds.update((path, types) for half in halves for path, _, _, types in half.modules)
    for path in sorted({above for half in halves for _, above, _, _ in half.modules}):
        try:
            module = block.get_submodule(path)
        except AttributeError:
            continue  # the half says so
        if type(module) not in kinds[path]:
            continue
        inside = list(module._modules)
        if not type(module).__module__.startswith("torch."):
            inside += [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in (f"{path}.{name}".lstrip(".") for name in inside):
            if name not in kinds:
                return f"{name} is not known to vitfast"
    return None


def _stream_dtype(x: Tensor, weight: Tensor, layer_scale: Tensor | None, in_fp32: bool | None) -> torch.dtype | None:
    """What the residual stream becomes after this half; None where the operation cannot follow the original.

    Outside autocast x and the weights agree. Under it the matrix products run in its dtype and `residual + branch` promotes.
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


def run(half: Half, block: nn.Module, x: Tensor) -> Tensor | None:
    """x (B, N, D) after this half; None where the library's own modules must run."""
    found = look(half, block) if takes(x) else ""
    if isinstance(found, str):
        return None
    parts, weights = found
    layer_scale = None if half.layer_scale is None else parts[half.layer_scale[0]]._parameters.get(half.layer_scale[1])
    if not plain(layer_scale) or x.dim() != 3:
        return None
    dtype = _stream_dtype(x, weights[0], layer_scale, block.residual_in_fp32)
    if dtype is None:
        return None
    in_fp32 = dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    drop_path = half.drop_path(parts, x.shape[0], x.device, dtype)
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, residual_in_fp32=in_fp32)
    return half.operation(x.float() if in_fp32 else x, *half.pack(weights), **half.options(parts), **factors)
