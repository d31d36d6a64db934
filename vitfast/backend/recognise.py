"""Proposes operations for a region of a graph: structure only proposes, numbers decide (proof.py).

Read off the graph are anchors (the norm, the linear layers, the attention or softmax) and what their arguments are. The
views, transposes and products in between are not looked at.
"""

import itertools
from collections.abc import Iterator

from .. import ops
from ..ops.reference import ACTIVATIONS
from .arguments import halves
from .attention import attention_blocks
from .graph import Region, argument, name_of
from .parts import Parts, Proposal, Unrecognised, block_input, common_arguments, inner_width, item, parts_of


def proposals(region: Region) -> Iterator[Proposal]:
    """Operations that may compute a region, the likeliest first.

    Raises Unrecognised for a region that is no encoder block."""
    parts = parts_of(region)
    if not parts.norms:
        raise Unrecognised("no norm in front")
    if parts.attentions:
        yield from attention_blocks(parts)
    else:
        yield from _mlp_blocks(parts)


def _mlp_blocks(parts: Parts) -> Iterator[Proposal]:
    linears = parts.linears
    if len(linears) not in (2, 3):
        raise Unrecognised(f"{len(linears)} linear layers and no attention")
    *first, out = linears
    inner_norm = [n for n in parts.norms if n in parts.after(first[-1].node)]
    outer = [n for n in parts.norms if n not in inner_norm]
    if len(outer) != 1 or len(inner_norm) > 1:
        raise Unrecognised(f"{len(parts.norms)} norms in an MLP block")
    norm, keywords = common_arguments(parts, outer[0], out.node)
    inner = inner_width(out)
    if len(first) == 1 and first[0].rows == inner and not inner_norm:
        for activation in ACTIVATIONS:

            def build(call, activation=activation):
                layers = (*first[0].parameters(call), *out.parameters(call))
                head = block_input(parts, call, norm)
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
                gate, up = [call(item, both, i) for i in (0, 1)], [call(item, both, i) for i in (2, 3)]
            else:
                gate, up = (layer.parameters(call) for layer in first)
            gate, up = (up, gate) if swapped else (gate, up)
            layers, head = (*up, *gate, *out.parameters(call)), block_input(parts, call, norm)
            return call(ops.gated_mlp_block, *head, *layers, activation=activation, **extra, **keywords(call))

        yield Proposal("gated MLP block", build)
