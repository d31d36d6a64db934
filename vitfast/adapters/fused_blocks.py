"""One half of a library's encoder layer, attention or MLP: what an operation reads of it.

Everything is looked up at the call and nothing is kept: see ops/fusable.py. The two kinds are in attention.py, mlp.py.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import ops
from ..ops import reference as ref
from ..ops._dispatch import KERNEL_DTYPES
from ..ops.fusable import Modules, expected_modules, fallback_reason, full_name, modules_of
from ..ops.packed import owners
from .known_classes import LAYER_NORMS, RMS_NORMS, loaded, norm_eps, norm_kind
from .specs import Attention, Layer, Mlp

# An operation may read these: not DTensor, a quantised tensor, FakeTensor of an export, or a proxy of FX.
_PLAIN = (Tensor, nn.Parameter)
ABSENT = (nn.Identity, type(None))
_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)


def input_unsupported(x: Tensor) -> str | None:
    """Why no operation can read an input: its class, its device, or a transform; None if one can."""
    if type(x) not in _PLAIN:
        return f"its input is {full_name(type(x))}"
    if x.device.type not in ("cuda", "cpu"):
        return f"its input is on {x.device.type}"
    if x.is_nested:
        return "its input is a nested tensor"
    if torch.jit.is_tracing():
        return "torch.jit.trace is at work"
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return None
    return "a transform of torch.func is at work"


def asked(arguments: dict, harmless: tuple[str, ...] = (), on: tuple[str, ...] = ()) -> str | None:
    """Why the library must run: the call gives more than tokens, such as a mask; None if it does not.

    on: arguments that are on by default, so that None or False means something too; for all others they mean nothing.
    """
    for name, value in arguments.items():
        if name not in harmless and (name in on or (value is not None and value is not False)):
            return f"the call has {name}"
    return None


def are_plain(*tensors: Tensor | None) -> bool:
    """True for tensors that an operation may read: none is of a class with rules of its own."""
    return all([tensor is None or type(tensor) in _PLAIN for tensor in tensors])


def under(path: str, name: str) -> str:
    """The path of something in a module: "attn", "qkv" -> "attn.qkv"."""
    return f"{path}.{name}" if path else name


def attribute(module: nn.Module, path: str):
    """module.a.b for "a.b", the module itself for ""; None where one is missing."""
    if not path:
        return module
    for name in path.split(".") if "." in path else (path,):
        # the dictionary finds a module sooner than nn.Module's own look-up would
        inner = module._modules.get(name) if isinstance(module, nn.Module) else None
        module = getattr(module, name, None) if inner is None else inner
    return module


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook waits for the call of a module, or for its gradients."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def parameter(module: nn.Module, name: str):
    """A parameter of a module, or the view that FSDP 1 puts in its place."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name, None)


