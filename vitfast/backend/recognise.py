"""Proposes operations for a region of a graph: structure only proposes, numbers decide (proof.py).

Read off the graph are anchors (the norm, the linear layers, the attention or softmax) and what their arguments are. The
views, transposes and products in between are not looked at.
"""

from collections.abc import Iterator

from .attention import attention_blocks
from .graph import Proposal, Region, Unrecognised
from .mlp import mlp_blocks
from .parts import parts_of


def proposals(region: Region) -> Iterator[Proposal]:
    """Operations that may compute a region with a residual, the likeliest first.

    Raises Unrecognised for a region that is no encoder block."""
    parts = parts_of(region)
    if not parts.norms:
        raise Unrecognised("no norm in front")
    yield from attention_blocks(parts) if parts.attentions else mlp_blocks(parts)
