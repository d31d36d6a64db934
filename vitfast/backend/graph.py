"""Reads a graph that torch.compile captured: values, changes in place, draws, and regions.

A region is what lies on the paths from one tensor, the source, to another, the output. What the region reads besides
(parameters, and whatever is computed from them, factors of drop path, rotary tables) are its inputs.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import ops

MOST_NODES = 300  # of a region; the longest encoder block seen has 60

# Operations that read the shape, dtype or device of their first argument, and none of its numbers.
_VALUE_FREE = "size dim numel stride getattr new_empty new_zeros new_ones new_full empty_like zeros_like ones_like"
VALUE_FREE = frozenset(_VALUE_FREE.split())
# Functions that move numbers, and those that change their dtype alone.
_REARRANGEMENTS = """
permute transpose t mT T swapaxes swapdims movedim reshape view _unsafe_view view_as reshape_as flatten unflatten
squeeze unsqueeze expand expand_as repeat unfold contiguous clone
"""
REARRANGEMENTS = frozenset(_REARRANGEMENTS.split())
CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16"})
# Functions that are rearrangements, or analytic in their tensors: equal for random numbers, they are equal for all. A
# clamp, a comparison or a nan_to_num acts where random numbers may not come.
_ANALYTIC = """
linear addmm matmul bmm mm einsum baddbmm scaled_dot_product_attention multi_head_attention_forward layer_norm
rms_norm gelu silu sigmoid tanh erf exp pow sqrt rsqrt square reciprocal softmax _softmax mean var sum amax dropout
where masked_fill masked_fill_ conv2d add iadd add_ sub isub sub_ subtract rsub mul imul mul_ multiply multiply_ div
div_ truediv itruediv true_divide divide neg negative getitem cat stack split chunk unbind tensor_split select narrow
index_select vitfast.backend.arguments.attend
"""
ANALYTIC = frozenset(_ANALYTIC.split()) | REARRANGEMENTS | CASTS
# Functions whose result has a layout in memory of its own, or none.
_LAYS_OUT = frozenset("linear addmm matmul bmm mm einsum layer_norm softmax size dim numel new_zeros new_ones".split())
# Functions that take any layout, and hand it on as PyTorch's fake tensors say. A convolution does not; nor does a norm
# of groups, and what changes a tensor in place reaches other ones if a reshape is a view in one layout alone.
_ANY_LAYOUT = {name for name in ANALYTIC if not name.endswith("_")}
_ANY_LAYOUT -= set("view _unsafe_view view_as conv2d iadd isub imul itruediv".split())
_DRAWS = """
bernoulli bernoulli_ rand randn randint randperm rand_like randn_like randint_like normal normal_ uniform_ exponential_
multinomial geometric_ cauchy_ log_normal_ native_dropout poisson binomial rrelu
"""
DRAWS = frozenset(_DRAWS.split())
_INPLACE = "iadd isub imul itruediv ifloordiv imatmul ipow imod iand ior ixor ilshift irshift setitem"
INPLACE = frozenset(_INPLACE.split())
# Calls without a value that switch no mode: checks, statistics, the choice among PyTorch's own attention kernels.
_CHECKS = ("_assert", "_check", "sym_constrain", "_log_api", "_sdpa_kernel", "_backend_from_string")


def name_of(node: Node) -> str:
    """The name of what a node calls, with its module where that is none of PyTorch's."""
    if node.op != "call_function":
        return node.target if node.op == "call_method" else node.op
    name, module = getattr(node.target, "__name__", str(node.target)), getattr(node.target, "__module__", None) or ""
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        module = "torch" if str(node.target).startswith("aten.") else str(node.target)
    root, _, rest = module.partition(".")
    known = root in ("", "torch", "_operator", "builtins") and not rest.startswith("_dynamo")
    return name if known else f"{module}.{name}"  # Dynamo's own functions call NumPy's and the user's


