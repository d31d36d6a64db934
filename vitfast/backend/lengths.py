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

PACKED = "vitfast.backend.arguments.attend"  # the call that packed.join_pieces writes, before blocks are looked for
MOST_PREFIX = 8  # tokens in front of the patches: class and register tokens
# Functions whose whole numbers are all lengths: a new shape, or the sizes of axes and pieces.
RESHAPES = frozenset({"view", "reshape", "expand", "unflatten", "_unsafe_view"})
SIZED = frozenset({"layer_norm", "rms_norm", "multi_head_attention_forward", "split", "chunk"})
PLACES = frozenset({"getitem", "narrow", "select", "repeat"})  # whose whole numbers are lengths or positions
# Functions that compute each element from those at its position, or concatenate. _AXES permute axes.
_POINTWISE = frozenset("gelu silu sigmoid tanh erf dropout clone contiguous expand cat".split())
_POINTWISE |= CASTS | ADDS | MULTIPLIES
_AXES = frozenset({"permute", "transpose", "t"})


def packing_of(node: Node) -> dict[str, Node]:
    """Returns the keywords `offsets` and `longest` of attention of packed samples; {} for other nodes."""
    return dict(node.kwargs) if name_of(node) == PACKED and "offsets" in node.kwargs else {}


def packings_in(region: Region) -> dict[Node, str]:
    """Returns the inputs that are `offsets` or `longest` of attention in a region, with these names."""
    return {a: name for node in region.nodes for name, a in packing_of(node).items()}


class Numbers(NamedTuple):
    """The sizes, seed and magnitudes of the random inputs in one run of a proof."""

    samples: int
    tokens: int
    seed: int
    wide: bool  # magnitudes from 1e-3 to 1e3: softmax is 0 or 1 then, so that such a run proves nothing alone
    whole: bool = False  # whether hidden layers have all their units


class Lengths(NamedTuple):
    """Maps from lengths in a region's shapes to those in a run: tokens, samples, symbols, hidden units."""

    tokens: dict[int, int]
    samples: dict[int, int]
    kept: frozenset[Node] = frozenset()  # inputs without axes of tokens or samples
    first: bool = False  # whether only first axes can be those of samples
    symbols: dict[Any, int] = {}
    units: dict[int, int] = {}

    def of(self, shape: tuple, node: Node | None = None) -> tuple:
        """Returns the shape of a node, or one among its arguments, with the lengths replaced."""
        shape = tuple(
            int(n.node.expr.subs(self.symbols)) if isinstance(n, torch.SymInt) else self.units.get(n, n) for n in shape
        )
        if node in self.kept:
            return shape
        both = self.tokens | self.samples
        rest = self.tokens if self.first else both
        return tuple(n if not isinstance(n, int) else (rest if i else both).get(n, n) for i, n in enumerate(shape))


