"""`accelerate(model, pack=True)`: batches of images of many sizes run without their padding.

timm's NaFlexVit and SigLIP 2 pad a batch to its longest image. Here padding is removed before the layers and zeros are
added after them, for which the host waits for a GPU once a forward. Pixtral has all images in one row of tokens, and
writes a mask of all pairs of tokens; here it writes none. The mask that layers get is one expanded zero, whose storage
carries the offsets through views, saved tensors and checkpoints. In graphs of packed tokens, attention reads these.
"""

import copy
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from ..kernels.tiles import batch_invariant
from ..ops.fusable import has_instance_forward
from .eager import CompiledCall, Group, replica_of
from .packed import packed_of, use_offsets
from .parts import Choices

AT_THE_FIRST_CALL = "decided at the first call"
_log = logging.getLogger("vitfast")


class Refused(Exception):
    """Raised where layers cannot run on packed tokens; its text is the reason."""


class Packed:
    """Samples one after the other in one row of tokens.

    offsets (S + 1,), longest: as attention takes them. valid (B, N): True for these tokens in a padded batch, None
    where nothing was padded. graphs: the layers' graphs that have run on the tokens.
    """

    def __init__(self, offsets: Tensor, longest: int, tokens: int, valid: Tensor | None = None):
        self.offsets, self.longest, self.tokens, self.valid = offsets, longest, tokens, valid
        self.graphs: list[_PackedGraph] = []
        if valid is not None:
            self.places = torch.nonzero_static(valid.flatten(), size=tokens)[:, 0]

    @classmethod
    def without_padding(cls, valid: Tensor, fits: Tensor | bool = True) -> "Packed | None":
        """Packs the tokens of a batch that are valid (B, N); None for less than two, or a full batch.

        fits: whether the library's mask is that of this padding, a bool or a tensor; raises Refused if it is not.
        """
        lengths = valid.sum(1)
        count, longest, fits = torch.stack([lengths.sum(), lengths.max(), lengths.new_ones(()) * fits]).tolist()
        if not fits:
            raise Refused("the mask is not one of padding")
        # In batch-invariant mode full batches are packed too: each image has the bits that it has among longer ones.
        full = count == valid.numel() and not batch_invariant()
        return None if full or count < 2 else cls(F.pad(lengths.cumsum(0), (1, 0)).int(), longest, count, valid)

    def mask(self, like: Tensor) -> Tensor:
        """Returns the mask for the layers: one expanded zero, whose storage refers to these samples."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        zero.untyped_storage().vitfast_packed = self  # self has no attribute with the mask: such a cycle would leak
        return zero.expand(1, 1, self.tokens, self.tokens)

    def pack(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (1, tokens, ...)."""
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """(1, tokens, ...) -> (B, N, ...), with zeros for padding."""
        rows = x.new_zeros(self.valid.numel(), *x.shape[2:]).index_copy(0, self.places, x[0])
        return rows.unflatten(0, self.valid.shape)

    def pack_rope(self, rope: Tensor, prefix: int) -> Tensor:
        """timm's sines beside cosines, (B, 1 or H, N - prefix, 2 Dh) -> (1, 1 or H, tokens - prefix, 2 Dh).

        timm's layers do not rotate the first `prefix` tokens of a row, which are those of the first sample here. The
        prefix tokens of other samples get a sine of 0 and a cosine of 1.
        """
        still = torch.zeros_like(rope[:, :, :1])
        still[..., still.shape[-1] // 2 :] = 1.0
        rope = torch.cat([still.expand(-1, -1, prefix, -1), rope], 2)
        return self.pack(rope.transpose(1, 2)).transpose(1, 2)[:, :, prefix:]


class _PackedGraph:
    """A layer's graph on packed tokens; why: the reason for which it may not run, or None."""

    def __init__(self, module: GraphModule, run: Callable):
        self.run, self.is_tried, self.why = run, False, use_offsets(module)

    def __call__(self, *arguments):
        if self.why is not None:
            raise Refused(self.why)
        packed_of(*arguments).graphs.append(self)
        return self.run(*arguments)


class _PackedGroup(Group):
    """Compiled code that layers share for packed tokens, on which the library's own code cannot run."""

    def compile_graph(self, module: GraphModule, inputs: list) -> Callable:
        return _PackedGraph(module, run=super().compile_graph(module, inputs))

    def is_first(self, x: Tensor) -> bool:
        return False

    def patch_config(self, until_compiled: ExitStack, way: int) -> None:
        super().patch_config(until_compiled, way)
        numbers = torch._dynamo.config.patch(specialize_float=True)  # a symbolic eps would hide a norm
        until_compiled.enter_context(numbers)

    def run_library(self, call: CompiledCall, args: tuple, kwargs: dict):
        raise Refused(call.why)


class PackableCall(CompiledCall):
    """The call that runs in place of a layer's code, on padded or on packed tokens."""

    def __init__(self, call: CompiledCall, group: _PackedGroup):
        super().__init__(call.module(), call.group)
        self.packed = CompiledCall(call.module(), group)

    def forward(self, *args, **kwargs):
        if packed_of(*args, *kwargs.values()) is None:
            return super().forward(*args, **kwargs)
        try:
            return self.packed.forward(*args, **kwargs)
        finally:
            self.ran, self.way, self.why = self.packed.ran, 0, self.packed.why


def _hooked(module: nn.Module) -> bool:
    """Whether a hook would get packed tokens; those of transformers run only if a call asks for outputs."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    theirs = all(hook.__module__ == getattr(capturing, "__name__", "") for hook in module._forward_hooks.values())
    return bool(module._forward_hooks) and not (theirs and not capturing._active_collector.get())


def _is_same(ours, theirs, valid: Tensor | None) -> bool:
    """Whether two outputs are equal within a tolerance; of tokens (B, N, D), only the valid ones count."""
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            tolerance = 5e-2 if a.dtype.itemsize == 2 or torch.is_autocast_enabled(a.device.type) else 1e-3
            counted = valid if valid is not None and a.dim() == 3 and a.shape[:2] == valid.shape else ...
            a, b = a.detach()[counted].float(), b[counted].float()
            if not torch.allclose(a, b, rtol=0.0, atol=tolerance * float(b.abs().max())):
                return False
    return True


# (a module's output, the tokens that its layers packed or None); None in place of both if nothing ran.
PackedRun = tuple[Any, Packed | None] | None


class Tower:
    """The call that runs in place of the code of a module around layers.

    run_packed(tower, module, args, kwargs) -> PackedRun. why: why the last call kept the padding or the mask.
    """

    def __init__(self, module: nn.Module, layers: nn.Module, run_packed: Callable):
        self.module, self.layers, self.run_packed = weakref.ref(module), weakref.ref(layers), run_packed
        self.why: str | None = AT_THE_FIRST_CALL

    def __call__(self, *args, **kwargs):
        module = self.module()
        if torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        if (replica := replica_of(module, sys._getframe(1))) is not None:
            return replica._call_impl(*args, **kwargs)
        weight = next(module.parameters())
        self.why = self.unsupported(module)
        if self.why is None:
            cuda = torch.cuda.default_generators
            generator = cuda[weight.get_device()] if weight.is_cuda else torch.default_generator
            state = generator.get_state()
            try:
                if (run := self.run_packed(self, module, args, kwargs)) is not None:
                    self._compare(*run, lambda: (generator.set_state(state), module._call_impl(*args, **kwargs))[1])
                    return run[0]
            except Refused as reason:
                self.why = str(reason)
                generator.set_state(state)
        return module._call_impl(*args, **kwargs)

    def _compare(self, out, packed: Packed | None, padded: Callable) -> None:
        """Compares `out` with the padded way's if a graph is new; on a difference, no such graph runs again."""
        if packed is None:
            return
        if len(packed.graphs) < len(self.layers()):  # a layer that ran without offsets has mixed the samples
            raise Refused("not all of its layers ran on packed tokens")
        new = [graph for graph in packed.graphs if not graph.is_tried]
        if not new:
            return
        with torch.random.fork_rng([packed.offsets.device] if packed.offsets.is_cuda else []), torch.no_grad():
            why = None if _is_same(out, padded(), packed.valid) else "its numbers differ from the padded way's"
        for graph in new:
            graph.is_tried, graph.why = True, why
        if why is not None:
            raise Refused(why)

    def unsupported(self, module: nn.Module) -> str | None:
        """Returns why a call cannot run on packed tokens, or None if it can be tried."""
        if _has_any_global_hook() or any(map(_hooked, module.modules())):
            return "there are hooks, or the call asks for outputs of layers"
        if any(has_instance_forward(x) or not isinstance(x._compiled_call_impl, PackableCall) for x in self.layers()):
            return "some of its layers are the library's"
        traced = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None
        if traced or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return "a transform of torch.func, torch.jit.trace or the capture of a CUDA graph is at work"
        return None


def _naflexvit(tower: Tower, module: nn.Module, args: tuple, kwargs: dict) -> PackedRun:
    """Runs a shallow copy of timm's NaFlexVit with two methods of ours."""
    if module.training and getattr(module, "patch_drop", None) is not None:
        raise Refused("it drops patches in training")
    copied, cls, batches = copy.copy(module), type(module), []

    def forward_embeds(x, patch_coord, patch_valid, attn_mask):
        packed = None
        if patch_coord is not None and patch_valid is not None and attn_mask is None:
            prefix = patch_valid.new_ones(len(patch_valid), copied.num_prefix_tokens)
            packed = Packed.without_padding(torch.cat([prefix, patch_valid], 1).bool())
        if packed is None:
            return cls._forward_embeds(copied, x, patch_coord, patch_valid, attn_mask)
        embeds = cls._forward_embeds(copied, x, patch_coord, patch_valid, patch_valid)  # with any mask, it writes none
        rope, pack = embeds["rope_embeds"], partial(packed.pack_rope, prefix=copied.num_prefix_tokens)
        if rope is not None:
            rope = pack(rope) if isinstance(rope, Tensor) else map(pack, rope)
        batches.append(packed)
        tokens = packed.pack(embeds["patches"])
        return embeds | dict(patches=tokens, rope_embeds=rope, attn_mask=packed.mask(tokens))

    def forward_features(*args, **kwargs):
        features = cls.forward_features(copied, *args, **kwargs)
        return features | dict(patches=batches[0].unpack(features["patches"])) if batches else features

    copied.__dict__.update(_forward_embeds=forward_embeds, forward_features=forward_features)
    return copied(*args, **kwargs), batches[0] if batches else None


def _siglip2(tower: Tower, module: nn.Module, args: tuple, kwargs: dict) -> PackedRun:
    """Runs the encoder of SigLIP 2's vision model; that of texts is left, as texts may attend to padding."""
    kwargs = dict(zip(("inputs_embeds", "attention_mask"), args)) | kwargs
    x, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
    if mask is None:
        return None
    if type(x) is not Tensor or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, x.shape[1]):
        raise Refused("the mask is not one of padding")
    shown = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    valid = shown[:, 0].any(1)
    fits = (shown == valid[:, None, None]).all() & ((mask == 0) | ~shown | (mask.dtype == torch.bool)).all()
    packed = Packed.without_padding(valid.expand(x.shape[:2]), fits)
    if packed is None:
        return None
    x = packed.pack(x)
    out = module._call_impl(**kwargs | dict(inputs_embeds=x, attention_mask=packed.mask(x)))
    out.last_hidden_state = packed.unpack(out.last_hidden_state)
    return out, packed


