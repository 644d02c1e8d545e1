"""Finds in the graph of a backward pass how many rows of scores a model computes, and of how many its loss is computed.

A head that gives scores for each word of a vocabulary is often most of a small model. The loss of a masked language
model needs them only where a word was masked: it ignores the other rows, or the program leaves them out after the head.
Only the sizes that the nodes keep are read: to unpack what they have saved would run code of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_LOSS: Final = "NllLossBackward0"
_LOG_SOFTMAX: Final = "LogSoftmaxBackward0"
_PRODUCTS: Final = frozenset({"AddmmBackward0", "MmBackward0"})
_BETWEEN: Final = frozenset(
    {
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0"),
        *("TransposeBackward0", "PermuteBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "ToCopyBackward0"),
        *("IndexBackward0", "IndexSelectBackward0", "SelectBackward0", "SliceBackward0"),
        *("DivBackward0", "MulBackward0", "TanhBackward0"),
    }
)
"""What may be between the loss and the head: another form of the rows, a choice of them, and the same for each."""
_MOST_BETWEEN: Final = 8


@dataclass(frozen=True, slots=True)
class Scores:
    """What the head of a model computes for a cross-entropy."""

    rows: int
    loss_rows: int
    """Those of them that the loss is given."""
    classes: int
    products: int
    """Of the elements of the rows that go into the head with its weights."""


def scores_of(graph: Mapping[Any, Sequence[Any]]) -> Scores | None:
    """Return those of the cross-entropy whose head computes most; None: there is none.

    Args:
        graph: its nodes, and those below each.
    """
    losses = (each for node, below in graph.items() if _name(node) == _LOSS for each in below)
    found = [scores for node in losses if _name(node) == _LOG_SOFTMAX and (scores := _scores_below(node, graph))]
    return max(found, key=lambda each: each.products, default=None)


def _scores_below(log_softmax: Any, graph: Mapping[Any, Sequence[Any]]) -> Scores | None:
    loss_rows, classes = log_softmax._input_metadata[0].shape
    node = log_softmax
    for _ in range(_MOST_BETWEEN):
        below = graph.get(node, ())
        if len(below) != 1 or (node is not log_softmax and _name(node) not in _BETWEEN):
            return None
        node = below[0]
        if _name(node) in _PRODUCTS:
            rows, width = node._input_metadata[0].shape
            is_head = width == classes and rows >= loss_rows
            products = int(rows) * int(classes) * int(node._saved_mat2_sym_sizes[0])
            return Scores(int(rows), int(loss_rows), int(classes), products) if is_head else None
    return None


def _name(node: Any) -> str:
    name: Any = getattr(node, "name", None)
    return str(name()) if callable(name) else ""