def ways_to_shrink(region: Region, numbers: Numbers) -> list[Lengths]:
    """Returns ways to shrink the lengths of a region for a run, to be tried in this order.

    proof._run checks that every tensor has its captured shape with the lengths replaced: then the region is the same
    program on fewer tokens. Other whole numbers may be positions of tokens, and with one above MOST_PREFIX all stay.
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
    """Returns smaller lengths for hidden layers, and for the width of tokens that are made of images.

    Every function of such an axis must compute all units in the same way, or sum over them. Then the output of a region
    or operation is the sum or the concatenation of one function of each unit's weights, whatever the number of units.
    """
    shapes = [shape_of(node) or () for node in (*region.inputs, *region.nodes)]
    taken, smaller = {n for shape in shapes for n in shape}, {}
    weights = [shape_of(argument(n, 1, "weight")) or () for n in region.nodes if name_of(n) in ("linear", "conv2d")]
    for n in dict.fromkeys(n for shape in weights for n in shape[:2]):
        few = next(i for i in itertools.count(4 * numbers.samples) if not {i, 2 * i} & taken)
        units = {n: few} | ({2 * n: 2 * few} if 2 * n in taken else {})  # two layers in one weight
        if n <= few or units.keys() & {*shape_of(region.source), *smaller}:
            continue
        if all(_treats_alike(node, units.keys()) for node in region.nodes):
            smaller |= units
            taken |= set(units.values())
    return smaller


def _treats_alike(node: Node, units: Collection[int]) -> bool:
    """Whether a node computes all units of an axis of such a length in the same way, or sums over them."""
    axes = lambda shape: [(i - len(shape), n) for i, n in enumerate(shape or ()) if n in units]  # noqa: E731
    name, out, inputs = name_of(node), axes(shape_of(node)), [axes(shape_of(a)) for a in node.all_input_nodes]
    if not any((out, *inputs)):
        return True
    if name == "linear":
        return not (out and inputs[0])
    if name == "conv2d":
        alone = not axes(shape_of(argument(node, 1, "weight"))[1:]) and argument(node, 6, "groups", 1) == 1
        return alone and not inputs[0]
    if name == "chunk":
        halved = [[(-1, 2 * min(units))]]
        return inputs == halved and argument(node, 1, "chunks") == 2 and argument(node, 2, "dim", 0) == -1
    if name == "getitem":
        return name_of(node.args[0]) == "chunk"
    if len(out) != 1 or name in _POINTWISE:
        return len(out) == 1 and all(place in ([], out) for place in inputs)
    if len(inputs[0]) != 1 or name in _AXES:
        return len(inputs[0]) == 1
    before = [math.prod(shape_of(a)[:axis]) for a, [(axis, _)] in ((node, out), (node.all_input_nodes[0], inputs[0]))]
    return name in RESHAPES | {"flatten"} and before[0] == before[1]


def _fewer_tokens(region: Region, numbers: Numbers) -> dict[Any, int]:
    """Returns smaller lengths for tokens and for the patches among them, or for the symbol of tokens."""
    shape, shapes = shape_of(region.source), [shape_of(node) or () for node in (*region.inputs, *region.nodes)]
    tokens, length = shape[-2], tensor_of(region.source).shape[-2]
    if tokens <= 3 * numbers.tokens or tokens == shape[0]:
        return {}
    if not isinstance(length, int):
        return {length.node.expr: numbers.tokens}
    # Rotary tables have rows for the patches alone.
    patches = {n for shape in shapes for n in shape[:-1] if tokens - MOST_PREFIX <= n < tokens}
    patches -= {n for shape in shapes for n in shape[-1:]}
    return {n: n - tokens + numbers.tokens for n in (*patches, tokens)}


def _packed(region: Region, numbers: Numbers) -> Lengths:
    """Returns Lengths with fewer packed tokens; each symbol is taken for the number of tokens."""
    shapes = [getattr(value_of(node), "shape", ()) for node in region.inputs]
    symbols = {n.node.expr: numbers.tokens for shape in shapes for n in shape if isinstance(n, torch.SymInt)}
    return Lengths({n: numbers.tokens for n in shapes[0][-2:-1] if isinstance(n, int)}, {}, symbols=symbols)


def _smaller(region: Region, numbers: Numbers, fewer: dict[Any, int]) -> Iterator[Lengths]:
    """Yields Lengths with fewer samples and tokens, those that replace most first; none for symbols."""
    shape = tensor_of(region.source).shape
    if any(not isinstance(n, int) for n in shape):
        return
    samples, few = shape[0], {shape[0]: numbers.samples} if shape[0] > numbers.samples else {}
    # An axis of a parameter may have the batch's length by chance.
    weights = {argument(n, 1, "weight") for n in region.nodes if name_of(n) == "conv2d"}
    kept = frozenset(n for n in region.inputs[1:] if len(shape_of(n) or ()) < 3 or n in weights)
    for replaced in (fewer, {}) if fewer else ({},):
        if not any(samples in (shape_of(n) or ())[n not in kept :] for n in region.inputs[1:]):
            yield Lengths(replaced, few)
        yield Lengths(replaced, few, kept, first=True)


def _numbers(node: Node) -> list[int]:
    """Returns all whole numbers among the arguments of a node."""
    numbers: list[int] = []
    map_aggregate((node.args, node.kwargs), lambda a: numbers.append(a) if type(a) is int else None)
    return numbers


def _symbols(region: Region, numbers: Numbers, fewer: dict[Any, int]) -> list[Lengths]:
    """Returns Lengths with numbers for symbols: few samples and tokens, other lengths than in this call.

    In this call, a length may equal a constant of the model by chance. No length may become one or zero, for which
    different orders of the samples are the same.
    """
    lengths = [
        n for node in (*region.inputs, *region.nodes) for n in getattr(value_of(node), "shape", [value_of(node)])
    ]
    lengths = [n for n in lengths if isinstance(n, torch.SymInt)]
    guards = lengths[0].node.shape_env.guards if lengths else []
    equal = [pair for guard in guards if guard.expr.func is Eq for pair in (guard.expr.args, guard.expr.args[::-1])]
    sizes = {n.node.expr for n in lengths}
    for independent in ({n for n in sizes if n.is_symbol}, _undetermined(sizes, equal)):
        ways = _ways(region, numbers, fewer, [n for n in lengths if n.node.expr in independent], lengths, equal)
        ways = [way for way in ways if all(expr.subs(way.symbols) > 1 for expr in sizes)]
        if ways:
            return ways
    raise Unrecognised("the lengths are none of few samples")


def _undetermined(sizes: set[Any], equal: list[tuple]) -> dict[Any, int]:
    """Returns the lengths that follow from no others, and no guard: an image's sides, not its tokens.

    equal: pairs of lengths that guards say are equal. The returned numbers are placeholders."""
    free: dict[Any, int] = {}
    for expr in sorted(sizes, key=lambda expr: expr.count_ops()):
        guarded = any(length == expr and (other in free or other.is_number) for length, other in equal)
        if expr.subs(free).free_symbols and not guarded:
            free[expr] = 10**6 + len(free)  # so large that no quotient is zero
    return free


def _ways(
    region: Region, numbers: Numbers, fewer: dict[Any, int], changed: list, lengths: list, equal: list[tuple]
) -> list[Lengths]:
    """Returns Lengths in which those `changed` get new numbers, from which all others follow."""
    cuts = any(name_of(node) == "conv2d" for node in region.nodes)
    sides = {n.node.expr for n in tensor_of(region.source).shape[-2:] if cuts and isinstance(n, torch.SymInt)}
    new = _unequal(changed, sides)
    fitted = {n.node.expr: size(n) for n in lengths if n.node.expr in sides}  # which position embeddings may demand
    samples = tensor_of(region.source).shape[0]
    free = {s for n in lengths for s in n.node.expr.subs(new).free_symbols}
    free |= set() if isinstance(samples, int) else samples.node.expr.free_symbols
    moved = _moved(fewer, new, lengths)
    fixed = {n: few for n, few in fewer.items() if isinstance(n, int)}
    ways = [
        Lengths(tokens, {}, symbols=new | other | symbols | dict.fromkeys(free, numbers.samples + i))
        for other in ({}, fitted)[: 1 + bool(fitted)]
        for tokens, symbols in ([(fixed, moved)] if lengths and fewer else []) + [({}, {})]
        for i in range(16 if free else 1)
        if numbers.samples + i not in symbols.values()
    ]
    for way, (length, other) in itertools.product(ways, equal):
        if length not in new and (other in new or other.is_number):
            way.symbols[length] = way.symbols[other] if other in new else int(other)
    return ways


def _unequal(lengths: list[torch.SymInt], sides: Collection[Any]) -> dict[Any, int]:
    """Returns a greater number for each length; the sides of images become multiples of what they are.

    Lengths that are equal in this call get different numbers. Of others but sides, the longer stays so, by 2 or more.
    """
    longer: dict[Any, int] = {}
    for i, n in enumerate(sorted({n.node.expr: n for n in lengths}.values(), key=size)):
        step = size(n) if n.node.expr in sides else 1
        choices = itertools.count(size(n) + (1 + 2 * i) * step, step)
        longer[n.node.expr] = next(length for length in choices if length not in longer.values())
    return longer


def _moved(fewer: dict[Any, int], new: dict[Any, int], lengths: list[torch.SymInt]) -> dict[Any, int]:
    """Returns smaller numbers, by symbol, for tokens and for the patches among them.

    fewer: the number of tokens by their symbol. new: the other lengths; {} is returned where the two would meet."""
    ((tokens, few),) = fewer.items() if len(fewer) == 1 else [(None, 0)]
    hints = {n.node.expr: size(n) for n in lengths}
    if tokens in new:
        near = [s for s in new if hints[tokens] - MOST_PREFIX <= hints[s] <= hints[tokens]]
        moved = {s: few - 2 * i for i, s in enumerate(sorted(near, key=lambda s: (s is not tokens, -hints[s])))}
    else:  # tokens are the patches and a fixed number more
        moved = {s: few - int(tokens - s) for s in new if isinstance(tokens, Expr) and (tokens - s).is_number}
    return {} if {*new.values()} & {*moved.values()} else moved