def argument(node: Node, place: int, name: str, default=None):
    """An argument of a node by its place or its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def value_of(node: Node):
    """The fake value that a node had when the graph was captured; None where it is not known."""
    return node.meta.get("example_value", node.meta.get("val"))


def values_read(node: Node) -> list[Node]:
    """The nodes whose values a node reads; of a second tensor view_as reads the shape, type_as the dtype."""
    return node.all_input_nodes[: 1 if name_of(node).endswith("_as") else None]


def tensor_of(node) -> Tensor | None:
    """The fake tensor of a node; None for what is no node or no tensor."""
    value = value_of(node) if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def size(length) -> int:
    """A length as a number, without a guard on a symbol: -1 where nothing is known of it."""
    if isinstance(length, int):
        return length
    hint = getattr(length.node, "hint", None)
    return -1 if hint is None else int(hint)


def shape_of(node) -> tuple[int, ...] | None:
    """The shape of a node's tensor, symbols replaced by the sizes of this call."""
    tensor = tensor_of(node)
    return None if tensor is None else tuple(map(size, tensor.shape))


def storage_of(node) -> int | None:
    """The identity of the memory of a node's tensor, which views share with their base."""
    tensor = tensor_of(node)
    try:
        return None if tensor is None else tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse tensors have no storage
        return None


def is_draw(node: Node) -> bool:
    """Whether a node takes random numbers: dropout of rate 0 or out of training does not."""
    name = name_of(node)
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) != 0
    if name == "multi_head_attention_forward":
        return argument(node, 10, "dropout_p", 0.0) != 0 and argument(node, 13, "training", True) is not False
    if "dropout" in name and name != "native_dropout":
        training = argument(node, 2, "training", node.kwargs.get("train", True))
        return argument(node, 1, "p", 0.5) != 0 and training is not False
    return name in DRAWS or name.endswith(".bernoulli_")  # that of eager.py


def is_unchanged(node: Node) -> bool:
    """Whether a node gives back its argument: a cast to what it is already, dropout that drops nothing."""
    name, own, given = name_of(node), tensor_of(node), tensor_of(node.args[0]) if node.args else None
    if own is None or given is None or len(node.all_input_nodes) != 1:
        return False
    same = (own.dtype, own.device, shape_of(node)) == (given.dtype, given.device, shape_of(node.args[0]))
    return same and (name in CASTS | {"contiguous", "clone"} or ("dropout" in name and not is_draw(node)))


def is_layout_seen(node: Node) -> bool:
    """Whether another layout in memory may matter: to a view, random numbers, functions or the caller."""
    stack, seen = [node], set()
    while stack:
        given = stack.pop()
        for user in given.users:
            name = name_of(user)
            if user in seen or given not in values_read(user) or name in _LAYS_OUT or name.startswith("vitfast."):
                continue
            if is_draw(user) or name not in _ANY_LAYOUT:
                return True
            seen.add(user)
            stack.append(user)
    return False


def _takes_inplace(node: Node) -> bool:
    """Whether a function with an argument `inplace` got True for it."""
    if node.op != "call_function" or not inspect.isfunction(node.target):
        return False
    try:
        signature = inspect.signature(node.target)
        if "inplace" not in signature.parameters:
            return False
        return bool(signature.bind(*node.args, **node.kwargs).arguments.get("inplace", False))
    except (TypeError, ValueError):
        return True


def changed_by(node: Node) -> list[Node]:
    """The nodes whose tensors a node changes in place."""
    name, found = name_of(node), []
    if node.op not in ("call_function", "call_method"):
        return []
    if _may_change_all(node, name):
        return node.all_input_nodes
    map_arg(node.kwargs.get("out"), found.append)
    ends = name.endswith("_") and not name.endswith("__") and name not in ("and_", "or_", "not_")  # of operator
    if name.strip("_") in INPLACE or ends or _takes_inplace(node):
        map_arg(node.args[:1], found.append)
    return found


