"""Lengths of packed samples, and smaller lengths for a proof: few samples, tokens and hidden units."""

import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from sympy import Eq, Expr
from torch.fx.node import Node, map_aggregate

from .graph import Region, Unrecognised
from .nodes import ADDS, CASTS, MULTIPLIES, argument, name_of, shape_of, size, tensor_of, value_of

PACKED = "vitfast.backend.arguments.attend"  # the attention of packed samples, which comes into a graph before blocks
MOST_PREFIX = 8  # tokens in front of the patches
RESHAPES = frozenset({"view", "reshape", "expand", "unflatten", "_unsafe_view"})
SIZED = frozenset({"layer_norm", "rms_norm", "multi_head_attention_forward", "split", "chunk"})
PLACES = frozenset({"getitem", "narrow", "select", "repeat"})  # of these too a whole number is a length or a place
# Functions that compute each number from those in the same place, or put tensors side by side; those that turn axes.
_POINTWISE = frozenset("gelu silu sigmoid tanh erf dropout clone contiguous expand cat".split())
_POINTWISE |= CASTS | ADDS | MULTIPLIES
_AXES = frozenset({"permute", "transpose", "t"})


def packing_of(node: Node) -> dict[str, Node]:
    """The offsets and longest of packed samples that a node attends to; empty for other nodes."""
    return dict(node.kwargs) if name_of(node) == PACKED and "offsets" in node.kwargs else {}


def packings_in(region: Region) -> dict[Node, str]:
    """The offsets and longest samples that attention in a region reads, with their names."""
    return {given: name for node in region.nodes for name, given in packing_of(node).items()}


class Numbers(NamedTuple):
    """The inputs of one run."""

    samples: int
    tokens: int
    seed: int
    wide: bool  # magnitudes of a wide range: a softmax is 0 or 1, so that these prove nothing alone
    whole: bool = False  # whether hidden layers have all their units


class Lengths(NamedTuple):
    """Lengths to replace in the shapes of a region: those of samples, tokens and units."""

    tokens: dict[int, int]
    samples: dict[int, int]
    kept: frozenset[Node] = frozenset()  # inputs that have none
    first: bool = False  # whether samples are replaced in the first axis alone
    symbols: dict[Any, int] = {}
    units: dict[int, int] = {}

    def of(self, shape: tuple, node: Node | None = None) -> tuple:
        """This shape, of a node or of an argument, with the lengths replaced."""
        shape = tuple(
            int(n.node.expr.subs(self.symbols)) if isinstance(n, torch.SymInt) else self.units.get(n, n) for n in shape
        )
        if node in self.kept:
            return shape
        both = self.tokens | self.samples
        rest = self.tokens if self.first else both
        return tuple(n if not isinstance(n, int) else (rest if i else both).get(n, n) for i, n in enumerate(shape))


def ways_to_shrink(region: Region, numbers: Numbers) -> list[Lengths]:
    """Lengths to replace, in ways to be tried in this order.

    Every tensor must then have its shape with these lengths replaced (_run looks), which makes it the same program for
    fewer tokens. Other whole numbers may be places of tokens, so that none above MOST_PREFIX is allowed.
    """
    places = [n for node in region.nodes if name_of(node) not in RESHAPES | SIZED for n in _numbers(node)]
    if packings_in(region):
        ways = [_packed(region, numbers), *_symbols(region, numbers, {})]
    elif any(abs(n) > MOST_PREFIX for n in places):
        ways = _symbols(region, numbers, {})
    else:
        fewer = _fewer_tokens(region, numbers)
        ways = [*_smaller(region, numbers, fewer), *_symbols(region, numbers, fewer)]
    units = {} if numbers.whole else _fewer_units(region, numbers)
    return [way._replace(units=u) for u in ([units, {}] if units else [{}]) for way in ways]


def _fewer_units(region: Region, numbers: Numbers) -> dict[int, int]:
    """Smaller lengths for hidden layers, and for the width of tokens that are made of images.

    Every function of such an axis must compute each unit as any other, or sum over all of them. Then what a region and
    an operation give is a sum of one function of each unit's weights, or these functions side by side, whatever the
    number of units.
    """
    shapes = [shape_of(node) or () for node in (*region.inputs, *region.nodes)]
    taken, found = {n for shape in shapes for n in shape}, {}
    weights = [shape_of(argument(n, 1, "weight")) or () for n in region.nodes if name_of(n) in ("linear", "conv2d")]
    for n in dict.fromkeys(n for shape in weights for n in shape[:2]):
        few = next(i for i in itertools.count(4 * numbers.samples) if not {i, 2 * i} & taken)
        units = {n: few} | ({2 * n: 2 * few} if 2 * n in taken else {})  # two layers in one weight
        if n <= few or units.keys() & {*shape_of(region.source), *found}:
            continue
        if all(_treats_alike(node, units.keys()) for node in region.nodes):
            found |= units
            taken |= set(units.values())
    return found


