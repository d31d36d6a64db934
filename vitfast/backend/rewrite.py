"""Replaces regions of a graph by operations: each found by structure, proven by numbers, written.

Structure only proposes: from the graph it reads the anchors (norm, linear layers, attention or softmax) and their
arguments. It does not look at the views, transposes and products in between, as numbers decide (proof.py).
"""

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from .arguments import laid_out
from .attention import attention_alone, attention_blocks
from .embedding import patch_embeddings
from .graph import Candidate, Positions, Proposal, Region, Unrecognised, additions
from .lengths import packing_of
from .mlp import mlp_alone, mlp_blocks
from .nodes import VALUE_FREE, argument, is_unchanged, layout_matters, module_of, name_of, operation_of, size, tensor_of
from .packed import join_pieces, pieces_of, prove_pieces
from .parts import norm_alone, parts_of
from .proof import prove
from .reports import ALREADY, Entry, Report, joined
from .spelling import standardise

_log = logging.getLogger("vitfast")


def ambient_autocast(device: str) -> torch.dtype | None:
    """Returns the dtype of autocast that is active now, or None."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_dtypes(
    graph: Graph, device: str, ambient: Callable[[str], torch.dtype | None]
) -> dict[Node, torch.dtype | None]:
    """Returns autocast's dtype (None: off) at each node: that around the graph, or what the graph enters."""
    active, dtypes, around = {}, {}, ambient(device)
    for node in graph.nodes:
        if name_of(node) == "_enter_autocast" and argument(node, 0, "device_type") == device:
            enabled = argument(node, 2, "enabled", True)
            dtype = argument(node, 1, "dtype") or torch.get_autocast_dtype(device)
            active[node] = dtype if enabled else None
        elif name_of(node) == "_exit_autocast":
            active.pop(node.args[0], None)
        dtypes[node] = list(active.values())[-1] if active else around
    return dtypes


def rewrite_graph(module: GraphModule, ambient: Callable[[str], torch.dtype | None] = ambient_autocast) -> Report:
    """Rewrites a captured graph in place, and the graphs inside it, which activation checkpointing runs.

    ambient(device type): the dtype of autocast around the graph.
    """
    autocast = functools.cache(lambda device: autocast_dtypes(module.graph, device, ambient))
    calls = {node.target: user for node in module.graph.nodes if node.op == "get_attr" for user in node.users}
    inner = [
        rewrite_graph(child, lambda device, name=name: autocast(device).get(calls.get(name), ambient(device)))
        for name, child in module.named_children()
        if isinstance(child, GraphModule)
    ]
    start = time.perf_counter()
    standardise(module.graph, autocast)
    rewriter = _Rewriter(module.graph, autocast)
    report = Report(rewriter.run())
    report.proof = rewriter.proof_seconds
    report.recognition = time.perf_counter() - start - report.proof
    module.graph.lint()
    module.recompile()
    return joined([*inner, report])


