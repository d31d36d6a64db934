"""The masks of an attention, and which hide all keys from a length on, by how they are computed."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .arguments import logit_bias, shown_keys
from .graph import Call, Unrecognised
from .nodes import ADDS, CASTS, argument, changed_by, name_of, shape_of, storage_of, tensor_of

# A comparison with arange on its left -> 1 if it is True up to a length, -1 if it is True from there on.
_COMPARISONS = {"lt": 1, "le": 1, "gt": -1, "ge": -1, "less": 1, "less_equal": 1, "greater": -1, "greater_equal": -1}
_NOT = frozenset({"invert", "logical_not", "bitwise_not", "__invert__"})
_SAME_ROWS = frozenset(
    "view reshape unsqueeze expand contiguous clone to bool type_as float double half bfloat16".split()
)
_FILLS = frozenset({"masked_fill", "masked_fill_", "where"})


class Mask(NamedTuple):
    """A mask of an attention: numbers added to its logits, or booleans; `hides`: True hides a key."""

    node: Node
    hides: bool = False


def masks_of(nodes: list[Node], tokens: int) -> list[Mask]:
    """Returns the masks (..., tokens) that these nodes add to the logits, or fill them with -inf by."""
    inside, masks = set(nodes), {}
    for node in nodes:
        if name_of(node) in ADDS:
            masks |= {a: Mask(a) for a in node.all_input_nodes}
        elif name_of(node) in _FILLS:
            _, mask, hides = _filled(node)
            if mask is None:  # softmax would give weights to a row whose keys are all hidden
                raise Unrecognised("hidden keys have logits that are not -inf")
            masks[mask] = Mask(mask, hides)
    return [mask for node, mask in masks.items() if node not in inside and (shape_of(node) or ())[-1:] == (tokens,)]


def mask_arguments(masks: list[Mask], samples: int, bias: Callable[[Call, list[Mask]], Any]) -> Iterator:
    """Yields the ways to write masks as arguments of an operation: first as key_lengths, then as a bias.

    Each is a function of `call` that returns keyword arguments. bias(call, masks): writes the sum of masks.
    """
    for i, mask in enumerate(masks):
        shape, rest = shape_of(mask.node), [*masks[:i], *masks[i + 1 :]]
        if len(shape) > 1 and shape[0] == samples and direction(mask.node) == (-1 if mask.hides else 1):

            def both(call: Call, mask=mask, rest=rest) -> dict:
                lengths = dict(key_lengths=call(shown_keys, *mask))
                return lengths | dict(bias=bias(call, rest)) if rest else lengths

            yield both
    yield lambda call: dict(bias=bias(call, masks)) if masks else {}


def write_bias(heads: int, dtype: torch.dtype, call: Call, masks: list[Mask]):
    """Writes masks, which broadcast to (B, heads, N, N), as one bias of ops.attention."""
    return call(logit_bias, [mask.node for mask in masks], [mask.hides for mask in masks], heads, dtype)


def as_lengths(mask: Node) -> tuple[int, tuple[bool, ...]] | None:
    """Returns (direction, for each axis but the last whether it is expanded); None without a direction.

    A proof draws a mask with the same pair, and so holds only for masks that have it too."""
    way = direction(mask)
    return (way, tuple(step == 0 for step in tensor_of(mask).stride()[:-1])) if way else None


def random_mask(mask: Node, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draws a mask for a proof: by random lengths if it has a `direction`, else one with both booleans.

    In the latter case seed 0 draws one mask, and all other seeds its negation."""
    if lengths := as_lengths(mask):
        way, expanded = lengths
        rows = [1 if same else n for n, same in zip(shape, expanded)]
        generator = torch.Generator().manual_seed(seed)
        length = torch.randint(1, max(shape[-1], 2), (*rows, 1), generator=generator, device="cpu")
        shown = ((torch.arange(shape[-1], device="cpu") < length) ^ (way < 0)).expand(shape)
        zeros = torch.zeros(shape, dtype=torch.float64, device="cpu")
        return shown if _is_bool(mask) else zeros.masked_fill(~shown, -math.inf)
    shown = torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu") < 0.7
    if shown.dim() and shown.shape[-1] > 1:
        shown[..., 0], shown[..., 1] = True, False
    return shown ^ (seed != 0)


