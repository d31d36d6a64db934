"""The anchors of a region: linear layers, norms, attentions. The arguments that all blocks have.

A linear layer is a call of linear or addmm, a product with a matrix, or an einsum with a weight of any axes. A norm is
called by name or written out. Every block has a norm and a residual, and may have a layer scale and drop path.
"""

import functools
import math
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .arguments import as_rows, factors, layer_norm, rms_norm
from .graph import Call, Candidate, Positions, Proposal, Region, Unrecognised
from .lengths import PACKED
from .nodes import ADDS, CASTS, DIVIDES, MULTIPLIES, argument, name_of, shape_of, tensor_of, values_read

NORMS = ("layer_norm", "rms_norm", "rsqrt", "sqrt")


class Choices(NamedTuple):
    """The user's choices: the dtype of the residual stream under autocast, and what backward finds saved.

    residual_in_fp32: None for the dtype of the captured model. keep: as in ops.attention_block.
    """

    residual_in_fp32: bool | None = None
    keep: str = "least"


AS_THE_ORIGINAL = Choices()
choices: ContextVar[Choices] = ContextVar("vitfast.backend.choices", default=AS_THE_ORIGINAL)  # for the present graph


class Linear(NamedTuple):
    """A linear layer in a graph: the product of x with a weight, plus a bias."""

    node: Node  # that computes the output
    x: Node
    weight: Node
    bias: Node | None
    rows_from: tuple[int, ...]  # the axes of weight that the output has
    columns_from: tuple[int, ...]  # the axes of weight that are summed over

    @property
    def rows(self) -> int:
        """The number of output features."""
        return math.prod(shape_of(self.weight)[axis] for axis in self.rows_from)

    @property
    def columns(self) -> int:
        """The number of input features."""
        return math.prod(shape_of(self.weight)[axis] for axis in self.columns_from)

    def parameters(self, call: Call) -> tuple:
        """Returns (weight (rows, columns), bias (rows,) or None) as an operation takes them."""
        axes = self.rows_from, self.columns_from
        weight = self.weight if axes == ((0,), (1,)) else call(as_rows, self.weight, *axes)
        flat = self.bias is None or len(shape_of(self.bias)) == 1
        return weight, self.bias if flat else call(Tensor.flatten, self.bias)


def linear_of(node: Node) -> Linear | None:
    """Returns the linear layer that a node computes, by any of PyTorch's functions; None for other nodes."""
    name, bias, axes = name_of(node), None, ((1,), (0,))
    if name == "linear":
        x, weight, bias, axes = node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias"), ((0,), (1,))
    elif name == "addmm" and not node.kwargs:
        bias, x, weight = node.args
    elif name in ("matmul", "mm") and len(node.args) == 2:
        x, weight = node.args
    elif name == "einsum" and len(node.args) == 3:
        x, weight = node.args[1:]
        axes = _axes(node.args[0])
    else:
        return None
    if not isinstance(x, Node) or not isinstance(weight, Node) or axes is None:
        return None
    return Linear(node, x, weight, bias, *axes) if len(shape_of(weight) or ()) == len(sum(axes, ())) else None


def _axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the axes of an einsum's second operand, a weight, that are kept, and those summed over.

    None unless the output ends with the former, and the first operand with the latter."""
    terms = equation.replace(" ", "").replace("...", "").replace("->", ",").split(",")
    if len(terms) != 3:
        return None
    x, weight, out = terms
    rows = [letter for letter in out if letter in weight]
    columns = [letter for letter in x if letter in weight]
    last = x.endswith("".join(columns)) and out.endswith("".join(rows)) and columns
    if not last or set(rows) & set(columns) or x[: -len(columns)] != out[: len(out) - len(rows)]:
        return None
    return tuple(map(weight.index, rows)), tuple(map(weight.index, columns))


def with_bias(linear: Linear, inside: set[Node]) -> Linear:
    """Returns the layer with the bias that the next node adds, if it adds a number to each feature."""
    user = next(iter(linear.node.users)) if len(linear.node.users) == 1 else None
    if linear.bias is None and user in inside and name_of(user) in ADDS:
        others = [a for a in user.all_input_nodes if a is not linear.node and a not in inside]
        rows = tuple(shape_of(linear.weight)[axis] for axis in linear.rows_from)
        if len(others) == 1 and shape_of(others[0]) == rows:
            return linear._replace(node=user, bias=others[0])
    return linear


def is_number(value) -> bool:
    """Whether a value is a Python int or float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@functools.cache
