"""Subclasses of libraries' encoder layers, made from descriptions: two operations in a forward.

An instance keeps its parameters, names and hooks; only its class is another.
"""

import inspect

import torch
from torch import Tensor, nn

from .fallback_log import library_runs, operation_runs
from .fused_blocks import Found, FusedBlock, asked, attribute, input_unsupported, stream_dtype
from .masks import call_options, packed_tokens
from .specs import Layer
from .subclasses import subclass

# For each half, the blocks that were checked, one for each kind of attention or MLP. HALVES: their names in reports.
Blocks = tuple[tuple[FusedBlock, ...], tuple[FusedBlock, ...]]
HALVES = ("attention block", "MLP block")


def find(layer: nn.Module, half: int) -> Found | str:
    """Modules and tensors that operations read for a half, or why the library's modules must run."""
    reason, blocks = layer.vitfast_layer.unsupported(layer), layer.vitfast_blocks[half]
    if reason is not None:
        return reason
    for block in blocks:
        if block.fits(layer):
            return block.find(layer)
    return blocks[0].find(layer)  # which says what it lacks


def unknown_member_reason(layer: nn.Module, cls: type, blocks: Blocks, with_buffers: bool = False) -> str | None:
    """Why a layer is left: a module or parameter of it that no description covers; None if there is none."""
    known = [block for half in blocks for block in half]
    containers = {"": {cls}}
    for block in known:
        for path, types in block.types.items():
            containers.setdefault(path, set()).update(types)
    parents = {path.rpartition(".")[0] for path in containers if path}
    for path in sorted(parents):
        module = attribute(layer, path)
        if module is None or type(module) not in containers[path] | {type(layer)}:
            continue  # `find` says so
        members = list(module._modules)
        if not type(module).__module__.startswith("torch."):
            held = {**module._parameters, **(module._buffers if with_buffers else {})}
            members += [name for name, tensor in held.items() if tensor is not None]
        for name in (f"{path}.{name}".lstrip(".") for name in members):
            if not any(block.covers(name) for block in known):
                return f"{name} is not known to vitfast"
    return None


def _by_modules(layer: nn.Module, half: int, x: Tensor, arguments: dict) -> Tensor:
    """Runs a half by the library's own modules."""
    description, packed = layer.vitfast_layer, packed_tokens(arguments)
    if packed is not None:
        return packed.pack(_by_modules(layer, half, packed.unpack(x), packed.padded(arguments)))
    arguments = arguments if half == 0 else {}
    own = (description.attention_half, description.mlp_half)[half]
    if own is not None:
        return own(layer, x, arguments) if half == 0 else own(layer, x)
    part = (description.attention, description.mlp)[half]
    y = attribute(layer, part.path)(attribute(layer, description.norms[half])(x), **arguments)
    y = y[0] if isinstance(y, tuple) else y
    for path in description.behind[half]:
        module = attribute(layer, path)
        if module is not None:
            y = module(y) if isinstance(module, nn.Module) else module * y
    return x + y


def _by_operation(layer: nn.Module, half: int, x: Tensor, arguments: dict, reason: str | None) -> Tensor | None:
    """Runs a half by operations; returns None if the library's modules must run.

    reason: why they must, if the caller knows a reason.
    """
    name, description, packed = HALVES[half], layer.vitfast_layer, packed_tokens(arguments)
    reason = reason or input_unsupported(x)
    if reason is None and packed is None and x.dim() != (2 if description.packed else 3):
        reason = f"its input is not {'(tokens, D)' if description.packed else '(B, N, D)'}"
    if reason is not None:
        if isinstance(x, Tensor):  # not a proxy of FX
            library_runs(layer, name, reason, of_this_call=True)
        return None
    found = find(layer, half)
    if isinstance(found, str):
        library_runs(layer, name, found)
        return None
    tokens_first = description.tokens_first(layer)
    x = x.transpose(0, 1) if tokens_first else x
    dtype = stream_dtype(x, found.tensors[0], found.layer_scale, layer.residual_in_fp32)
    options = {}
    if dtype is None:
        options = "its input and weights differ in dtype or class"
    elif half == 0:
        shape = (*x.shape[:-2], found.block.heads(found.modules), x.shape[-2])
        options = call_options(description.logits(layer, arguments, x), x, shape)
    if isinstance(options, str):
        library_runs(layer, name, options, of_this_call=True)
        return None
    operation_runs(layer, name)
    in_fp32 = dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    in_one_row = x.dim() == 3 and "offsets" in options  # all images in the first sample of a batch
    x = x[0] if in_one_row else x
    offsets = packed.offsets if packed is not None and x.dim() == 2 else None

    def factors() -> dict:
        return dict(residual_in_fp32=in_fp32, **found.block.factors(found, x, dtype, offsets))

    y = found.block.run(found, x.float() if in_fp32 else x, options, factors)
    y = y[None] if in_one_row else y
    return y.transpose(0, 1) if tokens_first else y


def _forward(cls: type, description: Layer, entries: int, of_users: bool):
    """The forward of the subclass of a library's layer."""
    signature = inspect.signature(cls.forward)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(name for name, given in signature.parameters.items() if given.kind in positional)[1:]
    off = (inspect.Parameter.empty, None, False)
    on = tuple(name for name, given in signature.parameters.items() if not any(given.default is x for x in off))
    others = any(given.kind is inspect.Parameter.VAR_KEYWORD for given in signature.parameters.values())
    nothing = (None,) * (entries - 1)

    def forward(self, *args, **kwargs):
        arguments = dict(zip(names, args), **kwargs)
        x = arguments.pop(names[0], None)
        if isinstance(x, (list, tuple)):  # dinov2's packed images
            return cls.forward(self, *args, **kwargs)
        known = others or all(name in names for name in arguments)
        fits = known and x is not None and len(args) <= len(names) and not (args and names[0] in kwargs)
        if not fits:
            return cls.forward(self, *args, **kwargs)  # which says what it expects
        extra = {name: value for name, value in arguments.items() if name not in description.takes}
        call, whole = asked(extra, description.harmless, on), description.unsupported(self)
        if whole is not None or (call is not None and (of_users or entries)):
            for half in HALVES:
                library_runs(self, half, whole or call, of_this_call=True)
            packed = packed_tokens(arguments)
            if packed is None:
                return cls.forward(self, *args, **kwargs)
            y = cls.forward(self, packed.unpack(x), **packed.padded(arguments))
            return (packed.pack(y[0]), *y[1:]) if isinstance(y, tuple) else packed.pack(y)
        y = _by_operation(self, 0, x, arguments, call)
        x = _by_modules(self, 0, x, arguments) if y is None else y
        y = _by_operation(self, 1, x, arguments, None)
        y = _by_modules(self, 1, x, arguments) if y is None else y
        return (y, *nothing) if entries else y

    forward.__signature__ = signature
    return forward


def accelerated_layer(cls: type, description: Layer, blocks: Blocks, entries: int, of_users: bool) -> type:
    """Our subclass of a library's layer class.

    entries: the length of the tuple (tokens, None, ...) that it returns, 0 for bare tokens. of_users: the class is a
    user's, so an argument that the description does not name may do anything.
    """
    attributes = dict(vitfast_layer=description, vitfast_blocks=blocks, residual_in_fp32=None, vitfast_keep="least")
    held = {each for half in blocks for block in half for types in block.types.values() for each in types}
    attributes["vitfast_forwards"] = {each: each.forward for each in (cls, *held) if hasattr(each, "forward")}
    return subclass(cls, _forward(cls, description, entries, of_users), **attributes)
