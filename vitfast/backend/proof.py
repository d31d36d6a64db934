"""Proves by numbers that an operation computes what a region of a graph does, gradients too.

Both run on the same random float64 inputs, three times. The first run has two samples, a few tokens and few hidden
units, where these lengths can be replaced. The other two have more samples and tokens, and other masks; one has all
hidden units, the other has magnitudes from 1e-3 to 1e3, which a normal distribution does not draw. Casts to 16 and 32
bits inside the region become casts to float64: the mathematics is proven, and the dtypes are checked separately.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import Node, map_aggregate
from torch.utils._python_dispatch import _disable_current_modes

from ..ops import use_kernels
from .graph import Proposal, Region, Unrecognised
from .lengths import PLACES, RESHAPES, SIZED, Lengths, Numbers, packings_in, ways_to_shrink
from .masks import as_lengths, random_mask
from .nodes import argument, changed_by, name_of, tensor_of, value_of
from .parts import choices, default_eps

TOLERANCE = 1e-6  # relative, of norms in float64: a true match is at 1e-14, or 1e-8 where 32-bit constants take part
_CASTS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_CAST_METHODS = frozenset({"float", "half", "bfloat16"})
_LAYERS = frozenset({"linear", "addmm", "matmul", "mm", "multi_head_attention_forward", "conv2d"})

ORDINARY = Numbers(samples=2, tokens=11, seed=0, wide=False)  # with one, mixing of samples would be hidden
OTHERS = (
    Numbers(samples=3, tokens=13, seed=2, wide=False, whole=True),
    Numbers(samples=3, tokens=13, seed=3, wide=True),
)


class Proof(NamedTuple):
    """The index and error of the first equal proposal; if there is none, None and the least error."""

    index: int | None
    error: float


_proofs: dict[Any, Proof] = {}  # by structure_of a region and the user's choices
_MOST_PROOFS = 4096


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """A context without the user's modes and autocast, with gradients, in which proofs run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in {device.type, "cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(use_kernels("off"))
        yield


def structure_of(region: Region, autocast: torch.dtype | None) -> tuple:
    """Returns a key that two regions share only if a proof for one holds for the other.

    They have the same calls, and inputs of the same shapes, dtypes and devices."""
    number = {node: i for i, node in enumerate([*region.inputs, *region.nodes])}

    def described(node: Node):
        value = value_of(node)
        if isinstance(value, Tensor):
            return str(tuple(value.shape)), value.dtype, value.device
        return str(value)

    def text(arguments) -> str:
        return repr(map_aggregate(arguments, lambda a: f"%{number[a]}" if isinstance(a, Node) else a))

    calls = [(n.op, n.target, text(n.args), text(n.kwargs), described(n)) for n in region.nodes]
    equal = tuple(number[region.equal[node]] for node in region.inputs)
    return tuple(calls), tuple(map(described, region.inputs)), equal, tuple(map(as_lengths, region.inputs)), autocast


def prove(region: Region, proposals: Iterator[Proposal], autocast: torch.dtype | None) -> tuple[Proposal | None, Proof]:
    """Returns the first proposal that computes the region, or None, and the proof; proofs are cached."""
    key = structure_of(region, autocast), choices.get()
    if (proof := _proofs.get(key)) is not None:
        return None if proof.index is None else next(p for i, p in enumerate(proposals) if i == proof.index), proof
    _check_inputs(region, autocast)
    proposal, proof = _prove(region, proposals, autocast)
    if len(_proofs) >= _MOST_PROOFS:
        _proofs.clear()
    _proofs[key] = proof
    return proposal, proof


def _prove(region: Region, proposals, autocast: torch.dtype | None) -> tuple[Proposal | None, Proof]:
    """Does what `prove` does, uncached; raises Unrecognised if outputs are equal but another check fails."""
    least = float("inf")
    with _apart(tensor_of(region.source).device):
        values, theirs = _first_run(region, ORDINARY)
        upstream = _random(theirs.shape, torch.Generator().manual_seed(1)).to(theirs.device)
        gradients = None
        for index, proposal in enumerate(proposals):
            ours = _built(proposal, values)
            error = _error(theirs, ours, values[region.source])
            least = min(least, error)
            if not error < TOLERANCE:
                continue
            gradients = _gradients(theirs, values, upstream) if gradients is None else gradients
            our_gradients = _gradients(ours, values, upstream)
            if [g is None for g in our_gradients] != [g is None for g in gradients]:
                raise Unrecognised("an input would get a gradient of zero in place of none, or none in place of zero")
            error = _gradient_error(gradients, our_gradients)
            if not error < TOLERANCE:
                raise Unrecognised(f"the outputs are the same, the gradients are not ({error:.0e})")
            _try_dtypes(region, proposal, values, autocast)
            for numbers in OTHERS:
                with torch.no_grad():
                    values, theirs = _first_run(region, numbers)
                    other = _error(theirs, _built(proposal, values))
                if not other < TOLERANCE:
                    raise Unrecognised(f"the numbers are the same for some inputs alone ({other:.0e})")
            return proposal, Proof(index, error)
    return None, Proof(None, least)


