"""`accelerate(model, pack=True)`: batches of images of many sizes run without their padding.

timm's NaFlexVit and SigLIP 2 pad a batch to its longest image. Here the padding is removed before the layers, and zeros
are added in its place after them, for which the host waits for a GPU once a forward. Pixtral lays images in one row and
writes a mask of all pairs of tokens; here no mask is written. The library's padded way runs where hooks would see
packed tokens, where graphs of layers are refused (packed_layers.py), and where in their first call they draw random
numbers or give other numbers than the padded way.
"""

import copy
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_leaves

from ..ops.fusable import own_forward
from .layer import CompiledCall
from .packed_layers import PackableCall, Packed, Refused, generator_of, packed_functions

AT_THE_FIRST_CALL = "decided at the first call"
_log = logging.getLogger("vitfast")


def _hooked(module: nn.Module) -> bool:
    """Whether a hook would see packed tokens; transformers' own are idle unless a call asks for outputs."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    theirs = all(hook.__module__ == getattr(capturing, "__name__", "") for hook in module._forward_hooks.values())
    return bool(module._forward_hooks) and not (theirs and not capturing._active_collector.get())


def _is_same(ours, theirs, valid: Tensor | None) -> bool:
    """Whether two outputs have the same numbers, in tokens (B, N, D) where they are valid."""
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            if valid is not None and a.dim() == 3 and a.shape[:2] == valid.shape:
                a, b = a[valid], b[valid]
            rounded = a.dtype.itemsize == 2 or torch.is_autocast_enabled(a.device.type)
            a, b = a.detach().float(), b.float()
            if not torch.allclose(a, b, rtol=0.0, atol=float(b.abs().max()) * (5e-2 if rounded else 1e-3)):
                return False
    return True


class Tower:
    """The call that runs in place of the code of a module around layers.

    why: why the last call kept the padding or the mask, None if it did not.
    """

    packs_layers = True

    def __init__(self, module: nn.Module, layers: nn.Module):
        self.module, self.layers = weakref.ref(module), weakref.ref(layers)
        self.why: str | None = AT_THE_FIRST_CALL

    def seen(self, module: nn.Module) -> Iterable[nn.Module]:
        """The modules whose hooks would see packed tokens, or run twice."""
        return (module, *self.layers().modules())

    def run_packed(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Packed | None] | None:
        """(The output, the packed tokens if there was something to pack), or None if nothing ran."""
        raise NotImplementedError

    def __call__(self, *args, **kwargs):
        module = self.module()
        if torch.compiler.is_compiling():
            return module._call_impl(*args, **kwargs)
        weight = next(module.parameters())
        self.why = self.unsupported(module, weight)
        if self.why is None:
            generator = generator_of(weight)
            state = generator.get_state()
            try:
                found = self.run_packed(module, args, kwargs)
                if found is not None:
                    out, packed = found
                    self._try(lambda: module._call_impl(*args, **kwargs), out, packed, generator, state)
                    return out
            except Refused as reason:
                self.why = str(reason)
                generator.set_state(state)
        return module._call_impl(*args, **kwargs)

    def unsupported(self, module: nn.Module, weight: Tensor) -> str | None:
        """Why this call cannot be tried with packed tokens."""
        if _has_any_global_hook() or any(map(_hooked, self.seen(module))):
            return "there are hooks, or the call asks for outputs of layers"
        if any(own_forward(x) or not isinstance(x._compiled_call_impl, PackableCall) for x in self.layers()):
            return "some of its layers are the library's"
        if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None:
            return "a transform of torch.func or torch.jit.trace is at work"
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is captured"
        return None

    def _try(self, padded: Callable, out, packed: Packed | None, generator: torch.Generator, state: Tensor) -> None:
        """Compares the first output of graphs with that of padded tokens, and refuses graphs that differ."""
        new = [] if packed is None else [graph for graph in packed.graphs if not graph.is_tried]
        if not new:
            return
        why, after = None, generator.get_state()
        if not torch.equal(packed.random_state, after):
            why = "its layers draw random numbers (dropout or drop path), which are not those of padded tokens"
        else:
            generator.set_state(state)
            with torch.no_grad():
                why = None if _is_same(out, padded(), packed.valid) else "its numbers differ from the padded way's"
            generator.set_state(after)
        for graph in new:
            graph.is_tried, graph.why = True, why
        if why is not None:
            raise Refused(why)


class _NaFlexVit(Tower):
    """timm's NaFlexVit, of which a shallow copy runs with two methods of ours."""

    def seen(self, module: nn.Module) -> Iterable[nn.Module]:
        return (*super().seen(module), *module.norm.modules())

    def run_packed(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Packed | None] | None:
        if module.training and getattr(module, "patch_drop", None) is not None:
            raise Refused("it drops patches in training")
        copied, cls, found = copy.copy(module), type(module), []

        def forward_embeds(x, patch_coord, patch_valid, attn_mask):
            given, packed = (x, patch_coord, patch_valid), None
            if patch_coord is not None and patch_valid is not None and attn_mask is None:
                prefix = patch_valid.new_ones(len(patch_valid), copied.num_prefix_tokens)
                packed = Packed.without_padding(torch.cat([prefix, patch_valid], 1).bool())
            if packed is None:
                return cls._forward_embeds(copied, *given, attn_mask)
            embeds = cls._forward_embeds(copied, *given, patch_valid)  # with a mask given, it writes none
            rope, pack = embeds["rope_embeds"], partial(packed.pack_rope, prefix=copied.num_prefix_tokens)
            if rope is not None:
                rope = pack(rope) if isinstance(rope, Tensor) else map(pack, rope)
            found.append(packed)
            tokens = packed.pack(embeds["patches"])
            return embeds | dict(patches=tokens, rope_embeds=rope, attn_mask=packed.mask(tokens))

        def forward_features(*args, **kwargs):
            features = cls.forward_features(copied, *args, **kwargs)
            return features | dict(patches=found[0].unpack(features["patches"])) if found else features

        copied.__dict__.update(_forward_embeds=forward_embeds, forward_features=forward_features)
        return copied(*args, **kwargs), found[0] if found else None


