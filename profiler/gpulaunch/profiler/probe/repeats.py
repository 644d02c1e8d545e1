"""Finds what several backward passes of a step go through again: a graph that was kept with `retain_graph=True`.

Each pass through the same nodes costs as much as the first one. One pass from the sum of the losses gives the same
gradients, and a recurrent state that is detached needs none of the earlier ones. But a program may want the gradients
of each loss by themselves: then it sets them to zero, or takes them away, between the passes, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

_MOST_LEAVES: Final = 64
"""Parameters of a graph whose gradients are looked at."""
_NUMBERED: Final = 1 << 63
"""Nodes that accumulate gradients have a sequence number above it, all the same one; those of operations count up."""
_ANY: Final = -1


class Repeats:
    """The passes of one rank that are read in a row, and its nodes by their sequence numbers: nothing is kept alive.

    Only steps of the optimizer count whose passes were all read.
    """

    __slots__ = ("_again", "_is_whole", "_kept", "_nodes", "_of_step", "_step", "_versions")

    def __init__(self) -> None:
        self._nodes = 0
        self._again = 0
        self._kept: set[int] = set()
        self._versions: dict[int, int] = {}
        self._step: int | None = None
        self._is_whole = False
        self._of_step = [0, 0]  # nodes of its passes so far, and those that an earlier one had gone through

    def begin(self) -> None:
        """The next pass is the first that is read in a row."""
        self._step, self._is_whole = None, False
        self._forget()

    def add(self, graph: Mapping[Any, Any], *, keeps: bool, step: int) -> None:
        """Read the graph of a pass, the whole of it.

        Args:
            graph: its nodes, and those below each.
            keeps: it is kept after the pass.
            step: steps of the optimizer before it.
        """
        if step != self._step:
            if self._is_whole:
                self._nodes += self._of_step[0]
                self._again += self._of_step[1]
            self._is_whole, self._step, self._of_step = self._step is not None, step, [0, 0]
            self._forget()
        numbers = {number for node in graph if (number := _number(node)) < _NUMBERED}
        variables = (getattr(node, "variable", None) for node, below in graph.items() if not below)
        leaves = list(islice((each for each in variables if each is not None), _MOST_LEAVES))
        if not all(self._accumulates(each) for each in leaves if id(each) in self._versions):
            self._forget()
        self._of_step[0] += len(numbers)
        self._of_step[1] += len(numbers & self._kept)
        if keeps:
            self._kept |= numbers
            self._versions.update((id(each), _version_after(each.grad)) for each in leaves)
        else:
            self._forget()

    @property
    def share(self) -> float:
        """Of the nodes that all these passes went through, those that an earlier one of their step had gone through."""
        return round(self._again / self._nodes, 3) if self._nodes else 0.0

    def _forget(self) -> None:
        self._kept.clear()
        self._versions.clear()

    def _accumulates(self, variable: Any) -> bool:
        """Whether nothing but the pass before has changed a gradient since then."""
        gradient = variable.grad
        return gradient is not None and self._versions[id(variable)] in (_ANY, int(gradient._version))


def _number(node: Any) -> int:
    """The sequence number of a node; one that does not count if torch has none."""
    number: Any = getattr(node, "_sequence_nr", None)
    return int(number()) if callable(number) else _NUMBERED


def _version_after(gradient: Any) -> int:
    """The version of a gradient after the next pass; any if there is none yet: it becomes what the pass computes."""
    return _ANY if gradient is None else int(gradient._version) + 1
