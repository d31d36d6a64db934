"""Layers on packed tokens: one row (1, tokens, D) of samples, each of which attends to itself.

As a mask the layers get one zero, expanded, whose storage carries the offsets (`Packed`): through views, saved tensors
and activation checkpointing. The layers' graphs are captured apart from those of padded batches. In them, attention
that was replaced gets the offsets. A graph in which the mask has other readers is refused.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from .. import backend, ops
from ..backend.arguments import attend, logit_bias
from ..backend.reports import Report
from ..kernels.launch import batch_invariant
from .layer import (
    FUNCTIONS,
    CompiledCall,
    _compiled,
    _first_tensor,
    _thread,
    _Uncompiled,
    _watch_dynamo,
    why_library,
)

_READS_NO_VALUES = frozenset({"size", "dim", "getattr", "sym_size"})


class Refused(Exception):
    """The layers cannot run on packed tokens; says why."""


def generator_of(like: Tensor) -> torch.Generator:
    """The generator of random numbers of a tensor's device."""
    return torch.cuda.default_generators[like.get_device()] if like.is_cuda else torch.default_generator


class Packed:
    """Samples one after the other in one row of tokens.

    offsets (S + 1,), longest: as attention takes them. valid (B, N): True for these tokens in a padded batch, None
    where nothing was padded. graphs: those that have run on the tokens. random_state: that of the generator before.
    """

    def __init__(self, offsets: Tensor, longest: int, tokens: int, valid: Tensor | None = None):
        self.offsets, self.longest, self.tokens, self.valid = offsets, longest, tokens, valid
        self.graphs: list[_Graph] = []
        self.random_state = generator_of(offsets).get_state()
        if valid is not None:
            self.places = torch.nonzero_static(valid.flatten(), size=tokens)[:, 0]

    @classmethod
    def without_padding(cls, valid: Tensor, fits: Tensor | None = None) -> "Packed | None":
        """Packs the tokens of a batch that are valid (B, N); None where all are, or none is.

        fits: a boolean tensor, whether the library's mask is that of this padding; None: it is.
        """
        lengths = valid.sum(1)
        fits = torch.ones_like(lengths[0]) if fits is None else fits.to(lengths.dtype)
        count, longest, fits = torch.stack([lengths.sum(), lengths.max(), fits]).tolist()
        if not fits:
            raise Refused("the mask is not one of padding")
        full = count == valid.numel() and not batch_invariant()  # which packs whatever it is, as among longer images
        return None if full or count < 2 else cls(F.pad(lengths.cumsum(0), (1, 0)).int(), longest, count, valid)

    def mask(self, like: Tensor) -> Tensor:
        """The mask of the layers: zeros that need no memory, whose storage leads back here."""
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        zero.untyped_storage().vitfast_packed = self  # an attribute of ours keeps no mask: that would be a leak
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

        timm's layers do not rotate the first tokens of a row: here those of the first sample.
        """
        still = torch.zeros_like(rope[:, :, :1])
        still[..., still.shape[-1] // 2 :] = 1.0
        rope = torch.cat([still.expand(-1, -1, prefix, -1), rope], 2)
        return self.pack(rope.transpose(1, 2)).transpose(1, 2)[:, :, prefix:]


def packed_of(*values) -> Packed | None:
    """The packed samples that the storage of a mask among these values carries."""
    for value in values:
        if type(value) is Tensor and value.dim() == 4 and not any(value.stride()):
            return getattr(value.untyped_storage(), "vitfast_packed", None)
    return None


def packed_block(mask: Tensor, x: Tensor, *layers, rope=None, num_prefix: int = 0, **options) -> Tensor:
    """ops.attention_block of one row of packed samples (1, tokens, D); mask: that of `Packed`."""
    packed = packed_of(mask)
    if rope is not None and num_prefix:
        rope = tuple(F.pad(table, (0, 0, num_prefix, 0), value=still) for table, still in zip(rope, (1.0, 0.0)))
    options |= dict(rope=rope, offsets=packed.offsets, longest=packed.longest)
    return ops.attention_block(x[0], *layers, **options)[None]


def packed_attend(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, axes: str = "bhnd") -> Tensor:
    """backend.arguments.attend of one row of packed samples."""
    packed, heads_first = packed_of(mask), axes == "bhnd"
    q, k, v = (t[0].transpose(0, 1) if heads_first else t[0] for t in (q, k, v))
    out = ops.attention(q, k, v, scale=scale, offsets=packed.offsets, longest=packed.longest)
    return (out.transpose(0, 1) if heads_first else out)[None]


_PACKED = {ops.attention_block: packed_block, attend: packed_attend}


def _is_mask(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op == "placeholder" and isinstance(value, Tensor) and value.dim() == 4 and not any(value.stride())


def use_offsets(module: GraphModule) -> str | None:
    """Gives offsets to the attention of a rewritten graph, in the mask's place; returns why it cannot."""
    masks = [node for node in module.graph.nodes if _is_mask(node)]
    if len(masks) != 1:
        return "its mask is not what its layers get"
    (mask,), replaced = masks, 0
    for bias in list(mask.users):
        if bias.target in _READS_NO_VALUES or getattr(bias.target, "__name__", "") in _READS_NO_VALUES:
            continue
        readers = list(bias.users)
        sole = bias.target is logit_bias and bias.args[0] == [mask]
        if not sole or not all(r.target in _PACKED and r.kwargs.get("bias") is bias for r in readers):
            return "attention in its layers is the library's, or checkpointed inside of them"
        if any("drop_path" in reader.kwargs for reader in readers):
            return "drop path in training draws random numbers for each sample"
        for reader in readers:
            reader.target, reader.args = _PACKED[reader.target], (mask, *reader.args)
            reader.kwargs = {name: value for name, value in reader.kwargs.items() if name != "bias"}
            replaced += 1
        module.graph.erase_node(bias)
    module.recompile()
    return None if replaced else "its layers read no mask"