def _pixtral(tower: Tower, module: nn.Module, args: tuple, kwargs: dict) -> PackedRun:
    """Runs Pixtral's vision model, with `_Masks` in place of the function that writes its masks."""
    batches, write = [], getattr(_file_of(module), _WRITES)
    if not isinstance(write, _Masks):
        setattr(_file_of(module), _WRITES, _Masks(write))
    before = _in_one_row.set((tower, batches))
    try:
        return module._call_impl(*args, **kwargs), batches[0] if batches else None
    finally:
        _in_one_row.reset(before)


_WRITES = "generate_block_attention_mask"
_in_one_row: ContextVar[tuple[Tower, list[Packed]] | None] = ContextVar("vitfast.backend.padding", default=None)


class _Masks:
    """Pixtral's function that writes masks of all pairs of tokens; in a tower's call, `Packed.mask`."""

    def __init__(self, write: Callable):
        self.write = write

    def __call__(self, patch_embeds_list: list[int], tensor: Tensor) -> Tensor:
        tower, batches = _in_one_row.get() or (None, [])
        if torch.compiler.is_compiling() or tower is None:
            return self.write(patch_embeds_list, tensor)
        tower.why = tower.unsupported(tower.module())  # only inside the forward `_hooked` knows the outputs asked for
        if tower.why is not None:
            return self.write(patch_embeds_list, tensor)
        offsets = torch.tensor([0, *patch_embeds_list]).cumsum(0).int().to(tensor.device, non_blocking=True)
        batches.append(Packed(offsets, max(patch_embeds_list), tensor.shape[1]))
        return batches[0].mask(tensor)