def _treats_alike(node: Node, units: Collection[int]) -> bool:
    """Whether a node computes all units of an axis of such a length in the same way, or sums over them."""
    axes = lambda shape: [(i - len(shape), n) for i, n in enumerate(shape or ()) if n in units]  # noqa: E731
    name, out, given = name_of(node), axes(shape_of(node)), [axes(shape_of(a)) for a in node.all_input_nodes]
    if not any((out, *given)):
        return True
    if name == "linear":
        return not (out and given[0])
    if name == "conv2d":
        alone = not axes(shape_of(argument(node, 1, "weight"))[1:]) and argument(node, 6, "groups", 1) == 1
        return alone and not given[0]
    if name == "chunk":
        halved = [[(-1, 2 * min(units))]]
        return given == halved and argument(node, 1, "chunks") == 2 and argument(node, 2, "dim", 0) == -1
    if name == "getitem":
        return name_of(node.args[0]) == "chunk"
    if len(out) != 1 or name in _POINTWISE:
        return len(out) == 1 and all(place in ([], out) for place in given)
    if len(given[0]) != 1 or name in _AXES:
        return len(given[0]) == 1
    before = [math.prod(shape_of(a)[:axis]) for a, [(axis, _)] in ((node, out), (node.all_input_nodes[0], given[0]))]
    return name in RESHAPES | {"flatten"} and before[0] == before[1]


def _fewer_tokens(region: Region, numbers: Numbers) -> dict[Any, int]:
    """Smaller lengths in place of those of tokens, or in place of their symbol."""
    shape, shapes = shape_of(region.source), [shape_of(node) or () for node in (*region.inputs, *region.nodes)]
    tokens, given = shape[-2], tensor_of(region.source).shape[-2]
    if tokens <= 3 * numbers.tokens or tokens == shape[0]:
        return {}
    if not isinstance(given, int):
        return {given.node.expr: numbers.tokens}
    # Rotary tables have no rows for prefix tokens.
    patches = {n for shape in shapes for n in shape[:-1] if tokens - MOST_PREFIX <= n < tokens}
    patches -= {n for shape in shapes for n in shape[-1:]}
    return {n: n - tokens + numbers.tokens for n in (*patches, tokens)}


def _packed(region: Region, numbers: Numbers) -> Lengths:
    """Fewer tokens of packed samples: what has a length that nobody knows is a table of all tokens."""
    shapes = [getattr(value_of(node), "shape", ()) for node in region.inputs]
    symbols = {n.node.expr: numbers.tokens for shape in shapes for n in shape if isinstance(n, torch.SymInt)}
    return Lengths({n: numbers.tokens for n in shapes[0][-2:-1] if isinstance(n, int)}, {}, symbols=symbols)


def _smaller(region: Region, numbers: Numbers, fewer: dict[Any, int]) -> Iterator[Lengths]:
    """Lengths of samples and tokens to replace where these are no symbols, fewer with each."""
    shape = tensor_of(region.source).shape
    if any(not isinstance(n, int) for n in shape):
        return
    samples, few = shape[0], {shape[0]: numbers.samples} if shape[0] > numbers.samples else {}
    # A length of a parameter may be that of the batch by chance.
    weights = {argument(n, 1, "weight") for n in region.nodes if name_of(n) == "conv2d"}
    kept = frozenset(n for n in region.inputs[1:] if len(shape_of(n) or ()) < 3 or n in weights)
    for replaced in (fewer, {}) if fewer else ({},):
        if not any(samples in (shape_of(n) or ())[n not in kept :] for n in region.inputs[1:]):
            yield Lengths(replaced, few)
        yield Lengths(replaced, few, kept, first=True)


def _numbers(node: Node) -> list[int]:
    found: list[int] = []
    map_aggregate((node.args, node.kwargs), lambda a: found.append(a) if type(a) is int else None)
    return found