class _Graph:
    """A layer's graph of packed tokens. why: for which it is refused."""

    def __init__(self, module: GraphModule, report: Report):
        self.run, self.report, self.is_tried = module.forward, report, False
        self.why = use_offsets(module)

    def __call__(self, *arguments):
        if self.why is not None:
            raise Refused(self.why)
        packed_of(*arguments).graphs.append(self)
        _thread.call.ran.append(self.report)
        return self.run(*arguments)


def _compile_packed(module: GraphModule, inputs: list) -> Callable:
    """The backend of layers on packed tokens."""
    unchanged = lambda x: x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(unchanged, unchanged):  # not those of activation checkpointing
        return _Graph(module, backend.replace_blocks(module, _thread.call.group.choices))


def packed_functions() -> list[Callable]:
    """Compiled code that layers share for packed tokens, of any number."""
    return [_compiled("packed", _compile_packed, dynamic=True) for _ in range(FUNCTIONS)]


class PackableCall(CompiledCall):
    """A layer's call, with padded or with packed tokens; for the latter there is no library's code.

    functions: compiled for packed tokens, which the layers share. packs: whether one of them runs.
    """

    def __init__(self, call: CompiledCall, functions: list[Callable]):
        vars(self).update(vars(call), functions=functions, packs=False)

    def patch_config(self, until_compiled: ExitStack) -> None:
        super().patch_config(until_compiled)
        if self.packs:  # an eps that varied would hide a norm
            until_compiled.enter_context(torch._dynamo.config.patch(specialize_float=True))

    def forward(self, *args, **kwargs):
        if packed_of(*args, *kwargs.values()) is None:
            return super().forward(*args, **kwargs)
        module, x = self.module(), _first_tensor(args, kwargs)
        self.ran, self.way, self.why = [], 0, why_library(x, args, kwargs)
        if self.why is not None:
            raise Refused(self.why)
        before, _thread.call, self.packs = _thread.call, self, True
        _watch_dynamo()
        try:
            for function in self.functions:
                with suppress(torch._dynamo.exc.FailOnRecompileLimitHit):
                    return function(module, args, kwargs)
            raise Refused("there are as many graphs of such layers as there may be")
        except torch._dynamo.exc.TorchDynamoException as error:
            raise Refused(f"a layer cannot be captured ({str(error).strip().splitlines()[0]})") from error
        except _Uncompiled:
            raise Refused("torch.compile is switched off here") from None
        finally:
            _thread.call, self.packs = before, False
