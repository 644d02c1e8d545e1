"""Measures the probe's overhead per step: the time inside its taps, and the calls of the taps.

The first is measured in one of eight blocks of steps, which represents the others: there each edge reads the clock on
entry, which the phases need anyway, and on exit. A clock inside a tap cannot measure the call of the tap; that is
calibrated once, before the first step, and multiplied by the number of edges.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.probe.budget import BLOCK

_MEASURED_EVERY: Final = 8  # one of this many blocks of steps is measured, and represents the others

_CALLS: Final = 9
_NO_THREAD: Final = 0  # get_ident is never 0
# Between two of torch's calls caches are full of torch. Python's compiler has enough code to have the same effect: a
# tap's call took 0.4 us right after another, 1.2 us after this, 1.4 us after a small network's forward and backward.
_SOMETHING_ELSE: Final = "def f(x, *rest):\n    return [each + 1 for each in x if each] or {**rest[0]}\n" * 12


class Cost:
    """The overhead of one rank's steps. For its training thread only."""

    __slots__ = ("_edges", "_observed_ns", "_spent_ns", "_steps", "call_ns", "calls_ns", "measures")

    def __init__(self) -> None:
        self.call_ns = 0
        """The cost of calling a tap and returning from it; set by the code that places them."""
        self.calls_ns = 0
        """The same for all edges of a step, as of the last measured block."""
        self.measures = False
        """Whether the current step is measured: `spent` must be called."""
        self._observed_ns = 0  # the additional cost of a step, as of the same block
        self._spent_ns = self._edges = self._steps = 0  # of the block being measured, so far

    def spent(self, since_ns: int) -> None:
        """A tap has passed an edge in a measured step; it started at this time."""
        self._spent_ns += monotonic_ns() - since_ns
        self._edges += 1

    def settle(self, before: int, steps: int, observed: int) -> int:
        """Steps have ended: `steps` in total, `before` of them up to the last call; `observed` of those since then were
        observed.

        Returns:
            The cost of those since then, in ns.
        """
        block_ended = steps // BLOCK != before // BLOCK
        if self.measures:
            self._steps += observed
            if self._steps and (block_ended or not self._observed_ns):
                self._observed_ns = self._spent_ns // self._steps
                self.calls_ns = self._edges * self.call_ns // self._steps
        cost_ns = observed * self._observed_ns + (steps - before) * self.calls_ns
        if block_ended or not self.measures:
            self.measures = _is_measured(steps)
            self._spent_ns = self._edges = self._steps = 0
        return cost_ns


def _is_measured(steps: int) -> bool:
    """Whether the steps after this number are measured, up to the end of their block: not at regular intervals, or
    what a program does every ten steps would be measured too often, or never. In the first block, whose steps are not
    typical, half of them are.
    """
    block, at = divmod(steps, BLOCK)
    return ((block * 1103515245 + 12345) >> 16) % _MEASURED_EVERY == 0 if block else at >= BLOCK // 2


_call_ns = 0


def call_ns(is_compiling: Callable[[], bool]) -> int:
    """Return what `time_call` has measured in this process, or in the one that it was forked from."""
    global _call_ns
    _call_ns = _call_ns or time_call(is_compiling)
    return _call_ns


def time_call(is_compiling: Callable[[], bool]) -> int:
    """Measure how long it takes to call a tap that passes the call on, in ns. Takes some milliseconds.

    Args:
        is_compiling: torch's function, which each tap calls first.
    """

    def original(*_args: Any, **_kwargs: Any) -> None:
        pass

    def tap(outputs: Any, *args: Any, **kwargs: Any) -> None:
        if not is_compiling() and monotonic_ns() and get_ident() != _NO_THREAD:
            original(outputs, *args, **kwargs)

    return max(0, _typical_ns(tap) - _typical_ns(original))


def _typical_ns(function: Callable[..., None]) -> int:
    """The median duration of a call, each after other code."""
    took_ns = []
    for _ in range(_CALLS):
        compile(_SOMETHING_ELSE, "<nothing>", "exec")
        began_ns = monotonic_ns()
        function(None, accumulate_grad=True)
        took_ns.append(monotonic_ns() - began_ns)
    return sorted(took_ns)[_CALLS // 2]