def stream_dtype(x: Tensor, weight: Tensor, layer_scale: Tensor | None, in_fp32: bool | None) -> torch.dtype | None:
    """The residual stream's dtype after a fused block; None if no operation gives the original's.

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


def dtypes_fit(x: Tensor, weight: Tensor) -> bool:
    """Whether an operation takes an input and weights of these dtypes, under autocast or not."""
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES
    return x.dtype == weight.dtype


def add_branch(y: Tensor, x: Tensor, *, residual_in_fp32: bool, **factors: Tensor | None) -> Tensor:
    """x + drop_path * layer_scale * y, for a half that runs on smaller operations."""
    if torch.is_autocast_enabled(x.device.type) and not residual_in_fp32:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return ref.residual_add(y, x, **factors)


def add_projection(
    y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, *, residual_in_fp32: bool, **factors: Tensor | None
) -> Tensor:
    """x + drop_path * layer_scale * linear(y), as `add_branch`."""
    if residual_in_fp32:
        return ref.residual_add(F.linear(y, weight, bias), x, **factors)
    return ops.linear_residual(y.to(weight.dtype), weight, bias, x, **factors)


class Found(NamedTuple):
    """Modules of a layer that the operations of a block read, and tensors in its order.

    around: in words, the modules that must be called, with smaller operations around them; None if there are none.
    wrapped: the paths of the linear layers among them, whose tensors are None here.
    """

    block: "FusedBlock"
    modules: Modules
    tensors: list[Tensor | None]
    layer_scale: Tensor | None
    around: str | None
    wrapped: tuple[str, ...] = ()
    keep: str = "least"  # as in ops.attention_block


class FusedBlock:
    """One half of a layer with an attention or MLP of one kind, from a description and an example.

    Modules that an operation stands in for must be of the example's exact types, or of those in known_classes.py. Each
    kind has build(), which names the modules and tensors of the part; unsupported_reason(modules, wrapped), why no
    operation computes it although the types fit; and run(found, x, options, factors), which returns x (B, N, D), or
    (tokens, D) with offsets among the options of the call, after the block. factors() gives layer_scale, drop_path and
    residual_in_fp32; drop path is drawn then, as the library does after what the block calls, such as LoRA's dropout.
    """

    name = ""
    half = 0

    def __init__(self, layer: Layer, part: Attention | Mlp, example: nn.Module):
        self.layer, self.part, self.norm = layer, part, layer.norms[self.half]
        self.container = type(example.get_submodule(part.path))
        first = part.fc1 if isinstance(part, Mlp) else part.qkv
        self.mark = under(part.path, first if isinstance(first, str) else first[0])  # tells it from other kinds
        self.types: dict[str, tuple[type, ...]] = {}
        self.tensors: list[tuple[str, str]] = []  # path of the module, name in it
        self.called: tuple[str, ...] = ()  # paths of modules that smaller operations may run around
        self.projections: tuple[str, ...] = ()  # linear layers that are called where they cannot be read
        self.scale: tuple[str, str] | None = None
        self.drop_path: str | None = None
        self.example = example
        if self.norm:
            self.stand_in(self.norm, loaded((*LAYER_NORMS, *RMS_NORMS)))
            self.tensors += [(self.norm, "weight"), (self.norm, "bias")]
        self.build()
        for name in part.idle:
            self.stand_in(under(part.path, name), (nn.Dropout, *ABSENT))
        for path in layer.behind[self.half]:
            self._behind(path)
        held = {path: attribute(example, path) for path in self.types}
        sequences = {path: tuple(m._modules) for path, m in held.items() if isinstance(m, nn.Sequential)}
        types = dict(sorted(self.types.items(), key=lambda item: item[0].count(".")))
        self.expected = expected_modules(types, sequences)
        del self.example

    def stand_in(self, path: str, types: tuple[type, ...] = ()) -> None:
        """Adds a module, which may have the example's type or one of these, and the modules that hold it."""
        names = path.split(".")
        for above in (".".join(names[:n]) for n in range(1, len(names))):
            self.types.setdefault(above, (type(self.example.get_submodule(above)),))
        self.types[path] = tuple(dict.fromkeys((type(attribute(self.example, path)), *types)))

    def linear(self, path: str, bias: bool = True) -> None:
        """Adds a linear layer's weight and bias; or a parameter `..weight` and its `..bias`."""
        parent, name = path, "weight"
        if isinstance(attribute(self.example, path), nn.Module):
            self.stand_in(path, _LINEAR)
        else:
            parent, _, name = path.rpartition(".")
        self.tensors += [(parent, name), *([(parent, name.replace("weight", "bias"))] if bias else [])]

    def _behind(self, path: str) -> None:
        """Adds a module or parameter that follows the branch.

        A parameter or a module with one is a layer scale, a module without parameters is dropout or drop path.
        """
        module = attribute(self.example, path)
        if not isinstance(module, nn.Module):
            parent, _, name = path.rpartition(".")
            self.scale = (parent, name)
            return
        self.stand_in(path, (nn.Dropout, *ABSENT) if type(module) is nn.Dropout else ABSENT)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            self.scale = (path, names[0])
        elif type(module) not in (nn.Dropout, nn.Identity):
            self.drop_path = path

    def _wrapped(self, modules: Modules) -> tuple[str | None, tuple[str, ...]]:
        """(why the library's modules must run, the projections that must be called, such as LoRA's layers)."""
        besides = tuple(
            entry for entry in self.expected if entry[0] not in self.projections or modules[entry[0]] is None
        )
        found = fallback_reason(besides, modules, self.layer.idle_hooks)
        wrapped = (e[0] for e in self.expected if e not in besides and fallback_reason((e,), modules))
        return found, () if found else tuple(wrapped)

    def find(self, layer: nn.Module) -> Found | str:
        """Modules and tensors that operations read, or, as text, why the library's own modules must run.

        No number is put into a text: torch.compile traces this, and a number may be symbolic there.
        """
        modules, wrapped = modules_of(self.expected, layer), ()
        reason = fallback_reason(self.expected, modules, self.layer.idle_hooks)
        if reason is not None and self.projections:
            reason, wrapped = self._wrapped(modules)
        reason = reason or self._unexpected(modules) or self.unsupported_reason(modules, wrapped)
        if reason is not None:
            return reason
        tensors, dtype = [], None
        for path, name in self.tensors:
            if path in wrapped:
                tensors.append(None)
                continue
            tensor = parameter(modules[path], name)
            tensors.append(tensor)
            if tensor is None:
                continue
            if type(tensor) not in _PLAIN:
                return f"a weight of {path or 'the layer'} is {full_name(type(tensor))}"
            if dtype is not None and tensor.dtype != dtype:
                return "its weights have several dtypes"
            dtype = tensor.dtype
        if self.norm and (tensors[0] is None or tensors[0].dim() != 1):
            return "its norm has no weight per channel"
        scale = None
        if self.scale is not None and modules[self.scale[0]] is not None:
            scale = parameter(modules[self.scale[0]], self.scale[1])
            scale = None if type(scale) is float and scale == 1 else scale  # transformers' BEiT has 1 for none
            if not are_plain(scale) or (scale is not None and scale.shape != tensors[0].shape):
                return "its layer scale is no tensor per channel"
        around = ", ".join(filter(None, (self.around(layer, modules), *wrapped))) or None
        return Found(self, modules, tensors, scale, around, wrapped, getattr(layer, "vitfast_keep", "least"))

    def around(self, layer: nn.Module, modules: Modules) -> str | None:
        """The modules in the part that must be called, in words; None if there are none."""
        return ", ".join([path for path in self.called if type(attribute(layer, path)) not in ABSENT]) or None

    def _unexpected(self, modules: Modules) -> str | None:
        for name, values in self.part.expects:
            value = attribute(modules[self.part.path], name)
            if value not in values:
                return f"{under(self.part.path, name)} is {value!r}"
        if not self.norm:
            return None
        if norm_eps(modules[self.norm]) is None:
            return "the eps of its norm depends on the dtype"
        return "timm's fast norm is on" if modules[self.norm].__dict__.get("_fast_norm", False) else None

    def norm_options(self, modules: Modules) -> dict:
        norm = modules[self.norm]
        return dict(eps=norm_eps(norm), norm=norm_kind(norm))

    def factors(self, found: Found, x: Tensor, dtype: torch.dtype, offsets: Tensor | None = None) -> dict:
        """layer_scale, and drop_path as the library's module draws it, for each sample.

        dtype: that of the stream. offsets: those of packed samples x (tokens, D), for which each token has a factor.
        """
        module = None if self.drop_path is None else found.modules[self.drop_path]
        if type(module) in ABSENT or not module.training or getattr(module, "drop_prob", None) == 0:
            return dict(layer_scale=found.layer_scale, drop_path=None)
        samples = x.shape[0] if offsets is None else len(offsets) - 1
        draws = module(torch.ones((samples, 1, 1), device=x.device, dtype=dtype)).flatten()
        draws = draws if offsets is None else draws[owners(offsets, len(x))]
        return dict(layer_scale=found.layer_scale, drop_path=draws)

    def fits(self, layer: nn.Module) -> bool:
        """Whether the layer has the attention or MLP of this block."""
        path = self.part.path
        return (not path or type(attribute(layer, path)) is self.container) and attribute(layer, self.mark) is not None

    def covers(self, path: str) -> bool:
        """Whether a module or parameter of the layer is in the description."""
        tensors = {under(*tensor) for tensor in (*self.tensors, *([self.scale] if self.scale else []))}
        return path in self.types or path in self.called or path in tensors or path in self.layer.extras