def _may_change_all(node: Node, name: str) -> bool:
    """Whether a node may change any input: running statistics, custom operations, unknown functions."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, overload)._schema.is_mutable for overload in node.target.overloads())
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.op == "call_function" and "." in name and not name.startswith("vitfast."):
        return True
    renorm = name in ("embedding", "embedding_bag") and argument(node, 3, "max_norm") is not None
    return renorm or "batch_norm" in name or "instance_norm" in name


def switches_mode(node: Node) -> bool:
    """Whether a node changes how those after it run: it is a call without a value that takes no tensor.

    Gradient, inference and autocast mode, streams and the transforms of torch.func are switched so.
    """
    if node.op != "call_function" or value_of(node) is not None or name_of(node).startswith(_CHECKS):
        return False
    return all(tensor_of(a) is None for a in node.all_input_nodes)


def why_not_plain(tensor: Tensor) -> str | None:
    """Why kernels cannot read this tensor, whose values are elsewhere or nowhere; None for most."""
    if tensor.device.type == "meta":
        return "it is on the device meta"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it is inside a transform of torch.func"
    return f"a tensor in it is a {type(tensor).__name__}" if is_traceable_wrapper_subclass(tensor) else None


class Region(NamedTuple):
    """The nodes from a source (left out) to an output; the source comes first among the inputs."""

    nodes: list[Node]  # in the graph's order, the output last
    inputs: list[Node]
    equal: dict[Node, Node]  # of an input, the first one that is computed in the same way from the same nodes

    @property
    def source(self) -> Node:
        return self.inputs[0]

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    def read_by(self, nodes: Iterable[Node]) -> list[Node]:
        """The inputs that these nodes read, without the source, once each."""
        inside = {*self.nodes, self.source}
        return list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))


Call = Callable[..., Any]  # call(function, *arguments): computes now, or writes a node into a graph


class Proposal(NamedTuple):
    """An operation that may compute a region: build(call) calls it, with nodes as arguments."""

    kind: str
    build: Callable[[Call], Any]


class Unrecognised(Exception):
    """Why a region is no block that an operation computes."""


class _Text(str):
    """A text that prints as it is."""

    __repr__ = str.__str__


class Positions:
    """A graph with the places of its nodes, for as long as it is not changed."""

    def __init__(self, graph: Graph):
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.changes = [(i, changed) for i, node in enumerate(self.nodes) if (changed := changed_by(node))]
        self.changed = {storage_of(node) for _, changed in self.changes for node in changed} - {None}

    def between(self, source: Node, output: Node) -> list[Node]:
        """The nodes on the paths from source, left out, to output.

        An empty list where there is no path, or where there are more than MOST_NODES."""
        dependent = {source}
        for node in self.nodes[self.place[source] + 1 : self.place[output] + 1]:
            if name_of(node) not in VALUE_FREE and not dependent.isdisjoint(values_read(node)):
                dependent.add(node)
        inside, stack = set(), [output]
        while stack:
            node = stack.pop()
            if node not in inside and node is not source and node in dependent:
                inside.add(node)
                stack += values_read(node)
        return [] if len(inside) > MOST_NODES else sorted(inside, key=self.place.__getitem__)

    def around(self, nodes: Iterable[Node], source: Node) -> Region:
        """The region of these nodes."""
        nodes = sorted(nodes, key=self.place.__getitem__)
        inside = set(nodes)
        inputs = {source: None} | {a: None for node in nodes for a in node.all_input_nodes if a not in inside}
        texts: dict[str, Node] = {}
        return Region(nodes, list(inputs), {node: texts.setdefault(self.expression(node), node) for node in inputs})

    def expression(self, node: Node, depth: int = 6) -> str:
        """Equal for nodes that compute the same: their own name where that is not certain, or far away."""
        name, tensor = name_of(node), tensor_of(node)
        pure = node.op == "call_method" or (node.op == "call_function" and "." not in name and "empty" not in name)
        changes = {storage_of(a) for a in (node, *node.all_input_nodes)} & self.changed
        if not pure or changes or is_draw(node) or changed_by(node) or not depth:
            return f"%{node.name}"
        arguments = map_arg((node.args, node.kwargs), lambda a: _Text(self.expression(a, depth - 1)))
        state = "" if tensor is None else (tensor.dtype, tensor.requires_grad)  # autocast and no_grad change these
        return f"{node.target}{arguments}{state}"

    def obstacle(self, region: Region) -> str | None:
        """Why a region cannot be one operation, whatever it computes; None where it can."""
        inside, output = set(region.nodes), region.output
        for node in (*region.inputs, *region.nodes):
            if (tensor := tensor_of(node)) is not None and (why := why_not_plain(tensor)) is not None:
                return why
        for node in region.nodes:
            if is_draw(node):
                return "dropout" if "dropout" in name_of(node) or "attention" in name_of(node) else "random numbers"
            if name_of(node) not in ANALYTIC | VALUE_FREE:
                return f"{name_of(node)} is in none of the operations"
            outside = [u for u in node.users if u not in inside and name_of(u) not in VALUE_FREE]
            if node is not output and outside:
                return f"an inner value ({name_of(node)}) is used elsewhere"
        first, last = self.place[region.nodes[0]], self.place[output]
        if modes := [name_of(node) for node in self.nodes[first : last + 1] if switches_mode(node)]:
            return f"a mode of PyTorch changes inside ({modes[0].strip('_')})"
        return self._change_in_place(region, inside)

    def _change_in_place(self, region: Region, inside: set[Node]) -> str | None:
        reads: dict[int | None, int] = {}
        for node in region.nodes:
            for a in (*node.all_input_nodes, node):
                reads.setdefault(storage_of(a), self.place[node])
        reads.pop(None, None)
        given = {storage_of(node) for node in region.inputs} - {None}
        first, last = self.place[region.nodes[0]], self.place[region.output]
        for place, changed in self.changes:
            storages = {storage_of(node) for node in changed}
            if place == last and storages & given and (why := self._output_in_place(region, storages)):
                return why
            if not first <= place < last:
                continue
            if None in storages:
                return "a change in place of something unknown"
            if self.nodes[place] in inside:
                if storages & given:
                    return "a change in place of what the block reads"
            elif any(s in reads and reads[s] < place for s in storages):
                return "a change in place of what the block has read"
        return None

    def _output_in_place(self, region: Region, storages: set[int | None]) -> str | None:
        """Why `x += branch` cannot be a new tensor: others see the changed x."""
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr") and storage_of(node) in storages:
                return "the residual is changed in place, and it is an input of the graph"
        last = self.place[region.output]
        for node in self.nodes[last + 1 :]:
            if any(storage_of(a) in storages and self.place[a] < last for a in node.all_input_nodes):
                return "the residual is changed in place, and used afterwards"
        return None


def additions(graph: Graph) -> list[Node]:
    """The nodes that add two tensors of one shape: (B, N, D), (tokens, D) or (B, H, W, D)."""
    found = []
    for node in graph.nodes:
        if name_of(node) in ADDS and len(node.all_input_nodes) == 2:
            shapes = [shape_of(a) for a in node.all_input_nodes] + [shape_of(node)]
            if shapes[0] is not None and len(shapes[0]) in (2, 3, 4) and shapes[0] == shapes[1] == shapes[2]:
                found.append(node)
    return found


def is_number(value) -> bool:
    """A Python number that no truth value is."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


