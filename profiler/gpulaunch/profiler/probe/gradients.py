"""Finds gradients that nothing uses, in the graphs of backward passes that `graph` reads a few times in a run.

Two kinds. A parameter gets a gradient, but no optimizer has it, and its value does not change: it belongs to a teacher
or to a frozen part of a model, and backward went through it in vain. And the gradient of an embedding is as large as
its weight, though nearly all of its rows are zero, because the batch has looked up only a few: the optimizer still
updates every row.

Whether backward went through the operation of such a parameter in vain follows from the graph: it did if below the
operation there is nothing that is to be updated; otherwise only one of its two products was in vain, as the gradient of
its input is passed on. How long an operation takes is not known; the elements of its parameters stand for it.

The fact "gradients" has the means of the passes that were read together:

    elements             of all parameters in the graph
    unused_elements      of those that nothing updates
    unused_share         of backward, that was in vain
    untouched_elements   of embeddings: in rows that no sample of the batch has looked up

A program may update parameters without an optimizer, or an optimizer may have copies of them (DeepSpeed, Apex). So
nothing is told unless an optimizer has some of the parameters, and the others have had the same version since the
passes before, seconds ago. Nothing is told of FSDP, whose optimizers have other tensors than the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, Final

SHARDED: Final = ("FlatParameter", "DTensor")
"""Parameters of FSDP."""
_MOST_PARAMETERS: Final = 20_000
"""Of optimizers: with more, it is not looked for."""
_EMBEDDING: Final = "EmbeddingBackward0"

Graph = Mapping[Any, Sequence[Any]]
"""The nodes below each node of a graph of torch.autograd."""

optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
"""All that the program has created, as long as they exist."""


class GradientUse:
    """What becomes of the gradients of one rank; only its training thread calls it."""

    __slots__ = ("_parameter", "_passes", "_versions", "_versions_before")

    def __init__(self, torch: Any) -> None:
        self._parameter: type[Any] = torch.nn.Parameter
        self._passes: list[tuple[int, int, float, float]] = []
        self._versions_before: dict[int, int] = {}
        self._versions: dict[int, int] = {}

    def begin(self) -> None:
        """The passes that are read from here on are a row, seconds after the row before."""
        self._passes.clear()
        self._versions_before, self._versions = self._versions, {}

    def add(self, graph: Graph) -> None:
        """Read a graph, the whole of it."""
        updated = _updated_by_optimizers()
        leaves = {node: each for node, below in graph.items() if not below and (each := _variable(node)) is not None}
        if updated is None or not any(id(each) in updated for each in leaves.values()):
            return
        if any(type(each).__name__ in SHARDED for each in leaves.values()):
            return
        unused = {node for node, each in leaves.items() if id(each) not in updated and self._is_unused(each)}
        above: dict[Any, list[Any]] = {}
        for node, below in graph.items():
            for each in below:
                above.setdefault(each, []).append(node)
        needed = _reaching((node for node in leaves if node not in unused), above)
        elements = unused_elements = 0
        computed = in_vain = untouched = 0.0
        for node, variable in leaves.items():
            if not isinstance(variable, self._parameter):
                continue  # an input that wants its gradient
            count = int(variable.numel())
            elements += count
            operations = _operations(node, graph, above)
            if all(_name(each) == _EMBEDDING for each in operations):
                untouched += count * _untouched_share(operations) if node not in unused else 0.0
                unused_elements += count if node in unused else 0
                continue
            computed += count
            if node in unused:
                unused_elements += count
                in_vain += 0.5 * count if any(each in needed for each in operations) else count
        self._passes.append((elements, unused_elements, in_vain / computed if computed else 0.0, untouched))

    def fact(self) -> dict[str, float] | None:
        """What the passes since `begin` have in common; None if nothing is known."""
        if not self._passes:
            return None
        elements, unused, share, untouched = (sum(each) / len(self._passes) for each in zip(*self._passes, strict=True))
        return {
            "elements": round(elements),
            "unused_elements": round(unused),
            "unused_share": round(share, 3),
            "untouched_elements": round(untouched),
        }

    def _is_unused(self, variable: Any) -> bool:
        """Whether a parameter that no optimizer has is unchanged since the row before."""
        if not isinstance(variable, self._parameter):
            return False
        version = int(variable._version)
        self._versions[id(variable)] = version
        return self._versions_before.get(id(variable)) == version


def _updated_by_optimizers() -> set[int] | None:
    """The `id` of each parameter of the living optimizers; None if they have others than the graph, or too many."""
    found: set[int] = set()
    groups = (group for optimizer in list(optimizers) for group in getattr(optimizer, "param_groups", ()))
    for parameter in islice((each for group in groups for each in group["params"]), _MOST_PARAMETERS):
        if type(parameter).__name__ in SHARDED:
            return None
        found.add(id(parameter))
    return found if len(found) < _MOST_PARAMETERS else None


def _variable(node: Any) -> Any:
    """The tensor whose gradient a node accumulates; None: it is no such node."""
    return getattr(node, "variable", None)


def _name(node: Any) -> str:
    name: Any = getattr(node, "name", None)
    return str(name()) if callable(name) else ""


def _reaching(nodes: Any, above: Mapping[Any, Sequence[Any]]) -> set[Any]:
    """Some nodes, and all from which one of them can be reached."""
    found = set(nodes)
    todo = list(found)
    while todo:
        for each in above.get(todo.pop(), ()):
            if each not in found:
                found.add(each)
                todo.append(each)
    return found


def _operations(leaf: Any, graph: Graph, above: Mapping[Any, Sequence[Any]]) -> Sequence[Any]:
    """The nodes that compute with a parameter: above it, beyond what only transposes or casts it."""
    node = leaf
    while len(over := above.get(node, ())) == 1 and len(graph[over[0]]) == 1 and _name(over[0]) != _EMBEDDING:
        node = over[0]
    return over


def _untouched_share(lookups: Sequence[Any]) -> float:
    """The share of an embedding's rows that were not looked up, at least; 0 if the gradient is sparse, or unknown."""
    looked_up = rows = 0
    for node in lookups:
        if getattr(node, "_saved_sparse", True):
            return 0.0
        # Not the saved indices: saved tensors may be packed, and to unpack them would run code of the program.
        looked_up += prod(node._input_metadata[0].shape[:-1])
        rows = int(node._saved_weight_sym_argsize_0)
    return max(0.0, 1.0 - looked_up / rows) if rows else 0.0
