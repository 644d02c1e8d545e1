"""Finds parts of a model whose gradients are all zero, in the graphs of backward passes that `graph` reads.

A loss with the weight 0 is computed like any other: `loss + weight * mse_loss(decoder(x), x)`, once the weight has come
down to 0. Backward goes through all of the decoder, and every element of every gradient is zero.

The gradients are read after the first pass of a row, on a CPU; those of a GPU would have to be waited for. A parameter
counts if they were zero in the row before, seconds ago, too: few values are read of each, and more only if these are
zero. If those of all parameters are zero, the model has learnt what a loss with a margin asks for: nothing is told
then. The fact "zero_gradients" has the means of the other passes of the row:

    elements   of the parameters of the graph whose gradients are zero in every element
    share      of forward and backward, that computed with these
"""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any, Final

from gpulaunch.profiler.probe.gradients import EMBEDDING, operations_of, products_of, variable_of
from gpulaunch.profiler.probe.graph_nodes import Graph, name_of, nodes_above
from gpulaunch.profiler.probe.tensor_memory import memory_of

_SOME: Final = 8
"""Values of a gradient that are read first."""
_READ_BYTES: Final = 1 << 16
"""Of the begin and of the end of those that may be zero."""
_ZEROS: Final = b"\x00\x80"
"""The bytes of 0.0 and -0.0, and of no other number that matters."""


class ZeroGradients:
    """Those of one rank; only its training thread calls it."""

    __slots__ = ("_parameter", "_passes", "_read", "_zero", "_zero_before")

    def __init__(self, torch: Any) -> None:
        self._parameter: type[Any] = torch.nn.Parameter
        self._zero: Set[int] = frozenset()  # the `id` of each parameter
        self._zero_before: Set[int] = frozenset()
        self._read: list[weakref.ref[Any]] | None = None  # what the first pass of a row goes through
        self._passes: list[tuple[int, float]] = []

    def begin(self) -> None:
        """The passes that are read from here on are a row, seconds after the row before."""
        self._zero_before, self._zero, self._read = self._zero, frozenset(), None
        self._passes.clear()

    def add(self, graph: Graph) -> None:
        """Read a graph, the whole of it, before the pass."""
        leaves = {node: each for node, below in graph.items() if not below and (each := variable_of(node)) is not None}
        leaves = {node: each for node, each in leaves.items() if isinstance(each, self._parameter)}
        if self._read is None:
            self._read = [weakref.ref(each) for each in leaves.values()]
            return
        known = self._zero & self._zero_before
        if zero := {node for node, each in leaves.items() if id(each) in known}:
            self._passes.append((sum(leaves[node].numel() for node in zero), _share(graph, leaves, zero)))

    def passed(self) -> None:
        """The pass is over: after the first one of a row, look at the gradients."""
        if self._read:
            parameters = [each for ref in self._read if (each := ref()) is not None]
            zero = frozenset(id(each) for each in parameters if _is_zero(each.grad))
            self._zero = zero if len(zero) < len(parameters) else frozenset()
            self._read = []

    def fact(self) -> dict[str, float] | None:
        """What the passes since `begin` have in common; None: no gradients are zero."""
        if not self._passes:
            return None
        elements, share = (sum(each) / len(self._passes) for each in zip(*self._passes, strict=True))
        return {"elements": round(elements), "share": round(share, 3)}


def _share(graph: Graph, leaves: dict[Any, Any], zero: Set[Any]) -> float:
    """The share of the products of a pass that are made with some of its parameters: if the gradient of a weight is
    zero, so is that of what the operation gives, and of its input."""
    above = nodes_above(graph)
    computed = in_vain = 0
    for node, parameter in leaves.items():
        operations = operations_of(node, graph, above)
        if all(name_of(each) == EMBEDDING for each in operations):
            continue  # it only looks up
        products = products_of(parameter, operations)
        computed += products
        in_vain += products if node in zero else 0
    return in_vain / computed if computed else 0.0


def _is_zero(gradient: Any) -> bool:
    memory = None if gradient is None or type(gradient).__name__ != "Tensor" else memory_of(gradient)
    if memory is None:
        return False
    size = int(gradient.element_size())
    starts = range(0, len(memory), size * max(1, int(gradient.numel()) // _SOME))
    parts = (*(memory[start : start + size] for start in starts), memory[:_READ_BYTES], memory[-_READ_BYTES:])
    return not any(bytes(part).strip(_ZEROS) for part in parts)