ADDS = frozenset({"add", "add_", "iadd"})
MULTIPLIES = frozenset({"mul", "mul_", "imul", "multiply", "multiply_"})
DIVIDES = frozenset({"div", "div_", "truediv", "itruediv", "true_divide", "divide"})
PRODUCTS = frozenset({"matmul", "bmm", "einsum", "mm", "baddbmm"})


def constant_factor(nodes: list[Node]) -> float:
    """The product of the Python numbers that these nodes multiply by."""
    factor = 1.0
    for node in nodes:
        numbers = [a for a in (*node.args, *node.kwargs.values()) if is_number(a)]
        if len(numbers) == 1 and len(node.all_input_nodes) == 1:
            if name_of(node) in MULTIPLIES:
                factor = factor * numbers[0]
            elif name_of(node) in DIVIDES and not is_number(node.args[0]) and numbers[0] != 0:
                factor = factor / numbers[0]
    return factor


def module_of(node: Node) -> str:
    """The path of the module whose forward a node was captured in; empty where it is not known."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path).replace("_modules['", "").replace("']", "")


_IN_OPERATIONS = re.compile(rf'File "{re.escape(str(Path(ops.__file__).parent))}[^"]*", line \d+, in (\w+)')


def operation_of(node: Node) -> str | None:
    """The operation of vitfast whose call a node was captured in, None for other code."""
    return next((name for name in _IN_OPERATIONS.findall(node.stack_trace or "") if name in ops.__all__), None)
