"""Rewrites a captured graph into one spelling with the same values, before regions are looked for."""

import functools
import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .graph import Call
from .lengths import RESHAPES
from .nodes import ADDS, ANALYTIC, name_of, tensor_of, value_of
from .packed import read_once, write_call

# Functions whose first parameter is named `input`; those whose second parameter is named `other` or `mat2`.
_INPUT = ANALYTIC - {"where", "einsum", "cat", "stack", "scaled_dot_product_attention", "multi_head_attention_forward"}
_OTHER = frozenset("matmul bmm mm add sub subtract rsub mul multiply div true_divide divide".split())


def standardise(graph: Graph, autocast: Callable[[str], dict[Node, torch.dtype | None]]) -> None:
    """Makes arguments positional, symbolic numbers constants, and of a fused layer separate calls.

    autocast(device type): the dtype of autocast at each node.
    """
    for node in list(graph.nodes):
        _place_arguments(node)
        if name_of(node) == "_transformer_encoder_layer_fwd" and not node.kwargs and len(node.args) == 20:
            _write_out(graph, node, autocast)
    _fix_numbers(graph)
    _list_sizes(graph)
    read_once(graph)


def _place_arguments(node: Node) -> None:
    """Makes `input`, `other` and `mat2` positional arguments, and each operand of an einsum one."""
    name = name_of(node)
    for place, word in ((0, "input"), (1, "other"), (1, "mat2")):
        takes = name in _OTHER if place else name in _INPUT and node.op == "call_function"
        if takes and word in node.kwargs and len(node.args) == place:
            node.args = (*node.args, node.kwargs[word])
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != word}
    if name == "einsum" and len(node.args) == 2 and isinstance(node.args[1], (list, tuple)):
        node.args = (node.args[0], *node.args[1])


def _reads_constant(node: Node) -> bool:
    """Whether a number that a node reads is a constant of the model: an eps, a rate of dropout, a scale."""
    added = name_of(node) in ADDS and any(tensor_of(a) is not None for a in node.all_input_nodes)
    return added or any(word in name_of(node) for word in ("norm", "dropout", "attention"))


def _fix_numbers(graph: Graph) -> None:
    """Makes constants of the floats that dynamic=True has made inputs: eps, rates of dropout, scales.

    `float` of a symbol adds a guard on it, so that a call with another number compiles the graph once more.
    """
    for node in list(graph.nodes):
        value, readers = value_of(node), list(node.users)
        if node.op == "placeholder" or not isinstance(value, torch.SymFloat) or value.node.hint is None:
            continue
        if readers and all(map(_reads_constant, readers)):
            numbers = {node: float(value)}
            for user in readers:
                user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda a, n=numbers: n.get(a, a))
            graph.erase_node(node)


def _list_sizes(graph: Graph) -> None:
    """Rewrites x.view(y.size()) to take lengths one by one: regions read numbers, but no torch.Size."""
    for node in [node for node in graph.nodes if isinstance(value_of(node), torch.Size)]:
        readers = [user for user in node.users if name_of(user) in RESHAPES and user.args[1:] == (node,)]
        if not readers:
            continue
        with graph.inserting_before(node.next):
            lengths = list(value_of(node))
            for i, length in enumerate(lengths):
                if not isinstance(length, int):
                    lengths[i] = graph.call_function(operator.getitem, (node, i))
                    lengths[i].meta["example_value"] = length
        for user in readers:
            user.args = (user.args[0], *lengths)


@torch.no_grad()
def _write_out(graph: Graph, fused: Node, autocast: Callable[[str], dict[Node, torch.dtype | None]]) -> None:
    """Replaces PyTorch's fused encoder layer, which runs in inference, by separate calls.

    The fused call stays under autocast, where it returns another dtype than separate calls, and on nested tensors.
    """
    x = tensor_of(fused.args[0])
    if x is None or x.is_nested or autocast(x.device.type)[fused] is not None:
        return
    with x.fake_mode, graph.inserting_before(fused):
        out = _encoder_layer(functools.partial(write_call, graph, fused), *fused.args)
    fused.replace_all_uses_with(out)
    graph.erase_node(fused)


def _encoder_layer(
    call: Call, x, width, heads, qkv, qkv_bias, proj, proj_bias, gelu, norm_first, eps, *parameters
) -> Node:
    """Writes the separate calls of nn.TransformerEncoderLayer, from the arguments of its fused call."""
    *norms, fc1, fc1_bias, fc2, fc2_bias, mask, kind = parameters
    if mask is not None and tensor_of(mask).dtype == torch.bool:
        mask = call(torch.logical_not, mask)
    if mask is not None and kind == 1:  # of keys, (B, N); others are (N, N) or (B, H, N, N)
        mask = call(operator.getitem, mask, (slice(None), None, None))

    def attention(h):
        three = call(Tensor.unflatten, call(F.linear, h, qkv, qkv_bias), -1, (3, heads, width // heads))
        q, k, v = (call(Tensor.transpose, call(Tensor.select, three, 2, i), 1, 2) for i in range(3))
        o = call(F.scaled_dot_product_attention, q, k, v, mask)
        return call(F.linear, call(Tensor.flatten, call(Tensor.transpose, o, 1, 2), 2), proj, proj_bias)

    def mlp(h):
        return call(F.linear, call(F.gelu if gelu else F.relu, call(F.linear, h, fc1, fc1_bias)), fc2, fc2_bias)

    for branch, norm in ((attention, norms[:2]), (mlp, norms[2:])):
        if norm_first:
            x = call(operator.add, x, branch(call(F.layer_norm, x, (width,), *norm, eps)))
        else:
            x = call(F.layer_norm, call(operator.add, x, branch(x)), (width,), *norm, eps)
    return x
