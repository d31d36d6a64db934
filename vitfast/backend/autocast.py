"""The dtype of autocast at each node of a graph."""

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from .graph import argument, name_of


def ambient_autocast(device: str) -> torch.dtype | None:
    """The dtype of autocast now, None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def autocast_dtypes(
    graph: Graph, device: str, ambient: Callable[[str], torch.dtype | None]
) -> dict[Node, torch.dtype | None]:
    """The dtype of autocast at each node: as it is around the graph, and as the graph switches it."""
    active, found, around = {}, {}, ambient(device)
    for node in graph.nodes:
        if name_of(node) == "_enter_autocast" and argument(node, 0, "device_type") == device:
            enabled = argument(node, 2, "enabled", True)
            dtype = argument(node, 1, "dtype") or torch.get_autocast_dtype(device)
            active[node] = dtype if enabled else None
        elif name_of(node) == "_exit_autocast":
            active.pop(node.args[0], None)
        found[node] = list(active.values())[-1] if active else around
    return found
