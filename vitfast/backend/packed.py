"""Attention of packed samples that is written piece by piece: proven, and replaced by one call.

Towers of Qwen2-VL's kind put images in one row of tokens, read their lengths as numbers, split q, k and v by these,
attend within each piece and concatenate the pieces. The lengths are known when the graph runs, and not before.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as symbolic
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_true
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from .. import ops
from . import proof
from .arguments import attend, logit_bias, offsets_of
from .graph import Call, Positions, Region, Unrecognised
from .lengths import Lengths
from .nodes import REARRANGEMENTS, VALUE_FREE, argument, is_draw, name_of, shape_of, storage_of, tensor_of, value_of

# What stands between the splits and the concatenation of all pieces.
_BETWEEN = REARRANGEMENTS | {"getitem", "scaled_dot_product_attention"}


@contextlib.contextmanager
def lengths_as_symbols() -> Iterator[None]:
    """Makes symbols of the numbers that code reads from tensors, if it is compiled inside this context.

    Without it Dynamo cuts the graph where attention of packed images reads their lengths as numbers.
    """
    # Without this option, it is an error for Dynamo if only products of a length are read, and not the length itself.
    lax = symbolic.patch(soft_pending_unbacked_not_found_error=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), lax:
        yield


class CheckedSplits(TorchFunctionMode):
    """Replaces torch.split by `split_pieces` in a function that Dynamo captures.

    Dynamo cuts the graph where a library compares a length with one, unless it is sure that pieces have more tokens.
    The compiled code raises for shorter pieces.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.split, Tensor.split):
            return split_pieces(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def split_pieces(tensor: Tensor, split_size_or_sections: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    """torch.split, which tells Dynamo that pieces of unknown lengths have more than one token."""
    if isinstance(split_size_or_sections, (list, tuple)):
        for length in split_size_or_sections:
            if guard_or_true(length > 1):  # also where the length is unknown
                torch._check(length > 1)
    return tensor.split(split_size_or_sections, dim)


class Pieces(NamedTuple):
    """An attention of packed samples, written piece by piece, as its nodes are in a graph."""

    region: Region
    splits: list[Node]  # of q, k and v
    sizes: list[Node]  # of the pieces: numbers that are read from `lengths`
    lengths: Node
    scale: float | None


def write_call(graph: Graph, like: Node, function: Callable, *arguments, fake: Callable | None = None, **keywords):
    """Writes a call of a function, with the metadata of another node as if it had been captured there.

    fake: computes the fake value instead of the function.
    """
    values, named = map_arg((arguments, keywords), value_of)
    node = graph.call_function(function, arguments, keywords)
    node.meta = {**like.meta, "example_value": (fake or function)(*values, **named)}
    return node


def read_once(graph: Graph) -> None:
    """Merges the `item` calls that read one and the same number: the host waits for a GPU at each."""
    positions, readers = Positions(graph), {}
    for node in positions.nodes:
        if name_of(node) == "item":
            first = readers.setdefault(positions.expression(node), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def pieces_of(cat: Node, positions: Positions) -> Pieces | None:
    """Returns the attention whose pieces a node concatenates; None if it concatenates anything else."""
    nodes, splits, stack = {cat}, [], list(cat.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in nodes or tensor_of(node) is None and name_of(node) != "split":
            continue
        nodes.add(node)
        if name_of(node) == "split":
            splits.append(node)
        elif name_of(node) not in _BETWEEN:
            return None
        else:
            stack += node.all_input_nodes
    calls = [node for node in positions.nodes if node in nodes and name_of(node) == "scaled_dot_product_attention"]
    if not calls or not splits or not all(map(_sizes, splits)):
        return None
    pieces = [argument(calls[0], place, name) for place, name in enumerate(("query", "key", "value"))]
    qkv_splits = [piece.args[0] for piece in pieces if name_of(piece) == "getitem"]
    sizes = _sizes(splits[0])
    if len(qkv_splits) != 3 or set(qkv_splits) != set(splits) or any(_sizes(split) != sizes for split in splits):
        raise Unrecognised("pieces of q, k and v that are split in different ways")
    lengths = sizes[0].args[0].args[0]
    read = [size.args[0].args for size in sizes]
    if read != [(lengths, i) for i in range(len(sizes))] or shape_of(lengths) != (len(sizes),):
        raise Unrecognised("pieces whose lengths are not all numbers of a tensor, in its order")
    if storage_of(lengths) is None or storage_of(lengths) in positions.changed:
        raise Unrecognised("the lengths of the pieces are changed in place")
    region = positions.around(nodes, qkv_splits[0].args[0])
    if set(region.inputs) != {split.args[0] for split in splits} | set(sizes):
        raise Unrecognised("pieces with masks, or with other numbers")
    if (why := positions.obstacle(region)) is not None:
        raise Unrecognised(why)
    return Pieces(region, qkv_splits, sizes, lengths, argument(calls[0], 6, "scale"))


def _sizes(split: Node) -> list[Node] | None:
    """Returns the sizes of a split's pieces if all are read from a tensor, else None."""
    sizes = argument(split, 1, "split_size_or_sections", argument(split, 1, "split_size"))
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return None
    items = all(isinstance(n, Node) and name_of(n) == "item" and name_of(n.args[0]) == "getitem" for n in sizes)
    return list(sizes) if items else None


def _attention(call: Call, pieces: Pieces, packing: tuple, heads_first: bool):
    """Writes the attention in one call; its output is (1, H, tokens, Dh) or (1, tokens, H, Dh)."""
    tensors = [split.args[0] for split in pieces.splits]
    offsets, longest = packing
    out = call(attend, *tensors, pieces.scale, "bhnd", offsets=offsets, longest=longest)
    return call(Tensor.contiguous, out if heads_first else call(Tensor.transpose, out, 1, 2))


def _attended(q: Tensor, k: Tensor, v: Tensor, *_, **__) -> Tensor:
    """Returns attention's output for fake tensors; `attend` itself would add guards for seconds."""
    return (q + k + v).transpose(1, 2).contiguous().transpose(1, 2)


def _packing(call: Call, pieces: Pieces) -> tuple:
    """Writes the (offsets, longest) of the samples."""
    return call(offsets_of, pieces.lengths), functools.reduce(functools.partial(call, torch.sym_max), pieces.sizes)


def prove_pieces(pieces: Pieces) -> bool:
    """Proves that one attention computes the pieces; returns whether its output has heads before tokens.

    The pieces have other lengths in each of three runs. Raises Unrecognised where the numbers or gradients differ.
    Since `pieces_of` allows no other inputs, they cannot depend on a mask.
    """
    tensors = [split.args[0] for split in pieces.splits]
    like = [tensor_of(node) for node in (*tensors, pieces.lengths)]
    if {t.dtype for t in like[:3]} != {tensor_of(pieces.region.output).dtype} or len({t.device for t in like}) != 1:
        raise Unrecognised("q, k and v of different dtypes, or lengths on another device")
    if len({shape_of(node) for node in tensors}) != 1 or len(like[0].shape) != 4 or like[0].shape[0] != 1:
        raise Unrecognised("q, k and v that are not (1, H, tokens, Dh) of packed samples")
    ways = [False, True]
    with proof._apart(like[0].device):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            counts = torch.randint(1, 6, (len(pieces.sizes),), generator=generator, device="cpu")
            counts[0] += seed  # makes the runs differ even if the same lengths are drawn
            values = dict(zip(pieces.sizes, counts.tolist())) | {pieces.lengths: counts.to(like[0].device, torch.int32)}
            for node, t in zip(tensors, like):
                shape = 1, t.shape[1], sum(counts.tolist()), t.shape[3]
                values[node] = proof._random(shape, generator).to(t.device).requires_grad_()
            env = dict(values)
            for node in pieces.region.nodes:
                env[node] = proof._execute(node, env, Lengths({}, {}), last=False)
            theirs, call = env[node], functools.partial(proof._compute, values, proof._CASTS)
            upstream = proof._random(theirs.shape, generator).to(theirs.device)
            gradients = proof._gradients(theirs, values, upstream)
            packing = _packing(call, pieces)
            for way in list(ways):
                ours = _attention(call, pieces, packing, way)
                error = proof._error(theirs, ours)
                if error < proof.TOLERANCE:
                    error = proof._gradient_error(gradients, proof._gradients(ours, values, upstream))
                if not error < proof.TOLERANCE:
                    ways.remove(way)
    if not ways:
        raise Unrecognised("pieces that do not attend each to itself alone")
    return ways[0]


def join_pieces(graph: Graph, pieces: Pieces, heads_first: bool, packings: dict[tuple, tuple[Node, Node]]) -> None:
    """Replaces the pieces by one call; layers with the same lengths share the nodes of `packings`."""
    output, key = pieces.region.output, (pieces.lengths, *pieces.sizes)

    def call(function, *arguments, **keywords):
        return write_call(
            graph, output, function, *arguments, fake=_attended if function is attend else None, **keywords
        )

    with tensor_of(pieces.region.source).fake_mode, graph.inserting_before(output):
        packing = packings[key] = packings.get(key) or _packing(call, pieces)
        new = _attention(call, pieces, packing, heads_first)
    output.replace_all_uses_with(new)
    for node in reversed(pieces.region.nodes):
        if not node.users:  # a node whose shape is read elsewhere stays
            graph.erase_node(node)
    _refresh(new)


def _refresh(node: Node) -> None:
    """Recomputes the fake values after a node whose shapes were sums of unknown lengths."""
    for user in node.users:
        value = tensor_of(user)
        if value is None or not free_unbacked_symbols(value):
            continue
        args, kwargs = map_arg((user.args, user.kwargs), value_of)
        with value.fake_mode, torch.set_grad_enabled(value.requires_grad):
            function = getattr(args[0], user.target) if user.op == "call_method" else user.target
            user.meta["example_value"] = function(*(args[1:] if user.op == "call_method" else args), **kwargs)
        _refresh(user)


def packed_of(*values) -> Any:
    """Returns the padding.Packed that the storage of a mask among these values carries, or None."""
    for value in values:
        if type(value) is Tensor and value.dim() == 4 and not any(value.stride()):
            return getattr(value.untyped_storage(), "vitfast_packed", None)
    return None


def packed_block(mask: Tensor, x: Tensor, *layers, rope=None, num_prefix: int = 0, **options) -> Tensor:
    """Calls ops.attention_block on one row of packed samples (1, tokens, D); mask: of padding.Packed."""
    packed = packed_of(mask)
    if rope is not None and num_prefix:
        rope = tuple(F.pad(table, (0, 0, num_prefix, 0), value=still) for table, still in zip(rope, (1.0, 0.0)))
    options |= dict(rope=rope, offsets=packed.offsets, longest=packed.longest)
    return ops.attention_block(x[0], *layers, **options)[None]


def packed_attend(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, axes: str = "bhnd") -> Tensor:
    """Calls arguments.attend on one row of packed samples; mask: of padding.Packed."""
    packed = packed_of(mask)
    return attend(q, k, v, scale, axes, offsets=packed.offsets, longest=packed.longest)


_PACKED = {ops.attention_block: packed_block, attend: packed_attend}


def use_offsets(module: GraphModule) -> str | None:
    """Passes offsets instead of a mask to attention in a rewritten graph; returns why it cannot, or None."""
    tensors = [node for node in module.graph.nodes if node.op == "placeholder" and tensor_of(node) is not None]
    masks = [node for node in tensors if tensor_of(node).dim() == 4 and not any(tensor_of(node).stride())]
    readers = [user for mask in masks for user in mask.users if name_of(user) not in VALUE_FREE]
    if any(map(is_draw, module.graph.nodes)):
        return "its layers draw random numbers: dropout or drop path"
    if len(masks) != 1 or not readers:
        return "its mask is not what its layers get"
    for bias in readers:
        sole = bias.target is logit_bias and bias.args[0] == masks
        if not sole or not all(r.target in _PACKED and r.kwargs.get("bias") is bias for r in bias.users):
            return "attention in its layers is the library's, or checkpointed inside of them"
        for reader in list(bias.users):
            reader.target, reader.args = _PACKED[reader.target], (*masks, *reader.args)
            reader.kwargs = {name: value for name, value in reader.kwargs.items() if name != "bias"}
        module.graph.erase_node(bias)
    module.recompile()
    return None
