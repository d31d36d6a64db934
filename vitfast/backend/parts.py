"""The anchors of a region, and what every block has: norm, residual, layer scale and drop path."""

import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .arguments import factors
from .graph import Call, Region, Unrecognised
from .lengths import PACKED
from .linear import Linear, linear_of, with_bias
from .nodes import MULTIPLIES, constant_factor, name_of, shape_of, tensor_of, values_read
from .norm import NORMS, norm_arguments


class Choices(NamedTuple):
    """The user's choices: the dtype of the residual stream under autocast, and what is kept.

    residual_in_fp32: None for that of the original. keep: as in ops.attention_block.
    """

    residual_in_fp32: bool | None = None
    keep: str = "least"


AS_THE_ORIGINAL = Choices()
choices: ContextVar[Choices] = ContextVar("vitfast.backend.choices", default=AS_THE_ORIGINAL)  # for the graph at work


class Parts(NamedTuple):
    """The anchors of a region, in the graph's order."""

    region: Region
    linears: list[Linear]
    attentions: list[Node]  # scaled_dot_product_attention, multi_head_attention_forward or softmax
    norms: list[Node]

    def before(self, node: Node, stops: set[Node]) -> list[Node]:
        """The nodes of the region that a node comes from, itself too, up to stops, which are left out."""
        inside, found, stack = set(self.region.nodes), set(), [node]
        while stack:
            n = stack.pop()
            if n in inside and n not in stops and n not in found:
                found.add(n)
                stack += values_read(n)
        return [n for n in self.region.nodes if n in found]

    def after(self, node: Node) -> list[Node]:
        """The nodes of the region that come from a node, without itself."""
        found = {node}
        for n in self.region.nodes:
            if not found.isdisjoint(n.all_input_nodes):
                found.add(n)
        return [n for n in self.region.nodes if n in found and n is not node]

    def outside(self, nodes: list[Node], names: frozenset[str]) -> list[Node]:
        """The inputs that nodes with these names read, once each."""
        return self.region.read_by(n for n in nodes if name_of(n) in names)


ATTENTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax", "_softmax", PACKED)


def parts_of(region: Region) -> Parts:
    """The anchors of a region."""
    linears, attentions, norms = [], [], []
    inside = {*region.nodes, region.source}
    for node in region.nodes:
        name = name_of(node)
        if name in ATTENTIONS:
            attentions.append(node)
        elif name in NORMS:
            norms.append(node)
        elif (linear := linear_of(node)) is not None:
            if linear.x in inside and not {linear.weight, linear.bias} & inside:
                linears.append(with_bias(linear, inside))
    return Parts(region, linears, attentions, norms)


def stream_dtype(parts: Parts) -> torch.dtype:
    """The dtype of the residual stream: the output's, or another that was chosen under autocast."""
    output, in_fp32 = tensor_of(parts.region.output).dtype, choices.get().residual_in_fp32
    if in_fp32 is None or not parts.linears:
        return output
    last = parts.linears[-1]
    computed, weight = tensor_of(last.node).dtype, tensor_of(last.weight).dtype
    return output if computed == weight else torch.float32 if in_fp32 else computed


def common_arguments(parts: Parts, norm: Node, last: Node) -> tuple[list, Callable[[Call], dict]]:
    """([norm weight, norm bias], the keyword arguments of every block).

    last: the node of the output layer."""
    region, width = parts.region, shape_of(parts.region.source)[-1]
    first = parts.linears[0].node if parts.linears else last
    stops = {linear.node for linear in parts.linears} - {first}
    kind, weight, bias, eps = norm_arguments(norm, region, parts.before(first, stops))
    tail = parts.after(last)[:-1]
    scale = drop_path = None
    for given in parts.outside(tail, MULTIPLIES):
        shape = shape_of(given) or ()
        if len(shape) > 1 and all(n == 1 for n in shape[1:]) and shape[0] == shape_of(region.source)[0]:
            drop_path, twice = given, drop_path is not None
        elif shape == (1,) or (shape[-1:] == (width,) and all(n == 1 for n in shape[:-1])):
            scale, twice = given, scale is not None
        else:
            raise Unrecognised(f"the branch is multiplied by a tensor of shape {shape}")
        if twice:
            raise Unrecognised("the branch is multiplied by two vectors")
    factor, computed, keep = constant_factor(tail), tensor_of(last).dtype, choices.get().keep
    stream = stream_dtype(parts)

    def keywords(call: Call) -> dict:
        found = dict(eps=eps, norm=kind)
        if scale is not None:
            shaped = scale if len(shape_of(scale)) == 1 else call(Tensor.flatten, scale)
            shaped = call(Tensor.expand, shaped, width) if shape_of(scale) == (1,) else shaped  # a gate of the branch
            found["layer_scale"] = shaped if factor == 1 or drop_path is not None else call(torch.mul, shaped, factor)
        if drop_path is not None:
            found["drop_path"] = call(factors, drop_path, factor)
        if stream != computed:
            found["residual_in_fp32"] = True
        if keep != "least":
            found["keep"] = keep
        return found

    return [weight, bias], keywords


def call_block(
    parts: Parts, call: Call, operation: Callable, affine: list, layers: Iterable, *, tokens_first=False, **keywords
) -> Any:
    """Calls the operation of a block with x in the stream's dtype and as (B, N, D) or (tokens, D).

    affine: the norm's weight and bias. tokens_first: whether x is (N, B, D)."""
    source, dtype, (weight, bias) = parts.region.source, stream_dtype(parts), affine
    chosen = choices.get().residual_in_fp32 is not None  # then the source may have another dtype than the graph says
    x = source if tensor_of(source).dtype == dtype and not chosen else call(Tensor.to, source, dtype)
    if weight is None:
        weight = call(torch.ones, shape_of(source)[-1], dtype=dtype, device=tensor_of(source).device)
    first = int("offsets" not in keywords)  # the first axis that holds tokens
    flat = len(shape_of(source)) > 2 + first
    rows = call(Tensor.flatten, x, first, -2) if flat else x
    rows = call(Tensor.transpose, x, 0, 1) if tokens_first else rows
    out = call(operation, rows, weight, bias, *layers, **keywords)
    out = call(Tensor.transpose, out, 0, 1) if tokens_first else out
    return call(Tensor.view_as, out, x) if flat else out


def tokens_may_be_first(parts: Parts, tokens: int) -> list[bool]:
    """The values of tokens_first that the source's shape allows, of so many tokens."""
    shape = shape_of(parts.region.source)
    rest = [False] if math.prod(shape[1:-1]) == tokens or shape[0] != tokens else []
    return rest + [True] * (len(shape) == 3 and shape[0] == tokens)
