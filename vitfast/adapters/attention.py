"""The attention half of a library's encoder layer on `ops.attention_block`, or on smaller operations."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from ..ops.fusable import Modules
from .fallbacks import DROPOUT
from .fused_blocks import Found, FusedBlock, add_projection, attribute, under
from .leaves import normalized

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

    def unsupported_reason(self, modules: Modules) -> str | None:
        part, attention = self.part, modules[self.part.path]
        if part.dropout is not None and attention.training and attribute(attention, part.dropout) > 0:
            return DROPOUT
        proj = modules[under(part.path, part.proj)]
        heads, width = self.heads(modules), proj.weight.shape[1]
        if width % heads:
            return "q, k and v do not divide into heads"
        for name in self.qkv:
            path = under(part.path, name)
            layer = modules.get(path)
            rows = layer.out_features if layer is not None else attribute(attention, name).shape[0]
            if rows != (3 * width if self.packed else width):
                return f"{path} does not give num_heads heads"
            if part.biases is not None and layer is not None and layer.bias is not None:
                return f"{path} has a bias beside {', '.join(part.biases)}"
        if part.scale is not None and attribute(attention, part.scale) != (width // heads) ** -0.5:
            return f"{under(part.path, part.scale)} is not 1 / sqrt(head size)"
        return head_unsupported(width // heads, 1.0)

    def _pack(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """q, k and v as one linear layer: concatenated at each call, and autograd splits the gradient."""
        *norm, proj_weight, proj_bias = tensors
        norm, rest = norm[:2], norm[2:]
        if self.part.biases is not None:
            weights, biases = rest[:-3], rest[-3:]
        else:
            weights, biases = rest[0::2], rest[1::2]
        weight = weights[0] if self.packed else torch.cat(weights)
        return [*norm, weight, _packed_bias(biases), proj_weight, proj_bias]

    def run(self, found: Found, x: Tensor, options: dict, factors: dict) -> Tensor:
        *norm, weight, bias, proj_weight, proj_bias = tensors = self._pack(found.tensors)
        modules, heads = found.modules, self.heads(found.modules)
        if self.part.bias_mask is not None and bias is not None:
            mask = attribute(modules[under(self.part.path, self.part.qkv)], self.part.bias_mask)
            bias = bias if mask is None else bias * mask.to(bias.dtype)
            tensors = [*norm, weight, bias, proj_weight, proj_bias]
        if found.around is None:
            options = dict(num_heads=heads, **self.norm_options(modules), **options)
            return ops.attention_block(x, *tensors, **options, **factors)
        part, attention = self.part, modules[self.part.path]
        qkv = F.linear(normalized(modules[self.norm], x), weight, bias).unflatten(-1, (3, heads, -1))
        q, k, v = qkv.unbind(-3)
        if part.qk_norms is not None:
            q, k = (self._norm_of(attribute(attention, name), y) for name, y in zip(part.qk_norms, (q, k)))
        o = ops.attention(q.to(v.dtype), k.to(v.dtype), v, **options).flatten(-2)
        if part.inner_norm is not None and (norm := attribute(attention, part.inner_norm)) is not None:
            o = norm(o)
        return add_projection(o, proj_weight, proj_bias, x, **factors)

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