def direction(mask: Node) -> int:
    """Returns 1 for a mask that shows keys up to a length, -1 for those from there on, 0 for others.

    A mask shows a key where it is True, or where it is 0 among numbers of -inf. Its elements are unknown, so that the
    nodes which compute it decide: it must be a comparison of torch.arange with one number a row. This may be negated,
    turned into numbers and reshaped, but no other node may change it in place.
    """
    chain: list[Node] = []
    if not (sign := _direction(mask, chain)):
        return 0
    memory = {storage_of(node) for node in chain}
    changed = {storage_of(a) for node in mask.graph.nodes if node not in chain for a in changed_by(node)}
    return 0 if None in memory or memory & changed else sign


def _direction(node: Node, chain: list[Node]) -> int:
    """Returns `direction` if no other node changes a mask; adds the nodes that compute it to `chain`."""
    name, arguments = name_of(node), [a for a in node.args if isinstance(a, Node)]
    if tensor_of(node) is None or not arguments:
        return 0
    chain.append(node)
    if name in _COMPARISONS and len(node.args) == 2:
        for (counted, length), sign in ((node.args, 1), (node.args[::-1], -1)):
            one_a_row = not isinstance(length, Node) or (shape_of(length) or (1,))[-1] == 1
            if one_a_row and _counts(counted, shape_of(node)[-1], chain):
                return sign * _COMPARISONS[name]
    elif name in _FILLS and not _is_bool(node):
        numbers, mask, hides = _filled(node)
        if mask is not None and _is_zero(numbers, chain):
            return (-1 if hides else 1) * _direction(mask, chain)
    elif name in _NOT and _is_bool(node):
        return -_direction(arguments[0], chain)
    elif _keeps_rows(node) and _is_bool(node) == _is_bool(arguments[0]):
        return _direction(arguments[0], chain)
    return 0


def _is_bool(node: Node) -> bool:
    return tensor_of(node) is not None and tensor_of(node).dtype == torch.bool


def _filled(node: Node) -> tuple[Any, Node | None, bool]:
    """Returns (numbers, mask, whether True hides) of a call that puts -inf in place of some numbers.

    For other calls it returns (None, None, False)."""
    if name_of(node) == "where" and node.op == "call_function":
        mask, *values = (argument(node, i, n) for i, n in enumerate(("condition", "input", "other")))
        hides = values[0] == -math.inf
        values = values if hides else values[::-1]
    else:
        hides = name_of(node) != "where"
        words = ("mask", "value") if hides else ("condition", "other")
        mask, value = (argument(node, i, word) for i, word in enumerate(words, 1))
        values = [value, node.args[0]]
    whole = values[0] == -math.inf and isinstance(mask, Node)
    return (values[1], mask, hides) if whole else (None, None, False)


def _is_zero(value, chain: list[Node]) -> bool:
    while isinstance(value, Node) and name_of(value) in CASTS:
        chain.append(value)
        value = value.args[0]
    chain += [value] if isinstance(value, Node) else []
    return name_of(value) in ("zeros", "zeros_like", "new_zeros") if isinstance(value, Node) else value == 0


def _keeps_rows(node: Node) -> bool:
    """Whether a node reshapes, expands, copies or casts its first argument, but keeps the last axis."""
    before, after = (shape_of(n) or () for n in (node.args[0], node))
    if before[-1:] != after[-1:] or not before:
        return False
    if name_of(node) == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(i is None or i is Ellipsis or isinstance(i, slice) for i in index)
    return name_of(node) in _SAME_ROWS


def _counts(node, length: int, chain: list[Node]) -> bool:
    """Whether a node is torch.arange of this length along the last axis; adds its nodes to `chain`."""
    while tensor_of(node) is not None:
        chain.append(node)
        if name_of(node) == "arange":
            return len(node.args) < 3 and "step" not in node.kwargs and shape_of(node)[-1] == length
        if not node.args or not isinstance(node.args[0], Node) or not _keeps_rows(node):
            return False
        node = node.args[0]
    return False
