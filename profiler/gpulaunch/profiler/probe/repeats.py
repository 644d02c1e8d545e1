"""Finds what several backward passes of a step go through again: a graph that was kept with `retain_graph=True`.

Each pass through the same nodes costs as much as the first one. One pass from the sum of the losses accumulates the
same gradients, and a recurrent state that is detached needs none of the earlier ones. But a program may want the
gradients of each loss by themselves: then it sets them to zero, or takes them away, between the passes, and nothing is
counted. Nor is what goes through parameters that are frozen for one of the passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final

_MARK: Final = "gpulaunch"
"""In the metadata of the nodes of a kept graph: which passes have gone through it. It goes with the node."""

_ELEMENTS_OF_CALL: Final = 24_000
"""That take as long as a node itself: it took 3.0 us, and 0.12 ns for each element where it multiplies by a number.
Operations that compute more for each, as layers do, weigh less than they should."""
_Gradient = tuple[int, int, int]
"""Of a gradient its `id`, its memory and its version: they change if anything but a pass changes it."""


class Repeats:
    """The passes of one rank that are read in a row. Nothing of them is kept alive, but the parameters during a pass.

    Only steps of the optimizer count whose passes were all read.
    """

    __slots__ = ("_again", "_cost", "_gradients", "_is_whole", "_later", "_leaves", "_mark", "_of_step", "_step")

    def __init__(self) -> None:
        self._cost = self._later = self._again = 0.0
        self._mark = 0
        self._gradients: dict[int, _Gradient] = {}
        self._leaves: list[Any] = []
        self._step: int | None = None
        self._is_whole = False
        # Of its passes so far, of those that went through something again, and of that.
        self._of_step = [0.0, 0.0, 0.0]

    def begin(self) -> None:
        """The next pass is the first that is read in a row."""
        self._step, self._is_whole = None, False
        self._forget()

    def add(self, graph: Mapping[Any, Any], *, keeps: bool, step: int) -> None:
        """Read the graph of a pass that begins, the whole of it.

        Args:
            graph: its nodes, and those below each.
            keeps: it is kept after the pass.
            step: steps of the optimizer before it.
        """
        if step != self._step:
            if self._is_whole:
                self._cost += self._of_step[0]
                self._later += self._of_step[1]
                self._again += self._of_step[2]
            self._is_whole, self._step, self._of_step = self._step is not None, step, [0.0, 0.0, 0.0]
            self._forget()
        variables = (getattr(node, "variable", None) for node, below in graph.items() if not below)
        leaves = [each for each in variables if each is not None]
        operations = [node for node, below in graph.items() if below]
        is_sure = all(each.requires_grad for each in leaves)
        if not is_sure or not self._accumulates(leaves):
            self._forget()
        costs = sum(map(_cost_of, operations))
        self._of_step[0] += costs
        if self._gradients:
            again = [each for each in operations if _metadata(each).get(_MARK) == self._mark]
            self._of_step[1] += costs if again else 0.0
            self._of_step[2] += sum(map(_cost_of, again))
        if keeps and is_sure:
            for each in operations:
                _metadata(each)[_MARK] = self._mark
            self._leaves = leaves
        else:
            self._forget()

    def passed(self) -> None:
        """The pass is over."""
        leaves, self._leaves = self._leaves, []
        self._gradients.update((id(each), known) for each in leaves if (known := _known(each.grad)) is not None)

    @property
    def share(self) -> float:
        """Of what all these passes went through, what an earlier one of their step had gone through: by the number of
        nodes, and of the elements that they compute. 0 if it is not most of the later passes: then it may be a few
        small operations, such as those that make the weights of a layer."""
        return round(self._again / self._cost, 3) if 2 * self._again > self._later else 0.0

    def _forget(self) -> None:
        self._mark += 1  # what has another one is not known any more
        self._gradients.clear()
        self._leaves = []

    def _accumulates(self, leaves: list[Any]) -> bool:
        """Whether the gradients are as the passes before have left them."""
        known = [each for each in leaves if id(each) in self._gradients]
        if not known or any(_known(each.grad) != self._gradients[id(each)] for each in known):
            return False
        smallest = min(known, key=lambda each: int(each.numel())).grad
        # `gradient.data.zero_()` shows only in the values. Those of a GPU would have to be waited for.
        return smallest.device.type != "cpu" or bool(smallest.any())


def _cost_of(node: Any) -> float:
    """Of a node, in calls: one, and as many as the elements of its output take."""
    outputs: Any = getattr(node, "_input_metadata", ())  # what is put into it in backward
    return 1.0 + float(sum(prod(each.shape) for each in outputs)) / _ELEMENTS_OF_CALL


def _metadata(node: Any) -> dict[Any, Any]:
    """What torch keeps with a node of a graph; of one that has no such thing nothing is kept."""
    metadata: Any = getattr(node, "metadata", None)
    return metadata if isinstance(metadata, dict) else {}


def _known(gradient: Any) -> _Gradient | None:
    """None for one that is not known so: there is none, or it has no memory of its own."""
    if gradient is None or type(gradient).__name__ not in ("Tensor", "Parameter") or gradient.is_sparse:
        return None
    return id(gradient), int(gradient.data_ptr()), int(gradient._version)
