"""Regions of a graph that torch.compile captured, and why one cannot be replaced by an operation.

A region is the set of FX nodes on the paths from one node, the source, to another, the output. Its inputs are the
source and the other nodes that it reads: parameters, tensors computed from these, factors of drop path, rotary tables.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .nodes import (
    ADDS,
    ANALYTIC,
    VALUE_FREE,
    changed_by,
    is_draw,
    name_of,
    shape_of,
    storage_of,
    switches_mode,
    tensor_of,
    values_read,
)

MOST_NODES = 300  # that a region may have; the largest encoder block met so far has 60


def why_not_plain(tensor: Tensor) -> str | None:
    """Returns why kernels cannot read a tensor's memory (meta, torch.func, a subclass); None if they can."""
    if tensor.device.type == "meta":
        return "it is on the device meta"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it is inside a transform of torch.func"
    return f"a tensor in it is a {type(tensor).__name__}" if is_traceable_wrapper_subclass(tensor) else None


class Region(NamedTuple):
    """The nodes between a source and an output; the output is one of them, the source is the first input."""

    nodes: list[Node]  # in the graph's order, the output last
    inputs: list[Node]
    equal: dict[Node, Node]  # maps each input to the first one that is computed by the same expression

    @property
    def source(self) -> Node:
        return self.inputs[0]

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    def read_by(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns the inputs, except the source, that these nodes of the region read, each once."""
        inside = {*self.nodes, self.source}
        return list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))


Call = Callable[..., Any]  # call(function, *arguments): computes now, or writes a node into a graph


class Proposal(NamedTuple):
    """An operation that may compute a region: build(call) calls it, with FX nodes as arguments."""

    kind: str
    build: Callable[[Call], Any]


Candidate = tuple[Region, Iterator[Proposal]]  # the operations are proven in this order, until one is equal


class Unrecognised(Exception):
    """Raised where no operation computes a region; its text is the reason that the report prints."""


class _Text(str):
    """A string whose repr is the string itself, without quotes."""

    __repr__ = str.__str__


class Positions:
    """The order of a graph's nodes, and what they change in place; out of date once the graph changes."""

    def __init__(self, graph: Graph):
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.changes = [(i, changed) for i, node in enumerate(self.nodes) if (changed := changed_by(node))]
        self.changed = {storage_of(node) for _, changed in self.changes for node in changed} - {None}

    def between(self, source: Node, output: Node) -> list[Node]:
        """Returns the nodes on the paths from source to output, without source.

        The list is empty if there is no path, or if it would have more than MOST_NODES nodes."""
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
        """Returns the region of these nodes, in the graph's order, and all that they read."""
        nodes = sorted(nodes, key=self.place.__getitem__)
        inside = set(nodes)
        inputs = {source: None} | {a: None for node in nodes for a in node.all_input_nodes if a not in inside}
        texts: dict[str, Node] = {}
        return Region(nodes, list(inputs), {node: texts.setdefault(self.expression(node), node) for node in inputs})

    def expression(self, node: Node, depth: int = 6) -> str:
        """Returns a text that two nodes share only if they compute the same tensor from the same nodes.

        It writes out the calls behind a node, `depth` levels up. A name stands for nodes further up, and for those that
        draw random numbers or have to do with changes in place."""
        name, tensor = name_of(node), tensor_of(node)
        pure = node.op == "call_method" or (node.op == "call_function" and "." not in name and "empty" not in name)
        changes = {storage_of(a) for a in (node, *node.all_input_nodes)} & self.changed
        if not pure or changes or is_draw(node) or changed_by(node) or not depth:
            return f"%{node.name}"
        arguments = map_arg((node.args, node.kwargs), lambda a: _Text(self.expression(a, depth - 1)))
        state = "" if tensor is None else (tensor.dtype, tensor.requires_grad)  # autocast and no_grad change these
        return f"{node.target}{arguments}{state}"

    def obstacle(self, region: Region) -> str | None:
        """Returns why no operation can replace a region, whatever the region computes; None if one can."""
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
        """Returns which change in place keeps the region from being computed at its output's place, or None."""
        reads: dict[int | None, int] = {}
        for node in region.nodes:
            for a in (*node.all_input_nodes, node):
                reads.setdefault(storage_of(a), self.place[node])
        reads.pop(None, None)
        input_storages = {storage_of(node) for node in region.inputs} - {None}
        first, last = self.place[region.nodes[0]], self.place[region.output]
        for place, changed in self.changes:
            storages = {storage_of(node) for node in changed}
            if place == last and storages & input_storages and (why := self._output_in_place(region, storages)):
                return why
            if not first <= place < last:
                continue
            if None in storages:
                return "a change in place of something unknown"
            if self.nodes[place] in inside:
                if storages & input_storages:
                    return "a change in place of what the block reads"
            elif any(s in reads and reads[s] < place for s in storages):
                return "a change in place of what the block has read"
        return None

    def _output_in_place(self, region: Region, storages: set[int | None]) -> str | None:
        """Returns why `x += branch` cannot become a new tensor, as others read the changed x; or None."""
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr") and storage_of(node) in storages:
                return "the residual is changed in place, and it is an input of the graph"
        last = self.place[region.output]
        for node in self.nodes[last + 1 :]:
            if any(storage_of(a) in storages and self.place[a] < last for a in node.all_input_nodes):
                return "the residual is changed in place, and used afterwards"
        return None


def additions(graph: Graph) -> list[Node]:
    """Returns the nodes that add two tensors of one shape: (B, N, D), (tokens, D) or (B, H, W, D)."""
    adds = []
    for node in graph.nodes:
        if name_of(node) in ADDS and len(node.all_input_nodes) == 2:
            shape, *others = map(shape_of, (node, *node.all_input_nodes))
            if shape is not None and len(shape) in (2, 3, 4) and others == [shape, shape]:
                adds.append(node)
    return adds