class _Siglip2(Tower):
    """The encoder in SigLIP 2's vision model. That of texts is left, as they may read a token of padding."""

    def run_packed(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Packed | None] | None:
        kwargs = dict(zip(("inputs_embeds", "attention_mask"), args)) | kwargs
        x, mask = kwargs["inputs_embeds"], kwargs.get("attention_mask")
        if mask is None:
            return None
        if type(x) is not Tensor or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, x.shape[1]):
            raise Refused("the mask is not one of padding")
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        valid = seen[:, 0].any(1)
        fits = (seen == valid[:, None, None]).all()
        if mask.dtype != torch.bool:
            fits = fits & ((mask == 0) | ~seen).all()
        packed = Packed.without_padding(valid.expand(x.shape[:2]), fits)
        if packed is None:
            return None
        x = packed.pack(x)
        out = module._call_impl(**kwargs | dict(inputs_embeds=x, attention_mask=packed.mask(x)))
        out.last_hidden_state = packed.unpack(out.last_hidden_state)
        return out, packed


class _Pixtral(Tower):
    """Pixtral's vision model; the function in its file that writes masks is replaced."""

    def __init__(self, module: nn.Module, layers: nn.Module):
        super().__init__(module, layers)
        library = sys.modules[type(module).__module__]
        if not isinstance(library.generate_block_attention_mask, _Masks):
            library.generate_block_attention_mask = _Masks(library, library.generate_block_attention_mask)
        library.generate_block_attention_mask.towers.add(self)

    def run_packed(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[Any, Packed | None] | None:
        found: list[Packed] = []
        before = _in_one_row.set((self, found))
        try:
            return module._call_impl(*args, **kwargs), found[0] if found else None
        finally:
            _in_one_row.reset(before)


_in_one_row: ContextVar[tuple[_Pixtral, list[Packed]] | None] = ContextVar("vitfast.adapters.packing", default=None)


class _Masks:
    """Pixtral's function that writes masks of all pairs of tokens; in calls of towers, their mask."""

    def __init__(self, library: ModuleType, write: Callable):
        self.library, self.write, self.towers = library, write, weakref.WeakSet()

    def __call__(self, patch_embeds_list: list[int], tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or _in_one_row.get() is None:
            return self.write(patch_embeds_list, tensor)
        tower, found = _in_one_row.get()
        tower.why = tower.unsupported(tower.module(), tensor)  # now the outputs that the call asks for are known
        if tower.why is not None:
            return self.write(patch_embeds_list, tensor)
        offsets = torch.tensor([0, *patch_embeds_list]).cumsum(0).int().to(tensor.device, non_blocking=True)
        found.append(Packed(offsets, max(patch_embeds_list), tensor.shape[1]))
        return found[0].mask(tensor)

    def discard(self, tower: Tower) -> None:
        self.towers.discard(tower)
        if not self.towers:
            self.library.generate_block_attention_mask = self.write


def _towers_of(model: nn.Module) -> Iterator[Tower]:
    """Finds towers by what they have."""
    for module in model.modules():
        parameters = inspect.signature(type(module).forward).parameters
        if "patch_valid" in parameters and hasattr(module, "_forward_embeds") and hasattr(module, "blocks"):
            yield _NaFlexVit(module, module.blocks)
        encoder, transformer = (getattr(module, name, None) for name in ("encoder", "transformer"))
        if "spatial_shapes" in parameters and hasattr(encoder, "layers"):
            yield _Siglip2(encoder, encoder.layers)
        writes = hasattr(sys.modules.get(type(module).__module__), "generate_block_attention_mask")
        if writes and "image_sizes" in parameters and hasattr(transformer, "layers"):
            yield _Pixtral(module, transformer.layers)


def tower_of(module: nn.Module) -> Tower | None:
    """The tower that `add` has put in the place of a module's own code."""
    call = module.__dict__.get("_compiled_call_impl")
    return call if isinstance(call, Tower) else None


def add(model: nn.Module) -> None:
    """Packs the tokens of the towers in a model, after its layers have got calls of ours."""
    towers = list(_towers_of(model))
    for tower in towers:
        functions = packed_functions()
        for layer in tower.layers():
            if isinstance(call := layer._compiled_call_impl, CompiledCall):
                layer._compiled_call_impl = PackableCall(call, functions)
        tower.module()._compiled_call_impl = tower
    if not towers:
        _log.warning("accelerate: %s has no layers whose padding vitfast removes", type(model).__name__)


def discard(model: nn.Module) -> None:
    """Undoes `add`, but for the layers' calls."""
    for module in model.modules():
        if (tower := tower_of(module)) is not None:
            module.__dict__.pop("_compiled_call_impl")
            masks = getattr(sys.modules.get(type(module).__module__), "generate_block_attention_mask", None)
            if isinstance(masks, _Masks):
                masks.discard(tower)