def _symbols(region: Region, numbers: Numbers, fewer: dict[Any, int]) -> list[Lengths]:
    """Sizes of the symbols to be tried: few samples and tokens, other lengths than in this call.

    In this call they may equal a constant of the model by chance. No length may shrink to one or none, where different
    orders of the samples are the same.
    """
    lengths = [
        n for node in (*region.inputs, *region.nodes) for n in getattr(value_of(node), "shape", [value_of(node)])
    ]
    lengths = [n for n in lengths if isinstance(n, torch.SymInt)]
    guards = lengths[0].node.shape_env.guards if lengths else []
    equal = [pair for guard in guards if guard.expr.func is Eq for pair in (guard.expr.args, guard.expr.args[::-1])]
    sizes = {n.node.expr for n in lengths}
    for known in ({n for n in sizes if n.is_symbol}, _undetermined(sizes, equal)):
        ways = _ways(region, numbers, fewer, [n for n in lengths if n.node.expr in known], lengths, equal)
        ways = [way for way in ways if all(expr.subs(way.symbols) > 1 for expr in sizes)]
        if ways:
            return ways
    raise Unrecognised("the lengths are none of few samples")


def _undetermined(sizes: set[Any], equal: list[tuple]) -> dict[Any, int]:
    """The lengths that neither others nor guards determine: of an image's tokens, its sides."""
    found: dict[Any, int] = {}
    for expr in sorted(sizes, key=lambda expr: expr.count_ops()):
        told = any(length == expr and (other in found or other.is_number) for length, other in equal)
        if expr.subs(found).free_symbols and not told:
            found[expr] = 10**6 + len(found)  # so large that no quotient is zero
    return found


def _ways(
    region: Region, numbers: Numbers, fewer: dict[Any, int], changed: list, lengths: list, equal: list[tuple]
) -> list[Lengths]:
    """Numbers for all lengths, of which these are changed and the others follow."""
    cuts = any(name_of(node) == "conv2d" for node in region.nodes)
    sides = {n.node.expr for n in tensor_of(region.source).shape[-2:] if cuts and isinstance(n, torch.SymInt)}
    known = _unequal(changed, sides)
    fitted = {n.node.expr: size(n) for n in lengths if n.node.expr in sides}  # those that positions may demand
    samples = tensor_of(region.source).shape[0]
    free = {s for n in lengths for s in n.node.expr.subs(known).free_symbols}
    free |= set() if isinstance(samples, int) else samples.node.expr.free_symbols
    moved = _moved(fewer, known, lengths)
    fixed = {n: few for n, few in fewer.items() if isinstance(n, int)}
    ways = [
        Lengths(tokens, {}, symbols=known | other | symbols | dict.fromkeys(free, numbers.samples + i))
        for other in ({}, fitted)[: 1 + bool(fitted)]
        for tokens, symbols in ([(fixed, moved)] if lengths and fewer else []) + [({}, {})]
        for i in range(16 if free else 1)
        if numbers.samples + i not in symbols.values()
    ]
    for way, (length, other) in itertools.product(ways, equal):
        if length not in known and (other in known or other.is_number):
            way.symbols[length] = way.symbols[other] if other in known else int(other)
    return ways


def _unequal(lengths: list[torch.SymInt], sides: Collection[Any]) -> dict[Any, int]:
    """Other numbers for lengths, those of images by whole patches.

    Two that are equal in this call become unequal; of others the longer one stays so, by two at least.
    """
    found: dict[Any, int] = {}
    for i, n in enumerate(sorted({n.node.expr: n for n in lengths}.values(), key=size)):
        step = size(n) if n.node.expr in sides else 1
        longer = itertools.count(size(n) + (1 + 2 * i) * step, step)
        found[n.node.expr] = next(length for length in longer if length not in found.values())
    return found


def _moved(fewer: dict[Any, int], known: dict[Any, int], lengths: list[torch.SymInt]) -> dict[Any, int]:
    """The symbols of tokens, and of the patches among them, with smaller lengths."""
    ((tokens, few),) = fewer.items() if len(fewer) == 1 else [(None, 0)]
    hints = {n.node.expr: size(n) for n in lengths}
    if tokens in known:
        near = [s for s in known if hints[tokens] - MOST_PREFIX <= hints[s] <= hints[tokens]]
        moved = {s: few - 2 * i for i, s in enumerate(sorted(near, key=lambda s: (s is not tokens, -hints[s])))}
    else:  # a number more than patches
        moved = {s: few - int(tokens - s) for s in known if isinstance(tokens, Expr) and (tokens - s).is_number}
    return {} if {*known.values()} & {*moved.values()} else moved
