"""Replaces the encoder blocks of a graph by operations: each is found, proven, then written."""

import logging
import time

import torch
from torch.fx import Graph, GraphModule, Node

from .attention import attention_alone
from .graph import (
    VALUE_FREE,
    Positions,
    Region,
    additions,
    autocast_dtypes,
    module_of,
    name_of,
    shape_of,
    tensor_of,
)
from .parts import NoAttention, Proposal, Unrecognised, parts_of
from .proof import Proof, Unprovable, prove
from .recognise import proposals
from .reports import Entry, Report, joined

_log = logging.getLogger("vitfast")


def rewrite_graph(module: GraphModule) -> Report:
    """Rewrites a captured graph in place, with the graphs inside it (of activation checkpointing)."""
    inner = [rewrite_graph(child) for child in module.children() if isinstance(child, GraphModule)]
    rewriter = _Rewriter(module.graph)
    start = time.perf_counter()
    report = Report(rewriter.run())
    report.proof = rewriter.proof_seconds
    report.recognition = time.perf_counter() - start - report.proof
    if report.replaced:
        module.graph.lint()
        module.recompile()
    return joined([*inner, report])


class _Rewriter:
    """One graph while it is rewritten."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.positions = Positions(graph)
        self.proof_seconds = 0.0
        self.autocast: dict[str, dict] = {}

    def run(self) -> list[Entry]:
        """Blocks first, then attention in what is left."""
        entries = []
        for node in additions(self.graph):
            entries += self._guarded(self._block, node)
        for node in list(self.graph.nodes):
            if name_of(node) in ("scaled_dot_product_attention", "softmax"):
                entries += self._guarded(self._attention, node)
        return entries

    def _guarded(self, replace, node: Node) -> list[Entry]:
        """An error leaves this part as it was."""
        try:
            return replace(node)
        except Exception as error:
            _log.warning("vitfast backend: %s is left, an error in recognition", node.name, exc_info=True)
            return [Entry("block", module_of(node), f"{type(error).__name__}: {error}")]

    def _block(self, add: Node) -> list[Entry]:
        """The entry of an addition that ends a block, none of one that is no candidate."""
        for source, branch in (add.all_input_nodes, add.all_input_nodes[::-1]):
            region = self.positions.region(source, branch, add)
            if region is None:
                continue
            parts = parts_of(region)
            if not parts.attentions and len(parts.linears) < 2:
                continue
            kind, name = (
                ("attention block" if parts.attentions else "MLP block"),
                module_of(parts.norms[0] if parts.norms else add),
            )
            why = self.positions.obstacle(region)
            if why is None:
                dtype = self._autocast(region)
                found, why = self._proven(region, proposals(region), dtype)
                if found is not None:
                    self._write(region, found)
                    kind = found.kind
            return [Entry(kind, name, why)]
        return []

    def _attention(self, node: Node) -> list[Entry]:
        if node not in self.positions.place:  # it went with a block
            return []
        try:
            nodes, source, proposal = attention_alone(node)
        except NoAttention:
            return []
        except Unrecognised as reason:
            return [Entry("attention", module_of(node), str(reason))]
        region = self.positions.around(nodes, source)
        if (why := self.positions.obstacle(region)) is not None:
            return [Entry("attention", module_of(node), why)]
        found, why = self._proven(region, iter([proposal]), self._autocast(region))
        if found is not None:
            self._write(region, found)
        return [Entry("attention", module_of(node), why)]

    def _autocast(self, region: Region) -> torch.dtype | None:
        device = tensor_of(region.source).device.type
        if device not in self.autocast:
            self.autocast[device] = autocast_dtypes(self.graph, device)
        return self.autocast[device].get(region.output)

    def _proven(self, region: Region, found, dtype) -> tuple[Proposal | None, str | None]:
        """(a proposal, None) or (None, why there is none)."""
        start = time.perf_counter()
        try:
            proposal, proof = prove(region, found, dtype)
        except (Unrecognised, Unprovable) as reason:
            return None, str(reason)
        finally:
            self.proof_seconds += time.perf_counter() - start
        return proposal, None if proposal is not None else _why(proof)

    def _write(self, region: Region, proposal: Proposal) -> None:
        """Writes an operation in front of the region's output, which it replaces; the region goes."""
        written, output = [], region.output

        def call(function, *arguments, **keywords):
            written.append(self.graph.call_function(function, arguments, keywords))
            return written[-1]

        try:
            with self.graph.inserting_before(output):
                new = proposal.build(call)
                swaps = self._value_free_users(region)
        except Exception:
            for node in reversed(written):
                self.graph.erase_node(node)
            raise
        new.meta = dict(output.meta)
        for dtype_of_node in self.autocast.values():
            dtype_of_node[new] = dtype_of_node.get(output)
        output.replace_all_uses_with(new)
        for user, keywords in swaps:
            user.args, user.kwargs = (region.source, *user.args[1:]), keywords
        for node in reversed(region.nodes):
            if not node.users:
                self.graph.erase_node(node)
        self.positions = Positions(self.graph)

    def _value_free_users(self, region: Region) -> list[tuple[Node, dict]]:
        """Nodes outside that read an inner tensor's dtype or shape, with their keyword arguments.

        They can read the source's as well."""
        inside, source, found = set(region.nodes), tensor_of(region.source), []
        for node in region.nodes[:-1]:
            for user in node.users:
                name, own = name_of(user), tensor_of(node)
                if user in inside or name not in VALUE_FREE or own is None or user.args[:1] != (node,):
                    continue
                if name.startswith("new_"):
                    found.append((user, {"dtype": own.dtype, **user.kwargs}))
                elif name.endswith("_like") and shape_of(node) == shape_of(region.source) and own.dtype == source.dtype:
                    found.append((user, user.kwargs))
        return found


def _why(proof: Proof) -> str:
    return f"not the same numbers as any operation (the nearest differs by {proof.error:.0e})"
