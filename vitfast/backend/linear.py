"""Linear layers in a graph: linear, addmm, matmul with a matrix, einsum with a weight of any axes."""

import math
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from .arguments import as_rows
from .graph import Call
from .nodes import ADDS, argument, name_of, shape_of


class Linear(NamedTuple):
    """A product with a weight, and what is added to it."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    rows_from: tuple[int, ...]  # the axes of weight that are those of the output
    columns_from: tuple[int, ...]  # and those that are summed

    @property
    def rows(self) -> int:
        """The length of the output's last axes."""
        return math.prod(shape_of(self.weight)[axis] for axis in self.rows_from)

    @property
    def columns(self) -> int:
        """The length of the input's last axes."""
        return math.prod(shape_of(self.weight)[axis] for axis in self.columns_from)

    def parameters(self, call: Call) -> tuple:
        """(weight (rows, columns), bias (rows,) or None)."""
        axes = self.rows_from, self.columns_from
        weight = self.weight if axes == ((0,), (1,)) else call(as_rows, self.weight, *axes)
        flat = self.bias is None or len(shape_of(self.bias)) == 1
        return weight, self.bias if flat else call(Tensor.flatten, self.bias)


def linear_of(node: Node) -> Linear | None:
    """The linear layer that a node is; None for others."""
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
    """The axes of the second operand that the output has, and those that are summed.

    None where they are not the last axes of the output and of the first operand."""
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
    """The layer with what is added to it in the next node, where that is a parameter of its rows."""
    user = next(iter(linear.node.users)) if len(linear.node.users) == 1 else None
    if linear.bias is None and user in inside and name_of(user) in ADDS:
        others = [a for a in user.all_input_nodes if a is not linear.node and a not in inside]
        rows = tuple(shape_of(linear.weight)[axis] for axis in linear.rows_from)
        if len(others) == 1 and shape_of(others[0]) == rows:
            return linear._replace(node=user, bias=others[0])
    return linear
