"""Regions of a graph that torch.compile captured, and why one cannot be replaced by an operation.

A region is what lies on the paths from one tensor, the source, to another, the output. What the region reads besides
(parameters, and whatever is computed from them, factors of drop path, rotary tables) are its inputs.
"""

from collections.abc import Callable, Iterable
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

MOST_NODES = 300  # of a region; the longest encoder block seen has 60


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
