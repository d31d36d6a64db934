"""The attention half of a library's encoder layer on `ops.attention_block`, or on smaller operations."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from ..ops.fusable import Modules
from .fallback_log import DROPOUT
from .fused_blocks import Found, FusedBlock, add_branch, add_projection, attribute, under
from .patch_and_norm import normalized

# The tensors of the block are norm weight and bias, then q, k and v (in one or separate), then the projection.


class AttentionBlock(FusedBlock):
    """x + behind(proj(attention(qkv(norm(x)))))."""

    name = "attention block"
    half = 0

    def build(self) -> None:
        part = self.part
        self.packed = isinstance(part.qkv, str)
        self.qkv = (part.qkv,) if self.packed else part.qkv
        for name in self.qkv:
            self.linear(under(part.path, name), bias=part.biases is None)
        for name in part.biases or ():
            self.tensors.append((part.path, name))
        self.linear(under(part.path, part.proj))
        self.called = tuple(under(part.path, name) for name in (*(part.qk_norms or ()), part.inner_norm) if name)

    def heads(self, modules: Modules) -> int:
        return attribute(modules[self.part.path], self.part.heads)

    def allow_calls(self, order: list[str]) -> None:
        """Lets wrapped linear layers be called where the library's forward calls them too.

        order: the names of all modules that it calls, in their order; a layer whose weight it reads is not among them.
        """
        qkv, last = [under(self.part.path, name) for name in self.qkv], under(self.part.path, self.part.proj)
        called = qkv if self.part.biases is None and set(qkv) <= set(order) else []
        self.projections = tuple(path for path in dict.fromkeys(order) if path in (*called, last))

    def unsupported_reason(self, modules: Modules, wrapped: tuple[str, ...] = ()) -> str | None:
        part, attention = self.part, modules[self.part.path]
        if part.dropout is not None and attention.training and attribute(attention, part.dropout) > 0:
            return DROPOUT
        last = under(part.path, part.proj)
        proj, heads = modules[last], self.heads(modules)
        width = getattr(proj, "in_features", None) if last in wrapped else proj.weight.shape[1]
        if width is None:
            return f"{last} does not say its in_features"
        if width % heads:
            return "q, k and v do not divide into heads"
        for name in self.qkv:
            path = under(part.path, name)
            layer = modules.get(path)
            rows = getattr(layer, "out_features", None) if layer is not None else attribute(attention, name).shape[0]
            if rows != (3 * width if self.packed else width):
                return f"{path} does not give num_heads heads"
            if part.biases is not None and layer is not None and layer.bias is not None:
                return f"{path} has a bias beside {', '.join(part.biases)}"
        if part.scale is not None and attribute(attention, part.scale) != (width // heads) ** -0.5:
            return f"{under(part.path, part.scale)} is not 1 / sqrt(head size)"
        return head_unsupported(width // heads, 1.0)

    def _packed(self, found: Found) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of q, k and v as one layer; autograd splits the gradient."""
        tensors = found.tensors[2:-2]
        if self.part.biases is not None:
            weights, biases = tensors[:-3], tensors[-3:]
        else:
            weights, biases = tensors[0::2], tensors[1::2]
        weight, bias = weights[0] if self.packed else torch.cat(weights), _packed_bias(biases)
        if self.part.bias_mask is not None and bias is not None:
            mask = attribute(found.modules[under(self.part.path, self.part.qkv)], self.part.bias_mask)
            bias = bias if mask is None else bias * mask.to(bias.dtype)
        return weight, bias

    def _qkv(self, found: Found, h: Tensor) -> list[Tensor]:
        """q, k and v (..., H, Dh) of the normalised tokens."""
        heads, paths = self.heads(found.modules), [under(self.part.path, name) for name in self.qkv]
        if not any(path in found.wrapped for path in paths):
            y = [F.linear(h, *self._packed(found))]
        else:  # in the library's order, in which LoRA draws its dropout
            made = {path: found.modules[path](h) for path in self.projections if path in paths}
            y = [made[path] for path in paths]
        if len(y) == 1:
            return list(y[0].unflatten(-1, (3, heads, -1)).unbind(-3))
        return [each.unflatten(-1, (heads, -1)) for each in y]

    def run(self, found: Found, x: Tensor, options: dict, factors: Callable[[], dict]) -> Tensor:
        modules, (norm_weight, norm_bias, *_, proj_weight, proj_bias) = found.modules, found.tensors
        if found.around is None:
            options = dict(num_heads=self.heads(modules), **self.norm_options(modules), **options)
            tensors = norm_weight, norm_bias, *self._packed(found), proj_weight, proj_bias
            return ops.attention_block(x, *tensors, **options, **factors(), keep=found.keep)
        part, attention = self.part, modules[self.part.path]
        q, k, v = self._qkv(found, normalized(modules[self.norm], x))
        if part.qk_norms is not None:
            q, k = (self._norm_of(attribute(attention, name), y) for name, y in zip(part.qk_norms, (q, k)))
        o = ops.attention(q.to(v.dtype), k.to(v.dtype), v, **options).flatten(-2)
        if part.inner_norm is not None and (norm := attribute(attention, part.inner_norm)) is not None:
            o = norm(o)
        if (last := under(part.path, part.proj)) in found.wrapped:
            return add_branch(modules[last](o), x, **factors())
        return add_projection(o, proj_weight, proj_bias, x, **factors())

    def _norm_of(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The norm of q or k (..., H, Dh), over each head or over all."""
        if not self.part.norms_over_heads:
            return norm(x)
        return norm(x.flatten(-2)).unflatten(-1, x.shape[-2:])


def _packed_bias(biases: list[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    if not given or len(biases) == 1:
        return biases[0]
    return torch.cat([torch.zeros_like(given[0]) if bias is None else bias for bias in biases])
