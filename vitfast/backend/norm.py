"""Norms in a graph, called by name or written out, and proposals of ops.layer_norm and ops.rms_norm."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import layer_norm, rms_norm
from .graph import Positions, Proposal, Region, Unrecognised
from .nodes import ADDS, CASTS, DIVIDES, MULTIPLIES, argument, is_number, name_of, shape_of, tensor_of

NORMS = ("layer_norm", "rms_norm", "rsqrt", "sqrt")


@functools.cache
def default_eps(dtype: torch.dtype) -> float:
    """The eps of rms_norm where none is given: that of its dtype, or of fp32 at least, by version."""
    with _disable_current_modes(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x = torch.full((1, 4), 2.0**-10, dtype=dtype, device="cpu")
        error = lambda eps: (F.rms_norm(x, (4,)) - F.rms_norm(x, (4,), eps=eps)).abs().max()  # noqa: E731
        return min((torch.finfo(dtype).eps, torch.finfo(torch.float32).eps), key=error)


def norm_arguments(norm: Node, region: Region, nodes: list[Node]) -> tuple[str, Node | None, Node | None, float]:
    """("layer" or "rms", weight, bias, eps) of a norm; nodes: those up to the layer that reads it."""
    width, name = shape_of(region.source)[-1], name_of(norm)
    if name == "rms_norm":
        eps = argument(norm, 3, "eps")
        eps = default_eps(tensor_of(norm.args[0]).dtype) if eps is None else eps
        return "rms", argument(norm, 2, "weight"), None, eps
    if name == "layer_norm":
        return "layer", argument(norm, 2, "weight"), argument(norm, 3, "bias"), argument(norm, 4, "eps", 1e-5)
    added = norm.all_input_nodes[0]
    numbers = [a for a in added.args if is_number(a)]
    if name_of(added) not in ADDS or len(numbers) != 1:
        raise Unrecognised("a norm that is written out with no eps")
    behind = nodes[nodes.index(norm) :] if norm in nodes else []
    vectors = [
        [v for v in region.read_by(n for n in behind if name_of(n) in names) if shape_of(v) == (width,)]
        for names in (MULTIPLIES, ADDS)
    ]
    if max(map(len, vectors)) > 1:
        raise Unrecognised("a norm with two weights")
    weight, bias = (found[0] if found else None for found in vectors)
    kind = "layer" if any(name_of(n) in ("sub", "var") for n in nodes[: nodes.index(norm)]) else "rms"
    return kind, weight, bias if kind == "layer" else None, float(numbers[0])


def norm_alone(positions: Positions, node: Node) -> tuple[Region, Iterator[Proposal]] | None:
    """ops.layer_norm or ops.rms_norm for a norm of the last axis; None for what is none."""
    source, output = (node.args[0], node) if "norm" in name_of(node) else _written_out(node)
    nodes = [] if source is None else positions.between(source, output)
    if node not in nodes or len(shape_of(source) or ()) < 2:
        return None
    region = positions.around(nodes, source)
    kind, weight, bias, eps = norm_arguments(node, region, nodes)

    def build(call):
        dtype = tensor_of(output).dtype
        x = source if tensor_of(source).dtype == dtype else call(Tensor.to, source, dtype)
        return call(layer_norm, x, weight, bias, eps) if kind == "layer" else call(rms_norm, x, weight, eps)

    return region, iter([Proposal("LayerNorm" if kind == "layer" else "RMSNorm", build)])


def _written_out(root: Node) -> tuple[Node | None, Node]:
    """The tensor that is normalised, or None, and the normalised one, around a root or its reciprocal."""
    output = next(iter(root.users), root)
    if name_of(output) not in MULTIPLIES | DIVIDES or len(root.users) != 1:
        return None, root
    source = next((a for a in output.all_input_nodes if a is not root), None)
    while isinstance(source, Node) and name_of(source) in CASTS | {"sub"}:
        source = source.args[0]
    if not isinstance(source, Node):
        return None, root
    while len(output.users) == 1:
        user = next(iter(output.users))
        others = [a for a in user.all_input_nodes if a is not output]
        vector = len(others) == 1 and len(shape_of(others[0]) or ()) == 1 and name_of(user) in MULTIPLIES | ADDS
        if not vector and not (name_of(user) in CASTS and not others):
            break
        output = user
    return source, output