def _file_of(module: nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)


def _towers_of(model: nn.Module) -> Iterator[Tower]:
    """Finds the modules around layers that can pack tokens, by their attributes and arguments."""
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters
        encoder, transformer = (getattr(module, name, None) for name in ("encoder", "transformer"))
        if "patch_valid" in parameters and hasattr(module, "_forward_embeds") and hasattr(module, "blocks"):
            yield Tower(module, module.blocks, _naflexvit)
        if "spatial_shapes" in parameters and hasattr(encoder, "layers"):
            yield Tower(encoder, encoder.layers, _siglip2)
        if "image_sizes" in parameters and hasattr(transformer, "layers") and hasattr(_file_of(module), _WRITES):
            yield Tower(module, transformer.layers, _pixtral)


def add(model: nn.Module, choices: Choices) -> None:
    """Installs towers in a model, whose layers already have a CompiledCall each."""
    for tower in (towers := list(_towers_of(model))):
        group = _PackedGroup("packed", choices, is_layer=False)
        for layer in tower.layers():
            if isinstance(call := layer._compiled_call_impl, CompiledCall):
                layer._compiled_call_impl = PackableCall(call, group)
        tower.module()._compiled_call_impl = tower
    if not towers:
        _log.warning("accelerate: %s has no layers whose padding vitfast removes", type(model).__name__)


def discard(model: nn.Module) -> None:
    """Removes the towers of a model; the layers keep their calls."""
    for module in model.modules():
        if isinstance(module._compiled_call_impl, Tower):
            module._compiled_call_impl = None
            write = getattr(_file_of(module), _WRITES, None)
            if isinstance(write, _Masks):  # a call of another accelerated model installs it again
                setattr(_file_of(module), _WRITES, write.write)
