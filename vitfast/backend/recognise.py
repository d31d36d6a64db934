"""Proposes operations for a region of a graph. Structure only proposes: every proposal is proven by numbers (proof.py).

Read off the graph are anchors (the norm, the linear layers, the attention or softmax) and what their arguments are; what
is done in between, in whichever views, transposes and products, is not looked at.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .. import ops
from ..ops.reference import ACTIVATIONS
from .arguments import LAYOUTS, attend, factors, halves, logit_bias, pack_qkv, rotary_table
from .graph import DIVIDES, MULTIPLIES, PRODUCTS, Region, argument, constant_factor, is_number, is_symbolic, name_of
from .graph import shape_of, tensor_of

Call = Callable[..., Any]  # call(function, *arguments): computes now, or writes a node into a graph


class Proposal(NamedTuple):
    """An operation that may compute a region: build(call) calls it through `call`, with nodes as arguments."""

    kind: str
    build: Callable[[Call], Any]


class Unrecognised(Exception):
    """Why a region is no block that an operation computes."""


class Linear(NamedTuple):
    """A product with a weight from outside the region, and what is added to it."""

    node: Node
    weight: Node
    bias: Node | None
    transposed: bool  # weight is (in, out)

    @property
    def rows(self) -> int:
        return shape_of(self.weight)[1 if self.transposed else 0]

    def parameters(self, call: Call) -> tuple:
        """(weight (out, in), bias or None)."""
        return call(Tensor.t, self.weight) if self.transposed else self.weight, self.bias


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
                stack += n.all_input_nodes
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
        inside = {*self.region.nodes, self.region.source}
        return list(dict.fromkeys(a for n in nodes if name_of(n) in names for a in n.all_input_nodes if a not in inside))


ADDS = frozenset({"add", "add_", "iadd"})
ATTENTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax", "_softmax")


def parts_of(region: Region) -> Parts:
    """The anchors of a region."""
    linears, attentions, norms = [], [], []
    inside = {*region.nodes, region.source}
    for node in region.nodes:
        name = name_of(node)
        if name in ATTENTIONS:
            attentions.append(node)
        elif name in ("layer_norm", "rms_norm", "rsqrt"):
            norms.append(node)
        elif (linear := _linear(node, name, inside)) is not None:
            linears.append(linear)
    return Parts(region, linears, attentions, norms)


def _linear(node: Node, name: str, inside: set[Node]) -> Linear | None:
    if name == "linear":
        x, weight, bias = node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias")
    elif name == "addmm" and not node.kwargs:
        bias, x, weight = node.args
    elif name in ("matmul", "mm") and len(node.args) == 2:
        (x, weight), bias = node.args, None
    else:
        return None
    given = isinstance(weight, Node) and weight not in inside and len(shape_of(weight) or ()) == 2
    if x not in inside or not given or bias in inside:
        return None
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if name in ("matmul", "mm") and user in inside and name_of(user) in ADDS:
        others = [a for a in user.all_input_nodes if a is not node and a not in inside]
        if len(others) == 1 and len(shape_of(others[0]) or ()) == 1:
            node, bias = user, others[0]
    return Linear(node, weight, bias, name != "linear")


def proposals(region: Region, autocast: torch.dtype | None) -> Iterator[Proposal]:
    """Operations that may compute a region, the likeliest first. Raises Unrecognised for what is no encoder block."""
    parts = parts_of(region)
    if not parts.norms:
        raise Unrecognised("no norm in front")
    if parts.attentions:
        yield from _attention_blocks(parts)
    else:
        yield from _mlp_blocks(parts)


def attention_alone(node: Node) -> Proposal:
    """ops.attention for one call of scaled_dot_product_attention. Raises Unrecognised where it has no words for it."""
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    shapes = {shape_of(t) for t in (q, k, v)}
    if len(shapes) != 1 or len(shape_of(q)) != 4:
        raise Unrecognised("q, k and v have different shapes")
    if argument(node, 5, "is_causal", False):
        raise Unrecognised("causal attention")
    mask, scale = argument(node, 3, "attn_mask"), argument(node, 6, "scale")
    return Proposal("attention", lambda call: call(attend, q, k, v, mask, scale))


def _common(parts: Parts, norm: Node, last: Node) -> tuple[list, Callable[[Call], dict]]:
    """([norm weight, norm bias], the keyword arguments of every block). last: what the output layer gives."""
    region, width = parts.region, shape_of(parts.region.source)[-1]
    name, residual, output = name_of(norm), tensor_of(region.source), tensor_of(region.output)
    if name == "rsqrt":
        weight, bias, eps = _written_rms_norm(parts, norm, width)
    else:
        rms = name == "rms_norm"
        weight, bias = argument(norm, 2, "weight"), None if rms else argument(norm, 3, "bias")
        eps = argument(norm, 3, "eps") if rms else argument(norm, 4, "eps", 1e-5)
        eps = torch.finfo(residual.dtype).eps if eps is None else eps
    tail = parts.after(last)[:-1]
    scale = drop_path = None
    for given in parts.outside(tail, MULTIPLIES):
        shape = shape_of(given) or ()
        if len(shape) > 1 and all(n == 1 for n in shape[1:]) and shape[0] == shape_of(region.source)[0]:
            drop_path, twice = given, drop_path is not None
        elif shape[-1:] == (width,) and all(n == 1 for n in shape[:-1]):
            scale, twice = given, scale is not None
        else:
            raise Unrecognised(f"the branch is multiplied by a tensor of shape {shape}")
        if twice:
            raise Unrecognised("the branch is multiplied by two vectors")
    factor, computed = constant_factor(tail), tensor_of(last).dtype

    def keywords(call: Call) -> dict:
        found = dict(eps=eps, norm="layer" if name == "layer_norm" else "rms")
        if scale is not None:
            shaped = scale if len(shape_of(scale)) == 1 else call(Tensor.flatten, scale)
            found["layer_scale"] = shaped if factor == 1 or drop_path is not None else call(torch.mul, shaped, factor)
        if drop_path is not None:
            found["drop_path"] = call(factors, drop_path, factor)
        if output.dtype != computed:
            found["residual_in_fp32"] = True
        return found

    return [weight, bias], keywords


def _written_rms_norm(parts: Parts, rsqrt: Node, width: int) -> tuple[Node | None, None, float]:
    """Weight, None and eps of an RMSNorm that is written out: x * rsqrt(mean(x^2) + eps) * weight."""
    added = rsqrt.all_input_nodes[0]
    numbers = [a for a in added.args if is_number(a)]
    if name_of(added) not in ADDS or len(numbers) != 1:
        raise Unrecognised("a norm that is written out, and is no RMSNorm")
    stops = {linear.node for linear in parts.linears}
    behind = [n for n in parts.after(rsqrt) if n in parts.before(parts.linears[0].node, stops - {parts.linears[0].node})]
    weights = [w for w in parts.outside(behind, MULTIPLIES) if shape_of(w) == (width,)]
    if len(weights) > 1:
        raise Unrecognised("a norm with two weights")
    return (weights[0] if weights else None), None, float(numbers[0])


def _block_input(parts: Parts, call: Call, norm: list) -> list:
    """The arguments that every block begins with: x in the dtype of the output, norm weight and norm bias."""
    source, output, (weight, bias) = parts.region.source, tensor_of(parts.region.output), norm
    x = source if tensor_of(source).dtype == output.dtype else call(Tensor.to, source, output.dtype)
    if weight is None:
        weight = call(torch.ones, shape_of(source)[-1], dtype=output.dtype, device=output.device)
    return [x, weight, bias]


class _Roles(NamedTuple):
    """The layers that q, k and v come from, and how they meet."""

    layers: list[Linear]
    heads: int
    scale: float  # of the logits
    masks: list[Node]
    tables: list[Node]  # what q is multiplied by


def _attention_blocks(parts: Parts) -> Iterator[Proposal]:
    if len(parts.attentions) != 1:
        raise Unrecognised(f"{len(parts.attentions)} attentions")
    if len(parts.norms) != 1:
        raise Unrecognised(f"{len(parts.norms)} norms in an attention block")
    attention = parts.attentions[0]
    if name_of(attention) == "multi_head_attention_forward":
        yield _module_attention(parts, attention)
        return
    behind = set(parts.after(attention))
    out = [linear for linear in parts.linears if linear.node in behind]
    if len(out) != 1:
        raise Unrecognised(f"{len(out)} linear layers after the attention")
    norm, keywords = _common(parts, parts.norms[0], out[0].node)
    roles = _roles(parts, attention, [linear for linear in parts.linears if linear not in out])
    inner = sum(linear.rows for linear in roles.layers) // 3
    if roles.heads < 1 or inner % roles.heads or inner != _inner(out[0]):
        raise Unrecognised(f"q, k and v of {3 * inner} rows with {roles.heads} heads")
    scale = roles.scale * (inner // roles.heads) ** 0.5
    scale = 1.0 if abs(scale - 1) < 1e-9 else scale
    orders = list(itertools.permutations(range(3)))
    candidates = [(layout, orders[0]) for layout in LAYOUTS]
    candidates += [(layout, order) for layout in LAYOUTS[:2] for order in orders[1:]]
    for (layout, order), rope in itertools.product(candidates, _rope_candidates(parts, roles)):

        def build(call, layout=layout, order=order, rope=rope):
            weights, biases = zip(*(linear.parameters(call) for linear in roles.layers))
            qkv = weights[0], biases[0]
            if len(weights) > 1 or scale != 1 or (layout, order) != candidates[0]:
                both = call(pack_qkv, list(weights), list(biases), roles.heads, layout, order, scale)
                qkv = [call(_item, both, i) for i in range(2)]
            first, found = _block_input(parts, call, norm), keywords(call)
            if roles.masks:
                dtype = tensor_of(out[0].node).dtype
                found["bias"] = call(logit_bias, roles.masks, parts.region.source, roles.heads, dtype)
            if rope is not None:
                cos, sin, layout, prefix = rope
                found |= dict(rope=(call(rotary_table, cos), call(rotary_table, sin)))
                found |= dict(rope_layout=layout, num_prefix=prefix)
            return call(ops.attention_block, *first, *qkv, *out[0].parameters(call), num_heads=roles.heads, **found)

        yield Proposal("attention block", build)


def _item(pair, i: int):
    return pair[i]


def _inner(out: Linear) -> int:
    return shape_of(out.weight)[0 if out.transposed else 1]


def _module_attention(parts: Parts, node: Node) -> Proposal:
    """nn.MultiheadAttention, which is one node in a graph."""
    names = dict(attn_mask=17, key_padding_mask=14, bias_k=7, bias_v=8)
    given = [name for name, place in names.items() if argument(node, place, name) is not None]
    if given or argument(node, 18, "use_separate_proj_weight", False) or argument(node, 9, "add_zero_attn", False):
        raise Unrecognised("nn.MultiheadAttention with " + (" and ".join(given) or "separate or added keys"))
    if parts.linears:
        raise Unrecognised("linear layers around nn.MultiheadAttention")
    norm, keywords = _common(parts, parts.norms[0], _first_output(node))
    heads, weight, bias = (argument(node, i, n) for i, n in enumerate(("num_heads", "in_proj_weight", "in_proj_bias"), 4))
    out = argument(node, 11, "out_proj_weight"), argument(node, 12, "out_proj_bias")

    def build(call):
        return call(
            ops.attention_block, *_block_input(parts, call, norm), weight, bias, *out, num_heads=heads, **keywords(call)
        )

    return Proposal("attention block", build)


def _first_output(node: Node) -> Node:
    found = [u for u in node.users if name_of(u) == "getitem" and u.args[1] == 0]
    if len(found) != 1:
        raise Unrecognised("the output of nn.MultiheadAttention is not read once")
    return found[0]


def _roles(parts: Parts, attention: Node, layers: list[Linear]) -> _Roles:
    stops = {linear.node for linear in layers}
    inside = {*parts.region.nodes, parts.region.source}
    if name_of(attention) == "scaled_dot_product_attention":
        q, k, v = (argument(attention, i, name) for i, name in enumerate(("query", "key", "value")))
        if argument(attention, 5, "is_causal", False):
            raise Unrecognised("causal attention")
        shape, mask = shape_of(q), argument(attention, 3, "attn_mask")
        if len(shape) != 4:
            raise Unrecognised(f"q of shape {shape}")
        masks, heads, given = [] if mask is None else [mask], shape[1], argument(attention, 6, "scale")
        if not set(masks).isdisjoint(inside):
            raise Unrecognised("a mask that is computed from the tokens")
        factor = shape[-1] ** -0.5 if given is None else given
        scores = [*parts.before(q, stops), *parts.before(k, stops)]
    else:
        scores, factor = parts.before(attention, stops), 1.0
        products = [n for n in scores if name_of(n) in PRODUCTS]
        if len(products) != 1:
            raise Unrecognised(f"{len(products)} products before the softmax")
        q, k = products[0].all_input_nodes[:2] if len(products[0].all_input_nodes) >= 2 else (None, None)
        shape, tokens = shape_of(attention), shape_of(parts.region.source)[1]
        heads = shape[1] if len(shape) == 4 else shape[0] // max(1, shape_of(parts.region.source)[0])
        logits = [n for n in parts.after(products[0]) if n in scores]
        masks = [m for m in parts.outside(logits, ADDS) if (shape_of(m) or ())[-1:] == (tokens,)]
        weighted = next((n for n in parts.after(attention) if name_of(n) in PRODUCTS), None)
        others = [] if weighted is None else [a for a in weighted.all_input_nodes if a not in parts.after(attention)]
        v = next((a for a in others if a is not attention and a in inside), None)
    found: list[Linear] = []
    for node in (q, k, v):
        above = {a for n in parts.before(node, stops) for a in n.all_input_nodes} | {node} if node in inside else set()
        own = [linear for linear in layers if linear.node in above]
        if len(own) != 1:
            raise Unrecognised(f"{len(own)} linear layers behind q, k or v")
        found += [own[0]] if own[0] not in found else []
    if len(found) != len(layers):
        raise Unrecognised("linear layers that are none of q, k and v")
    turned = parts.before(q, stops) if name_of(attention) == "scaled_dot_product_attention" else scores
    tables = [t for t in parts.outside(turned, MULTIPLIES) if t not in masks and tensor_of(t) is not None]
    return _Roles(found, heads, factor * constant_factor(list(dict.fromkeys(scores))), masks, tables)


def _rope_candidates(parts: Parts, roles: _Roles) -> list:
    """None, or (cos, sin, layout, number of prefix tokens) in every way that two tables may be meant."""
    if not roles.tables:
        return [None]
    tokens = tensor_of(parts.region.source).shape[1]
    if len(roles.tables) != 2 or is_symbolic(tokens):
        raise Unrecognised(f"q is multiplied by {len(roles.tables)} tensors")
    lengths = {([n for n in shape_of(t)[:-1] if n != 1] or [1])[-1] for t in roles.tables}
    if len(lengths) != 1 or not 0 < (length := lengths.pop()) <= tokens:
        raise Unrecognised("q is multiplied by tensors that are no rotary tables")
    a, b = roles.tables
    pairs = [(a, b), (b, a)]
    return [(*pair, layout, tokens - length) for pair in pairs for layout in ("half", "interleaved")]


def _mlp_blocks(parts: Parts) -> Iterator[Proposal]:
    linears = parts.linears
    if len(linears) not in (2, 3):
        raise Unrecognised(f"{len(linears)} linear layers and no attention")
    *first, out = linears
    inner_norm = [n for n in parts.norms if n in parts.after(first[-1].node)]
    outer = [n for n in parts.norms if n not in inner_norm]
    if len(outer) != 1 or len(inner_norm) > 1:
        raise Unrecognised(f"{len(parts.norms)} norms in an MLP block")
    norm, keywords = _common(parts, outer[0], out.node)
    inner = _inner(out)
    if len(first) == 1 and first[0].rows == inner and not inner_norm:
        for activation in ACTIVATIONS:

            def build(call, activation=activation):
                layers = (*first[0].parameters(call), *out.parameters(call))
                head = _block_input(parts, call, norm)
                return call(ops.mlp_block, *head, *layers, activation=activation, **keywords(call))

            yield Proposal("MLP block", build)
        return
    if (len(first) == 1 and first[0].rows != 2 * inner) or (len(first) == 2 and {f.rows for f in first} != {inner}):
        raise Unrecognised("layers of sizes that are those of no MLP")
    extra = {}
    if inner_norm:
        if name_of(inner_norm[0]) != "layer_norm" or argument(inner_norm[0], 2, "weight") is None:
            raise Unrecognised("an inner norm that is no LayerNorm")
        names = dict(inner_norm_weight=(2, "weight"), inner_norm_bias=(3, "bias"), inner_eps=(4, "eps"))
        extra = {key: argument(inner_norm[0], *place) for key, place in names.items()}
    for activation, swapped in itertools.product(("silu", "gelu", "gelu_tanh", "quick_gelu"), (False, True)):

        def build(call, activation=activation, swapped=swapped):
            if len(first) == 1:
                both = call(halves, *first[0].parameters(call))
                gate, up = [call(_item, both, i) for i in (0, 1)], [call(_item, both, i) for i in (2, 3)]
            else:
                gate, up = (layer.parameters(call) for layer in first)
            gate, up = (up, gate) if swapped else (gate, up)
            layers, head = (*up, *gate, *out.parameters(call)), _block_input(parts, call, norm)
            return call(ops.gated_mlp_block, *head, *layers, activation=activation, **extra, **keywords(call))

        yield Proposal("gated MLP block", build)