def _built(proposal: Proposal, values: dict[Node, Any], casts: frozenset = _CASTS) -> Tensor:
    """Runs a proposal on these values of nodes; dtypes in `casts` become float64, as in the region."""
    try:
        return proposal.build(functools.partial(_compute, values, casts))
    except (TypeError, ValueError, RuntimeError) as error:
        raise Unrecognised(f"the operation does not take it: {error}") from error


def _compute(values: dict[Node, Any], casts: frozenset, function, *arguments, **keywords):
    """Calls a function now, with the values of nodes in place of the nodes: a graph.Call."""
    arguments, keywords = _values((arguments, keywords), values, casts)
    arguments = [list(a) if isinstance(a, (list, tuple)) else a for a in arguments]
    return function(*arguments, **keywords)


def _values(arguments: Any, values: dict[Node, Any], casts: frozenset) -> Any:
    """Returns arguments with values in place of nodes, and float64 in place of the dtypes `casts`."""

    def value(a):
        if isinstance(a, Node):
            return values[a]
        return torch.float64 if isinstance(a, torch.dtype) and a in casts else a

    return map_aggregate(arguments, value)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # Drawing 32 bits takes a third of the time of 64; all that is computed from these numbers is float64.
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").double()


def _first_run(region: Region, numbers: Numbers) -> tuple[dict[Node, Any], Tensor]:
    """Runs a region on random inputs, shrunk in the first way that works; returns inputs and output."""
    *ways, last = ways_to_shrink(region, numbers)
    for lengths in ways:
        with contextlib.suppress(Exception):
            return _run(region, lengths, numbers)
    return _run(region, last, numbers)


def _run(region: Region, lengths: Lengths, numbers: Numbers) -> tuple[dict[Node, Any], Tensor]:
    """Runs a region on random inputs of these lengths; returns the inputs' values and the output."""
    values = _inputs(region, lengths, numbers)
    # A region that changes tensors in place runs on copies: leaves may not be changed, and the operation reads them.
    copied = any(map(changed_by, region.nodes))
    env = {node: v.clone() if copied and isinstance(v, Tensor) else v for node, v in values.items()}
    for node in region.nodes:
        env[node] = _execute(node, env, lengths, last=node is region.output)
        if (tensor := tensor_of(node)) is not None and env[node].shape != (want := lengths.of(tensor.shape)):
            raise Unrecognised(f"{name_of(node)} gives {tuple(env[node].shape)} in place of {want}")
    return values, env[region.output]


def _execute(node: Node, env: dict[Node, Any], lengths: Lengths, last: bool):
    """Runs one node of a region on the values in env. last: whether it is the region's output."""
    arguments, keywords = _values((node.args, node.kwargs), env, _CASTS)
    keywords = dict(keywords)
    if name_of(node) in RESHAPES:
        x, *shape = arguments
        listed = len(shape) == 1 and isinstance(shape[0], (tuple, list))
        arguments = (x, lengths.of(shape[0])) if listed else (x, *lengths.of(shape))
    if name_of(node) == "rms_norm" and argument(node, 3, "eps") is None:  # by default it depends on the input's dtype
        arguments, keywords["eps"] = arguments[:3], default_eps(tensor_of(node.args[0]).dtype)
    if last and name_of(node) in ("iadd", "add_"):  # in place it would change what the norm has saved for backward
        return torch.add(*arguments, **keywords)
    if node.op == "call_function":
        return node.target(*arguments, **keywords)
    if node.op != "call_method":
        raise Unrecognised(f"a node of kind {node.op}")
    return getattr(arguments[0], "double" if node.target in _CAST_METHODS else node.target)(*arguments[1:], **keywords)


def _inputs(region: Region, lengths: Lengths, numbers: Numbers) -> dict[Node, Any]:
    """Draws a value for each input of a region: float64 tensors, masks, pixels, offsets and numbers."""
    generator, values = torch.Generator().manual_seed(numbers.seed), {}
    packings, tokens = packings_in(region), lengths.of(tensor_of(region.source).shape)[-2]
    for node in region.inputs:
        value = value_of(node)
        if region.equal[node] is not node:
            values[node] = values[region.equal[node]]
        elif node in packings:
            values[node] = tokens if packings[node] == "longest" else _offsets(value, tokens, generator)
        elif isinstance(value, torch.SymFloat):
            values[node] = 0.5 + torch.rand((), generator=generator, dtype=torch.float64, device="cpu").item()
        elif not isinstance(value, Tensor):
            values[node] = lengths.of((value,), node)[0]
        elif value.dtype == torch.bool or as_lengths(node):
            mask = random_mask(node, lengths.of(value.shape, node), numbers.seed)
            values[node] = mask.to(value.device)
        elif value.dtype == torch.uint8:
            pixels = functools.partial(torch.randint, 256, generator=generator, dtype=torch.uint8, device="cpu")
            values[node] = pixels(lengths.of(value.shape, node)).to(value.device)
        else:
            x = _random(lengths.of(value.shape, node), generator)
            if x.dim() == 2:  # a weight, whose products shall be as large as its inputs
                x *= x.shape[-1] ** -0.5
            if numbers.wide and node is not region.source:
                x *= 1000
            elif numbers.wide and x.dim() > 2:
                x *= torch.logspace(-3, 2, x.shape[-2], dtype=x.dtype, device="cpu")[:, None]
            values[node] = x.to(value.device).requires_grad_()
    return values