def default_eps(dtype: torch.dtype) -> float:
    """Returns the default eps of F.rms_norm: by PyTorch's version, it is that of the dtype or of fp32."""
    with _disable_current_modes(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x = torch.full((1, 4), 2.0**-10, dtype=dtype, device="cpu")
        error = lambda eps: (F.rms_norm(x, (4,)) - F.rms_norm(x, (4,), eps=eps)).abs().max()  # noqa: E731
        return min((torch.finfo(dtype).eps, torch.finfo(torch.float32).eps), key=error)


def norm_arguments(norm: Node, region: Region, nodes: list[Node]) -> tuple[str, Node | None, Node | None, float]:
    """Returns ("layer" or "rms", weight, bias, eps) of a norm.

    norm: the call, or the root in a norm that is written out. nodes: all up to the layer that reads the norm."""
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
    weight, bias = (next(iter(v), None) for v in vectors)
    kind = "layer" if any(name_of(n) in ("sub", "var") for n in nodes[: nodes.index(norm)]) else "rms"
    return kind, weight, bias if kind == "layer" else None, float(numbers[0])


def norm_alone(positions: Positions, node: Node) -> Candidate | None:
    """Proposes ops.layer_norm or ops.rms_norm for a norm of the last axis; None for other nodes."""
    if name_of(node) not in NORMS:
        return None
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
    """Returns (input or None, output) of a norm that is written out around a root or its reciprocal."""
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


def constant_factor(nodes: list[Node]) -> float:
    """Returns the product of the Python numbers these nodes multiply by, over those they divide by."""
    factor = 1.0
    for node in nodes:
        numbers = [a for a in (*node.args, *node.kwargs.values()) if is_number(a)]
        if len(numbers) == 1 and len(node.all_input_nodes) == 1:
            if name_of(node) in MULTIPLIES:
                factor = factor * numbers[0]
            elif name_of(node) in DIVIDES and not is_number(node.args[0]) and numbers[0] != 0:
                factor = factor / numbers[0]
    return factor


class Parts(NamedTuple):
    """The anchors of a region, in the graph's order."""

    region: Region
    linears: list[Linear]
    attentions: list[Node]  # scaled_dot_product_attention, multi_head_attention_forward or softmax
    norms: list[Node]

    def before(self, node: Node, stops: set[Node]) -> list[Node]:
        """Returns `node` and the region's nodes that lead to it, without `stops` and what leads to these."""
        inside, ancestors, stack = set(self.region.nodes), set(), [node]
        while stack:
            n = stack.pop()
            if n in inside and n not in stops and n not in ancestors:
                ancestors.add(n)
                stack += values_read(n)
        return [n for n in self.region.nodes if n in ancestors]

    def after(self, node: Node) -> list[Node]:
        """Returns the region's nodes that are computed from a node, itself excluded."""
        descendants = {node}
        for n in self.region.nodes:
            if not descendants.isdisjoint(n.all_input_nodes):
                descendants.add(n)
        return [n for n in self.region.nodes if n in descendants and n is not node]

    def outside(self, nodes: list[Node], names: frozenset[str]) -> list[Node]:
        """Returns the region's inputs, except the source, that those of `nodes` with these names read."""
        return self.region.read_by(n for n in nodes if name_of(n) in names)


ATTENTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax", "_softmax", PACKED)


def parts_of(region: Region) -> Parts:
    """Finds the linear layers, attentions and norms of a region."""
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
    """Returns the dtype of the residual stream: the output's, or under autocast the user's choice."""
    output, in_fp32 = tensor_of(parts.region.output).dtype, choices.get().residual_in_fp32
    if in_fp32 is None or not parts.linears:
        return output
    last = parts.linears[-1]
    computed, weight = tensor_of(last.node).dtype, tensor_of(last.weight).dtype
    return output if computed == weight else torch.float32 if in_fp32 else computed


def common_arguments(parts: Parts, norm: Node, last: Node) -> tuple[list, Callable[[Call], dict]]:
    """Returns ([norm weight, norm bias], a function of `call` that writes the options all blocks have).

    last: the node of the branch's last layer."""
    region, width = parts.region, shape_of(parts.region.source)[-1]
    first = parts.linears[0].node if parts.linears else last
    stops = {linear.node for linear in parts.linears} - {first}
    kind, weight, bias, eps = norm_arguments(norm, region, parts.before(first, stops))
    tail = parts.after(last)[:-1]
    scale = drop_path = None
    for multiplier in parts.outside(tail, MULTIPLIES):
        shape = shape_of(multiplier) or ()
        if len(shape) > 1 and all(n == 1 for n in shape[1:]) and shape[0] == shape_of(region.source)[0]:
            drop_path, twice = multiplier, drop_path is not None
        elif shape == (1,) or (shape[-1:] == (width,) and all(n == 1 for n in shape[:-1])):
            scale, twice = multiplier, scale is not None
        else:
            raise Unrecognised(f"the branch is multiplied by a tensor of shape {shape}")
        if twice:
            raise Unrecognised("the branch is multiplied by two vectors")
    factor, computed, keep = constant_factor(tail), tensor_of(last).dtype, choices.get().keep
    stream = stream_dtype(parts)

    def keywords(call: Call) -> dict:
        options = dict(eps=eps, norm=kind)
        if scale is not None:
            shaped = scale if len(shape_of(scale)) == 1 else call(Tensor.flatten, scale)
            if shape_of(scale) == (1,):  # one gate for the whole branch
                shaped = call(Tensor.expand, shaped, width)
            options["layer_scale"] = shaped if factor == 1 or drop_path is not None else call(torch.mul, shaped, factor)
        if drop_path is not None:
            options["drop_path"] = call(factors, drop_path, factor)
        if stream != computed:
            options["residual_in_fp32"] = True
        if keep != "least":
            options["keep"] = keep
        return options

    return [weight, bias], keywords


def call_block(
    parts: Parts, call: Call, operation: Callable, affine: list, layers: Iterable, *, tokens_first=False, **keywords
) -> Any:
    """Calls the operation of a block with x in the stream's dtype and as (B, N, D) or (tokens, D).

    affine: the norm's weight and bias. layers: those of the linear layers. tokens_first: whether x is (N, B, D)."""
    source, dtype, (weight, bias) = parts.region.source, stream_dtype(parts), affine
    chosen = choices.get().residual_in_fp32 is not None  # then the block before may return another dtype than captured
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
