"""Proposes ops.attention_block, with the layers of q, k and v; outside of blocks, ops.attention."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .. import ops
from .arguments import attend, logit_bias, module_mask, pack_qkv, rotary_table, table_rows, tokens_without_row
from .graph import Call, Candidate, Positions, Proposal, Unrecognised
from .lengths import PACKED, packing_of
from .masks import Mask, mask_arguments, masks_of, write_bias
from .nodes import DIVIDES, MULTIPLIES, PRODUCTS, argument, name_of, shape_of, size, tensor_of, value_of, values_read
from .parts import Linear, Parts, call_block, common_arguments, constant_factor


def attention_alone(positions: Positions, node: Node) -> Candidate | None:
    """Proposes ops.attention for scaled_dot_product_attention, or a softmax with the products around it.

    None for a softmax without these products. Raises Unrecognised for attention that the operation cannot compute.
    """
    if name_of(node) == "scaled_dot_product_attention":
        nodes, (q, k, v), masks, scale = [node], *_fused_call(node)
        factors, transposed, axes = [], False, ("bhnd",)
    else:
        if (around := _around_softmax(node)) is None:
            return None
        nodes, (q, k, v) = around
        tokens, chain, transposed = shape_of(node)[-1], nodes[:-1], name_of(nodes[0]) != "einsum"
        axes = ("bhnd",) if transposed and name_of(nodes[-1]) != "einsum" else ("bhnd", "bnhd")
        masks, scale = masks_of(chain, tokens), constant_factor(chain)
        factors = _factors(chain, set(nodes))
    shape = shape_of(k)
    shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    if len({shape_of(q), shape, shape_of(v)}) != 1 or len(shape) not in (3, 4):
        raise Unrecognised("q, k and v of different shapes")
    samples, dtype = shape[0] if len(shape) == 4 else 1, tensor_of(q).dtype

    def build(order, masked, call):
        keys = call(Tensor.transpose, k, -2, -1) if transposed else k
        return call(attend, _multiplied(call, q, factors, dtype), keys, v, scale, order, **masked(call))

    ways = itertools.product(axes, mask_arguments(masks, samples, partial(write_bias, -1, dtype)))
    return positions.around(nodes, q), (Proposal("attention", partial(build, *way)) for way in ways)


def _fused_call(node: Node) -> tuple[list[Node], list[Mask], float | None]:
    """Returns ([q, k, v], masks, scale) of scaled_dot_product_attention, or `attend` on packed samples."""
    if name_of(node) == PACKED:
        return list(node.args[:3]), [], node.args[3]
    if argument(node, 5, "is_causal", False):
        raise Unrecognised("causal attention")
    mask = argument(node, 3, "attn_mask")
    tensors = [argument(node, i, name) for i, name in enumerate(("query", "key", "value"))]
    return tensors, [] if mask is None else [Mask(mask)], argument(node, 6, "scale")


def _factors(nodes: list[Node], inside: set[Node]) -> list[tuple[Node, bool]]:
    """Returns the 0-d tensors and symbolic numbers that these nodes multiply by, or divide by (True)."""
    scalars = []
    for node in nodes:
        divides = name_of(node) in DIVIDES
        for a in node.all_input_nodes[divides:] if divides or name_of(node) in MULTIPLIES else ():
            if a not in inside and (shape_of(a) == () or isinstance(value_of(a), torch.SymFloat)):
                scalars.append((a, divides))
    return scalars


def _multiplied(call: Call, x, factors: list[tuple[Node, bool]], like: torch.dtype):
    """Multiplies a tensor or number x by `_factors`, in fp32 at least, as 16 bits would round a number."""
    for factor, divides in factors:
        if tensor_of(factor) is not None:
            factor = call(Tensor.to, factor, torch.float64 if like == torch.float64 else torch.float32)
        x = call(operator.truediv if divides else operator.mul, x, factor)
    return x


def _around_softmax(softmax: Node) -> tuple[list[Node], tuple[Node, Node, Node]] | None:
    """Returns the nodes from q k^T to the product with v, and (q, k^T or k of einsum, v).

    None if a softmax is not between two such products."""
    up, down = [softmax], [softmax]
    while name_of(up[-1]) not in _PRODUCTS:
        same = [a for a in up[-1].all_input_nodes if shape_of(a) == shape_of(softmax)]
        if not same:
            return None
        up.append(same[0])
    while name_of(down[-1]) not in _PRODUCTS:
        if len(down[-1].users) != 1:
            return None
        down.append(next(iter(down[-1].users)))
    (q, *k), (weights, *v) = ([a for a in product.args if isinstance(a, Node)] for product in (up[-1], down[-1]))
    if weights is not down[-2] or len(k) != 1 or len(v) != 1:
        return None
    return [*reversed(up), *down[1:]], (q, k[0], v[0])


_PRODUCTS = ("matmul", "bmm", "einsum")
_CALLS = ("scaled_dot_product_attention", PACKED)


class _Roles(NamedTuple):
    """The linear layers that compute q, k and v, and what scales, masks and rotates them."""

    layers: list[Linear]
    heads: int
    scale: float  # of the logits
    factors: list[tuple[Node, bool]]  # other factors of the logits, see _factors
    masks: list[Mask]
    tables: list[Node]  # tensors that q is multiplied by: rotary tables
    tokens: int


def attention_blocks(parts: Parts) -> Iterator[Proposal]:
    """Proposes attention blocks for a region with one attention."""
    if len(parts.attentions) != 1:
        raise Unrecognised(f"{len(parts.attentions)} attentions")
    packing = packing_of(parts.attentions[0])
    if len(shape_of(parts.region.source)) == 2 and not packing:
        raise Unrecognised("tokens without samples")
    if len(parts.norms) != 1:
        raise Unrecognised(f"{len(parts.norms)} norms in an attention block")
    attention = parts.attentions[0]
    if name_of(attention) == "multi_head_attention_forward":
        yield from _module_attention(parts, attention)
        return
    behind = set(parts.after(attention))
    out = [linear for linear in parts.linears if linear.node in behind]
    if len(out) != 1:
        raise Unrecognised(f"{len(out)} linear layers after the attention")
    affine, keywords = common_arguments(parts, parts.norms[0], out[0].node)
    roles = _roles(parts, attention, [linear for linear in parts.linears if linear not in out])
    inner = sum(linear.rows for linear in roles.layers) // 3
    if roles.heads < 1 or inner % roles.heads or inner != out[0].columns:
        raise Unrecognised(f"q, k and v of {3 * inner} rows with {roles.heads} heads")
    scale = roles.scale * (inner // roles.heads) ** 0.5
    scale = 1.0 if abs(scale - 1) < 1e-9 else scale
    plain, *orders = itertools.permutations(range(3))
    candidates = [(axis, plain) for axis in range(3)]  # arguments of pack_qkv
    candidates += [(axis, order) for axis in range(2) for order in orders]
    ways = _ways(parts, roles.tokens, roles.masks, partial(write_bias, roles.heads, tensor_of(out[0].node).dtype))
    ways = [(False, lambda call: packing)] if packing else ways

    def build(rows, rope, way, call):
        weights, biases = zip(*(linear.parameters(call) for linear in roles.layers))
        qkv, (tokens_first, masked) = (weights[0], biases[0]), way
        if len(weights) > 1 or scale != 1 or roles.factors or rows != candidates[0]:
            factor = _multiplied(call, scale, roles.factors, tensor_of(out[0].node).dtype)
            both = call(pack_qkv, list(weights), list(biases), roles.heads, *rows, factor)
            qkv = [call(operator.getitem, both, i) for i in range(2)]
        options = keywords(call) | masked(call)
        if rope is not None:
            cos, sin, layout, prefix = rope
            width = inner // roles.heads
            options |= dict(rope=(call(rotary_table, cos, width, 1.0), call(rotary_table, sin, width, 0.0)))
            prefix = call(tokens_without_row, parts.region.source, cos[0]) if prefix is None else prefix
            options |= dict(rope_layout=layout, num_prefix=prefix)
        layers = *qkv, *out[0].parameters(call)
        options |= dict(num_heads=roles.heads, tokens_first=tokens_first)
        return call_block(parts, call, ops.attention_block, affine, layers, **options)

    for choice in itertools.product(candidates, _rope_candidates(parts, roles), ways):
        yield Proposal("attention block", partial(build, *choice))


def _ways(
    parts: Parts, tokens: int, masks: list[Mask], bias: Callable[[Call, list[Mask]], Any]
) -> list[tuple[bool, Callable[[Call], dict]]]:
    """Returns (whether x is (N, B, D), writer of mask arguments) for all that axes and masks may mean."""
    shape = shape_of(parts.region.source)
    rest = [False] if math.prod(shape[1:-1]) == tokens or shape[0] != tokens else []
    orders = rest + [True] * (len(shape) == 3 and shape[0] == tokens)
    return [(first, masked) for first in orders for masked in mask_arguments(masks, shape[first], bias)]


def _module_attention(parts: Parts, node: Node) -> Iterator[Proposal]:
    """Proposes attention blocks for nn.MultiheadAttention, which is one node in a graph."""
    added = [name for name, place in dict(bias_k=7, bias_v=8).items() if argument(node, place, name) is not None]
    padding = argument(node, 14, "key_padding_mask")
    masks = [mask for mask in (argument(node, 16, "attn_mask"), padding) if mask is not None]
    masks = [Mask(mask, hides=tensor_of(mask).dtype == torch.bool) for mask in masks]
    if added or argument(node, 17, "use_separate_proj_weight", False) or argument(node, 9, "add_zero_attn", False):
        raise Unrecognised("nn.MultiheadAttention with " + (" and ".join(added) or "separate or added keys"))
    if parts.linears:
        raise Unrecognised("linear layers around nn.MultiheadAttention")
    affine, keywords = common_arguments(parts, parts.norms[0], _first_output(node))
    places = {4: "num_heads", 5: "in_proj_weight", 6: "in_proj_bias", 11: "out_proj_weight", 12: "out_proj_bias"}
    heads, *layers = (argument(node, place, name) for place, name in places.items())

    def as_bias(call: Call, masks: list[Mask]):
        tensors = [call(module_mask, mask.node, heads, mask.node is padding) for mask in masks]
        return call(logit_bias, tensors, [True] * len(masks), heads, tensor_of(_first_output(node)).dtype)

    def build(tokens_first, masked, call):
        options = keywords(call) | masked(call) | dict(num_heads=heads, tokens_first=tokens_first)
        return call_block(parts, call, ops.attention_block, affine, layers, **options)

    for way in _ways(parts, shape_of(argument(node, 0, "query"))[0], masks, as_bias):
        yield Proposal("attention block", partial(build, *way))


def _first_output(node: Node) -> Node:
    outputs = [u for u in node.users if name_of(u) == "getitem" and u.args[1] == 0]
    if len(outputs) != 1:
        raise Unrecognised("the output of nn.MultiheadAttention is not read once")
    return outputs[0]


def _roles(parts: Parts, attention: Node, layers: list[Linear]) -> _Roles:
    """Finds the layers that compute q, k and v; raises Unrecognised if some of `layers` do not."""
    stops = {linear.node for linear in layers}
    inside = {*parts.region.nodes, parts.region.source}
    if name_of(attention) in _CALLS:
        (q, k, v), masks, factor = _fused_call(attention)
        if len(shape := shape_of(q)) != 4:
            raise Unrecognised(f"q of shape {shape}")
        if any(mask.node in inside for mask in masks):
            raise Unrecognised("a mask that is computed from the tokens")
        _, heads, tokens, head_size = shape
        factor = head_size**-0.5 if factor is None else factor
        scores = [*parts.before(q, stops), *parts.before(k, stops)]
    else:
        scores, factor = parts.before(attention, stops), 1.0
        products = [n for n in scores if name_of(n) in PRODUCTS]
        if len(products) != 1:
            raise Unrecognised(f"{len(products)} products before the softmax")
        q, k = products[0].all_input_nodes[:2] if len(products[0].all_input_nodes) >= 2 else (None, None)
        shape, tokens = shape_of(attention), shape_of(attention)[-1]
        heads = shape[1] if len(shape) == 4 else shape[0] * tokens // math.prod(shape_of(parts.region.source)[:-1])
        logits = [n for n in parts.after(products[0]) if n in scores]
        masks = [mask for mask in masks_of(logits, tokens) if mask.node not in inside]
        weighted = next((n for n in parts.after(attention) if name_of(n) in PRODUCTS), None)
        others = [] if weighted is None else [a for a in weighted.all_input_nodes if a not in parts.after(attention)]
        v = next((a for a in others if a is not attention and a in inside), None)
    qkv: list[Linear] = []
    for node in (q, k, v):
        above = {a for n in parts.before(node, stops) for a in values_read(n)} | {node} if node in inside else set()
        projections = [linear for linear in layers if linear.node in above]
        if len(projections) != 1:
            raise Unrecognised(f"{len(projections)} linear layers behind q, k or v")
        qkv += [linear for linear in projections if linear not in qkv]
    if len(qkv) != len(layers):
        raise Unrecognised("linear layers that are none of q, k and v")
    rotation = parts.before(q, stops) if name_of(attention) in _CALLS else scores
    factors = _factors(scores, inside)
    others = [factor for factor, _ in factors]
    tables = [t for t in parts.outside(rotation, MULTIPLIES) if t not in others and tensor_of(t) is not None]
    scale = factor * constant_factor(list(dict.fromkeys(scores)))
    return _Roles(qkv, heads, scale, factors, masks, tables, tokens)


def _rope_candidates(parts: Parts, roles: _Roles) -> list:
    """Returns (cos, sin, layout, prefix tokens) for all that the tables may mean; [None] without tables.

    cos and sin are lists: of one table, or of one for each part of a head that is rotated by itself. The number of
    prefix tokens is None where it depends on lengths that are known only when the graph runs."""
    if not roles.tables:
        return [None]
    packed = bool(packing_of(parts.attentions[0]))
    tokens = math.prod(tensor_of(parts.region.source).shape[not packed : -1])
    if len(roles.tables) % 2:
        raise Unrecognised(f"q is multiplied by {len(roles.tables)} tensors")
    lengths = {size(n): n for n in map(table_rows, map(tensor_of, roles.tables))}
    # A length that is known only when the graph runs is taken for that of all tokens, or else the operation raises.
    if packed and lengths.keys() == {-1}:
        lengths = {size(tokens): tokens}
    if len(lengths) != 1 or not 0 < min(lengths) <= size(tokens):
        raise Unrecognised("q is multiplied by tensors that are no rotary tables")
    prefix = tokens - min(lengths.values(), key=size)
    if not isinstance(prefix, int):
        prefix = int(prefix.node.expr) if prefix.node.expr.is_number else None
    a, b = roles.tables[::2], roles.tables[1::2]
    pairs = [(a, b), (b, a)]
    return [(*pair, layout, prefix) for pair in pairs for layout in ("half", "interleaved")]
