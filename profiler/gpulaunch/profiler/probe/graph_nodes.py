"""Names the nodes of a graph of torch.autograd, and finds those above each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Graph = Mapping[Any, Sequence[Any]]
"""The nodes below each node."""


def name_of(node: Any) -> str:
    """Of an operation: `MulBackward0`."""
    name: Any = getattr(node, "name", None)
    return str(name()) if callable(name) else ""


def nodes_above(graph: Graph) -> dict[Any, list[Any]]:
    """Return the nodes above each node that has some."""
    above: dict[Any, list[Any]] = {}
    for node, below in graph.items():
        for each in below:
            above.setdefault(each, []).append(node)
    return above