def _offsets(like: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Draws offsets of packed samples with random lengths, as many as a fake tensor has."""
    inner = torch.randint(tokens + 1, (like.shape[0] - 2,), generator=generator, device="cpu").sort().values
    ends = torch.tensor([0, tokens], device="cpu")
    return torch.cat([ends[:1], inner, ends[1:]]).to(like.device, torch.int32)


def _check_inputs(region: Region, autocast: torch.dtype | None) -> None:
    """Raises Unrecognised where random inputs would prove too little."""
    inside, layers, masks, packings = set(region.nodes), set(), set(), packings_in(region)
    for node in region.inputs:
        if node in packings:
            continue
        value, readers = value_of(node), {name_of(user) for user in node.users if user in inside}
        if isinstance(value, torch.SymInt) and not readers <= RESHAPES | SIZED | PLACES:
            raise Unrecognised("a length is one of the numbers that the region computes with")
        if not isinstance(value, (Tensor, int, torch.SymInt, torch.SymFloat)):
            raise Unrecognised(f"an input that is a {type(value).__name__}")
        if isinstance(value, Tensor):
            if value.dtype not in (torch.bool, torch.uint8) and not value.is_floating_point():
                raise Unrecognised(f"an input of {value.dtype}")
            masks |= {region.equal[node]} if value.dtype == torch.bool else set()
            layers |= {value.dtype} if readers & _LAYERS else set()
    if len(masks) > 1:
        raise Unrecognised("several masks, of which random ones show few combinations")
    precise = {torch.float32, torch.float64, tensor_of(region.source).dtype, autocast} | layers
    for node in region.nodes:
        if (value := tensor_of(node)) is not None and value.is_floating_point() and value.dtype not in precise:
            raise Unrecognised(f"a value is rounded to {value.dtype}")


def _error(theirs: Tensor, ours: Tensor, source: Tensor | None = None) -> float:
    """Returns the error relative to the output, or to output - source if that branch is smaller."""
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return float("inf")
    whole = theirs.norm()
    whole = whole if source is None or source.shape != theirs.shape else torch.minimum(whole, (theirs - source).norm())
    return ((theirs - ours).norm() / whole).item()


def _gradients(output: Tensor, values: dict[Node, Any], upstream: Tensor) -> list[Tensor | None]:
    """Returns the gradients of all inputs that require one, each tensor once; None for unused inputs."""
    leaves = list({id(v): v for v in values.values() if isinstance(v, Tensor) and v.requires_grad}.values())
    if not output.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(output, leaves, upstream, allow_unused=True))


def _gradient_error(theirs: list[Tensor | None], ours: list[Tensor | None]) -> float:
    """Returns the largest relative error of a gradient; both lists have None in the same places.

    The error of a gradient that is zero but for rounding, as that of k's bias, is relative to the largest gradient."""
    theirs, ours = ([g for g in gradients if g is not None] for gradients in (theirs, ours))
    least = 1e-6 * max((g.norm().item() for g in theirs), default=0.0)
    errors = [(a - b).norm().item() / max(a.norm().item(), least, 1e-300) for a, b in zip(theirs, ours)]
    return max(errors, default=0.0) if all(e == e for e in errors) else float("inf")


def _try_dtypes(region: Region, proposal: Proposal, values: dict[Node, Any], autocast: torch.dtype | None) -> None:
    """Runs the operation in the call's dtypes; raises Unrecognised if its output has another one."""
    real, device = {}, tensor_of(region.source).device
    for node, value in values.items():
        floating = isinstance(value, Tensor) and value.is_floating_point()
        real[node] = value.detach().to(tensor_of(node).dtype) if floating else value
    with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        dtype = _built(proposal, real, casts=frozenset()).dtype
    stream = proposal.kind.endswith("block") and choices.get().residual_in_fp32 is not None
    chosen = stream and dtype in (autocast, torch.float32)
    if dtype != (want := tensor_of(region.output).dtype) and not chosen:
        raise Unrecognised(f"the operation gives {dtype} where the model has {want}")