class _Rewriter:
    """The state of one graph's rewriting; `run` finds, proves and replaces regions."""

    def __init__(self, graph: Graph, autocast: Callable[[str], dict[Node, torch.dtype | None]]):
        self.graph, self.autocast = graph, autocast
        self.positions = Positions(graph)
        self.packings: dict[tuple, tuple[Node, Node]] = {}  # nodes of the samples' lengths -> offsets and longest
        self.proof_seconds = 0.0
        self.written: list[Node] = []  # the nodes that took the place of regions' outputs
        self.ours = {node: name for node in graph.nodes if (name := operation_of(node)) is not None}

    def run(self) -> list[Entry]:
        """Replaces blocks first, then parts outside of replaced blocks; returns the report's entries."""
        calls = itertools.groupby((name, module_of(node)) for node, name in self.ours.items())
        entries = [Entry(name.replace("_", " ").replace("mlp", "MLP"), module, ALREADY) for (name, module), _ in calls]
        for node in [node for node in self.graph.nodes if name_of(node) == "cat"]:
            entries += self._guarded(self._pieces, node, "attention")
        for node in additions(self.graph):
            if node not in self.ours:
                entries += self._guarded(self._block, node)
        alone = [(functools.partial(self._alone, propose), "") for propose in (mlp_alone, norm_alone)]
        for replace, kind in ((self._patch_embedding, ""), (self._attention, "attention"), *alone):
            for node in list(self.graph.nodes):
                if node in self.positions.place and node not in self.ours:  # else it was part of a replaced region
                    entries += self._guarded(replace, node, kind)
        for node in filter(layout_matters, self.written):
            self._restore_layout(node)
        return entries

    def _guarded(self, replace, node: Node, kind: str = "") -> list[Entry]:
        """Returns the entries of replace(node); an error in it leaves the part as it was, and gives an entry.

        Where no operation computes the part, it returns an entry of this kind, or none if the kind is empty."""
        try:
            return replace(node)
        except Unrecognised as reason:
            return [Entry(kind, module_of(node), str(reason))] if kind else []
        except Exception as error:
            _log.warning("vitfast backend: %s is left, an error in recognition", node.name, exc_info=True)
            return [Entry("block", module_of(node), f"{type(error).__name__}: {error}")]

    def _pieces(self, cat: Node) -> list[Entry]:
        """Joins the pieces of an attention of packed samples in one call, which a block may then include."""
        start = time.perf_counter()
        try:
            if (pieces := pieces_of(cat, self.positions)) is not None:
                join_pieces(self.graph, pieces, prove_pieces(pieces), self.packings)
                self.positions = Positions(self.graph)
        finally:
            self.proof_seconds += time.perf_counter() - start
        return []

    def _block(self, add: Node) -> list[Entry]:
        """Replaces the block that ends in a residual addition; returns no entry if no block can end there."""
        for residual, branch in (add.all_input_nodes, add.all_input_nodes[::-1]):
            source, unchanged = residual, []
            while not (nodes := self.positions.between(source, branch)) and is_unchanged(source):
                unchanged, source = [*unchanged, source], source.args[0]
            if not nodes:
                continue
            region = self.positions.around([*nodes, *unchanged, add], source)
            parts = parts_of(region)
            if not parts.attentions and len(parts.linears) < 2:
                continue
            inside = {self.ours[node] for node in region.nodes if node in self.ours}
            kind = "attention block" if parts.attentions or "attention" in inside else "MLP block"
            name = module_of(parts.norms[0] if parts.norms else add)
            proposals = attention_blocks(parts) if parts.attentions else mlp_blocks(parts)
            return [self._replace(region, proposals, kind, name)]
        return []

    def _patch_embedding(self, node: Node) -> list[Entry]:
        left = []
        for candidate in patch_embeddings(self.positions, node):
            entry = self._replace(*candidate, "patch embedding", module_of(node))
            if entry.why is None:
                return [entry]
            left = [entry]
        return left if name_of(node) == "conv2d" else []

    def _attention(self, node: Node) -> list[Entry]:
        if packing_of(node):
            return [Entry("attention", module_of(node), None)]
        if name_of(node) not in ("scaled_dot_product_attention", "softmax"):
            return []
        candidate = attention_alone(self.positions, node)
        return [] if candidate is None else [self._replace(*candidate, "attention", module_of(node))]

    def _alone(self, propose: Callable[[Positions, Node], Candidate | None], node: Node) -> list[Entry]:
        """Replaces an MLP or a norm outside of blocks; the report has an entry only if it is replaced."""
        candidate = propose(self.positions, node)
        entry = None if candidate is None else self._replace(*candidate, "", module_of(node))
        return [entry] if entry is not None and entry.why is None else []

    def _replace(self, region: Region, proposals: Iterator[Proposal], kind: str, name: str) -> Entry:
        """Replaces a region by the first proposal that is proven; returns the report's entry on it.

        kind: the entry's if no proposal is proven. name: of the module that the region was captured in."""
        inside = {self.ours[node] for node in region.nodes if node in self.ours}
        why = f"{min(inside)} in it is vitfast's already" if inside else self.positions.obstacle(region)
        if why is not None:
            return Entry(kind, name, why)
        dtypes, start = self.autocast(tensor_of(region.source).device.type), time.perf_counter()
        try:
            proposal, proof = prove(region, proposals, dtypes.get(region.output))
        except Unrecognised as reason:
            return Entry(kind, name, str(reason))
        finally:
            self.proof_seconds += time.perf_counter() - start
        if proposal is None:
            nearest = f"not the same numbers as any operation (the nearest differs by {proof.error:.0e})"
            return Entry(kind, name, nearest)
        self._write(region, proposal)
        return Entry(proposal.kind, name, None)

    def _write(self, region: Region, proposal: Proposal) -> None:
        """Writes a proposal's calls in front of the region's output, and erases the region they replace."""
        written, inside, output = [], set(region.nodes), region.output

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
        dtypes = self.autocast(tensor_of(region.source).device.type)
        dtypes[new] = dtypes.get(output)
        output.replace_all_uses_with(new)
        self.written.append(new)
        for user, keywords in swaps:
            user.args, user.kwargs = (region.source, *user.args[1:]), keywords
        for node in reversed(self.positions.nodes[: self.positions.place[output] + 1]):
            # Outside of the region, only reads of its nodes' sizes have become unused.
            if not node.users and (node in inside or name_of(node) in VALUE_FREE | {"getitem"}):
                self.graph.erase_node(node)
        self.positions = Positions(self.graph)

    def _restore_layout(self, node: Node) -> None:
        """Gives an output, which operations write contiguous, the memory layout that it was captured with."""
        strides = list(map(size, tensor_of(node).stride()))
        with self.graph.inserting_after(node):
            axes = sorted(range(len(strides)), key=lambda axis: -strides[axis])
            new = self.graph.call_function(laid_out, (node, axes))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def _value_free_users(self, region: Region) -> list[tuple[Node, dict]]:
        """Returns the nodes outside that read only an inner tensor's dtype or shape, with keyword arguments.

        With these keyword arguments they read the same off the source, so that the inner tensor can go."""
        inside, source, swaps = set(region.nodes), tensor_of(region.source), []
        like = [source.shape, source.stride(), source.dtype]
        for node in region.nodes[:-1]:
            for user in node.users:
                name, inner = name_of(user), tensor_of(node)
                if user in inside or name not in VALUE_FREE or inner is None or user.args[:1] != (node,):
                    continue
                if name.startswith("new_"):
                    swaps.append((user, {"dtype": inner.dtype, **user.kwargs}))
                elif name.endswith("_like") and [inner.shape, inner.stride(), inner.dtype] == like:
                    swaps.append((user, user.kwargs))
        return swaps
