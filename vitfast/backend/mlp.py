"""Proposes ops.mlp_block and ops.gated_mlp_block; outside of blocks, ops.mlp and ops.gated_mlp."""

import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial

from torch.fx import Node

from .. import ops
from ..ops.reference import ACTIVATIONS
from .arguments import halves
from .graph import Call, Candidate, Positions, Proposal, Unrecognised
from .nodes import argument, name_of, shape_of
from .parts import ATTENTIONS, Parts, call_block, common_arguments, linear_of, parts_of

GATES = ("silu", "gelu", "gelu_tanh", "quick_gelu")
KINDS = {"mlp": "MLP", "gated_mlp": "gated MLP"}


def mlp_blocks(parts: Parts) -> Iterator[Proposal]:
    """Proposes MLP blocks for a region with linear layers and no attention."""
    inner_norm = [n for n in parts.norms if n in parts.after(parts.linears[0].node)]
    outer = [n for n in parts.norms if n not in inner_norm]
    if not set(parts.after(parts.linears[-1].node)).isdisjoint(parts.norms):
        raise Unrecognised("a norm after the branch")
    if len(outer) != 1:
        raise Unrecognised(f"{len(parts.norms)} norms in an MLP block")
    affine, keywords = common_arguments(parts, outer[0], parts.linears[-1].node)

    def build(operation, layers, extra, call):
        block = getattr(ops, f"{operation}_block")
        return call_block(parts, call, block, affine, layers(call), **extra, **keywords(call))

    for mlp in _layers(parts, inner_norm):
        yield Proposal(f"{KINDS[mlp[0]]} block", partial(build, *mlp))


def mlp_alone(positions: Positions, out: Node) -> Candidate | None:
    """Proposes an MLP for the region that ends in `out`; None if that is no linear layer behind others."""
    source = _input_of_first_layers(out)
    nodes = [] if source is None else positions.between(source, out)
    if not nodes:
        return None
    region = positions.around(nodes, source)
    parts = parts_of(region)

    def build(operation, layers, extra, call):
        return call(getattr(ops, operation), source, *layers(call), **extra)

    return region, (Proposal(KINDS[mlp[0]], partial(build, *mlp)) for mlp in _layers(parts, parts.norms))


def _input_of_first_layers(out: Node) -> Node | None:
    """Returns the tensor that all linear layers just before `out` read; None if they read several."""
    stack, visited, sources = [] if (last := linear_of(out)) is None else [last.x], set(), set()
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        if len(visited) > 30 or name_of(node) in ATTENTIONS:
            return None
        visited.add(node)
        if (layer := linear_of(node)) is not None:
            sources.add(layer.x)
        elif node.op != "placeholder" or len(shape_of(node) or ()) > 1:
            stack += [a for a in node.all_input_nodes if len(shape_of(a) or (1, 1)) > 1]
    return sources.pop() if len(sources) == 1 else None


def _layers(parts: Parts, inner_norm: list[Node]) -> Iterator[tuple[str, Callable[[Call], tuple], dict]]:
    """Yields MLPs that the linear layers may be: (operation, layers, keyword arguments).

    operation: "mlp" or "gated_mlp". layers(call): weights and biases in the operation's order."""
    if len(parts.linears) not in (2, 3) or len(inner_norm) > 1:
        raise Unrecognised(f"{len(parts.linears)} linear layers and no attention")
    *first, out = parts.linears
    inner = out.columns
    if len(first) == 1 and first[0].rows == inner and not inner_norm:
        for activation in ACTIVATIONS:
            yield "mlp", lambda call: (*first[0].parameters(call), *out.parameters(call)), dict(activation=activation)
        return
    if (len(first) == 1 and first[0].rows != 2 * inner) or (len(first) == 2 and {f.rows for f in first} != {inner}):
        raise Unrecognised("an inner norm without a gate" if inner_norm else "layers of sizes that are those of no MLP")
    extra = {}
    if inner_norm:
        if name_of(inner_norm[0]) != "layer_norm" or argument(inner_norm[0], 2, "weight") is None:
            raise Unrecognised("an inner norm that is no LayerNorm")
        names = dict(inner_norm_weight=(2, "weight"), inner_norm_bias=(3, "bias"), inner_eps=(4, "eps", 1e-5))
        extra = {key: argument(inner_norm[0], *place) for key, place in names.items()}

    def layers(swapped, call):
        if len(first) == 1:
            both = call(halves, *first[0].parameters(call))
            pieces = [call(operator.getitem, both, i) for i in range(4)]
            gate, up = pieces[:2], pieces[2:]
        else:
            gate, up = (layer.parameters(call) for layer in first)
        gate, up = (up, gate) if swapped else (gate, up)
        return *up, *gate, *out.parameters(call)

    for activation, swapped in itertools.product(GATES, (False, True)):
        yield "gated_mlp", partial(layers, swapped), dict(activation=activation, **extra)
