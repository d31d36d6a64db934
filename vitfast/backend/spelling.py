"""Brings a captured graph into one spelling, of the same values, before parts are looked for."""

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .graph import ANALYTIC, name_of, value_of

# The names of the first arguments of ANALYTIC functions, but for those whose first ones are others.
_INPUT = ANALYTIC - {"where", "einsum", "cat", "stack", "scaled_dot_product_attention", "multi_head_attention_forward"}
_OTHER = frozenset("matmul bmm mm add sub subtract rsub mul multiply div true_divide divide".split())


def standardise(graph: Graph) -> None:
    """Puts arguments in the places where they are looked for; makes constants of symbolic numbers."""
    for node in graph.nodes:
        _place_arguments(node)
    _fix_numbers(graph)


def _place_arguments(node: Node) -> None:
    name = name_of(node)
    if node.op == "call_function" and name in _INPUT and not node.args and "input" in node.kwargs:
        _place(node, "input")
    for word in ("other", "mat2"):
        if name in _OTHER and len(node.args) == 1 and word in node.kwargs:
            _place(node, word)
    if name == "einsum" and len(node.args) == 2 and isinstance(node.args[1], (list, tuple)):
        node.args = (node.args[0], *node.args[1])


def _place(node: Node, word: str) -> None:
    node.args = (*node.args, node.kwargs[word])
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != word}


def _fix_numbers(graph: Graph) -> None:
    """Makes constants of what dynamic=True makes inputs: eps of norms, rates of dropout, scales.

    Other numbers then compile the graph once more: making a float of a symbol is a guard on it.
    """
    for node in list(graph.nodes):
        value, readers = value_of(node), list(node.users)
        if node.op == "placeholder" or not isinstance(value, torch.SymFloat) or value.node.hint is None:
            continue
        if readers and all(any(word in name_of(n) for word in ("norm", "dropout", "attention")) for n in readers):
            numbers = {node: float(value)}
            for user in readers:
                user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda a, n=numbers: n.get(a, a))
            graph.erase_node(node)
