"""Finds in the graph of a backward pass how many rows of scores a model computes, and of how many its loss is computed.

A head that gives scores for each word of a vocabulary is often most of a small model. The loss of a masked language
model needs them only where a word was masked: it ignores the other rows, or the program leaves them out after the head.
Nothing is found where anything else in the graph uses the scores, or where several heads have such a loss. Only sizes
and numbers that the nodes keep are read: to unpack tensors that they have saved would run code of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from gpulaunch.profiler.probe.graph_nodes import Graph, name_of

_LOSSES: Final = frozenset({"NllLossBackward0", "NllLoss2DBackward0"})
_LOG_SOFTMAX: Final = "LogSoftmaxBackward0"
_PRODUCTS: Final = frozenset({"AddmmBackward0", "MmBackward0"})
_FORMS: Final = frozenset(
    {
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0"),
        *("TBackward0", "TransposeBackward0", "PermuteBackward0", "SqueezeBackward1", "UnsqueezeBackward0"),
        *("ToCopyBackward0", "ExpandBackward0"),
    }
)
"""What gives something another form."""
_BETWEEN: Final = _FORMS | {
    *("IndexBackward0", "IndexSelectBackward0", "SelectBackward0", "SliceBackward0"),
    *("DivBackward0", "MulBackward0", "TanhBackward0"),
}
"""What may be between the loss and the head: another form of the rows, a choice of them, and the same for each."""
_MOST_BETWEEN: Final = 8
_MOST_ABOVE: Final = 512
_IGNORES: Final = frozenset({-100, 2**64 - 100})
"""`ignore_index` of torch.nn.functional.cross_entropy, as nodes have it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the head of a model computes for a cross-entropy."""

    rows: int
    loss_rows: int
    """Those of them that the loss is given."""
    products: int
    """Of the elements of the rows that go into the head with its weights."""
    weights: frozenset[Any]
    """The nodes of these in the graph."""
    ignores: bool
    """The loss ignores rows whose target is -100."""


def scores_of(graph: Graph, above: Mapping[Any, Sequence[Any]]) -> Scores | None:
    """Return those of the only head whose scores have a cross-entropy, and nothing else; None: there is none.

    Args:
        graph: its nodes, and those below each.
        above: the nodes above each.
    """
    losses = [node for node in graph if name_of(node) in _LOSSES]
    heads = {_head_below(node, graph) for node in losses}
    head = heads.pop() if len(heads) == 1 else None
    if head is None:
        return None
    rows, classes = head._input_metadata[0].shape
    softmaxes = _only_softmaxes(head, above)
    if softmaxes is None or any(len(each) < 2 or each[1] != classes for each in softmaxes):
        return None
    return Scores(
        rows=int(rows),
        loss_rows=int(min(rows, sum(prod(each) // classes for each in softmaxes))),
        products=int(rows) * int(classes) * int(head._saved_mat2_sym_sizes[0]),
        weights=frozenset(each for below in graph[head] for each in _leaf_below(below, graph)),
        ignores=all(each._saved_ignore_index in _IGNORES and each._saved_reduction for each in losses),
    )


def _head_below(loss: Any, graph: Graph) -> Any:
    """The layer that gives the scores of a loss; None: it is not known."""
    node, is_softmax = loss, False
    for _ in range(_MOST_BETWEEN):
        below = graph.get(node, ())
        if len(below) != 1:
            return None
        node = below[0]
        name = name_of(node)
        if is_softmax and name in _PRODUCTS:
            return node if len(node._input_metadata[0].shape) == 2 else None
        if name not in _BETWEEN and (is_softmax or name != _LOG_SOFTMAX):
            return None
        is_softmax = is_softmax or name == _LOG_SOFTMAX
    return None


def _only_softmaxes(head: Any, above: Mapping[Any, Sequence[Any]]) -> list[Any] | None:
    """The shapes of what a loss computes of scores; None: something else is computed of them, too."""
    shapes: list[Any] = []
    todo, seen = [head], {head}
    while todo and len(seen) < _MOST_ABOVE:
        for node in above.get(todo.pop(), ()):
            if node in seen:
                continue
            seen.add(node)
            if name_of(node) in _BETWEEN:
                todo.append(node)
            elif name_of(node) == _LOG_SOFTMAX and _leads_to_loss(node, above):
                shapes.append(node._input_metadata[0].shape)
            else:
                return None
    return None if todo else shapes


def _leads_to_loss(softmax: Any, above: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether a loss is computed of it. A sum beside it smooths the labels."""
    over = list(above.get(softmax, ()))
    over += [each for node in over if name_of(node) in _FORMS for each in above.get(node, ())]
    return any(name_of(each) in _LOSSES for each in over)


def _leaf_below(node: Any, graph: Graph) -> Sequence[Any]:
    """The parameter that something is only another form of; empty: it is computed."""
    while (below := graph.get(node, ())) and len(below) == 1 and name_of(node) in _FORMS:
        node = below[0]
    return () if below else (node,)
