"""Counts the samples in which the training thread waits for Python's GIL, by what the thread that holds it runs.

One thread adds, any other may read the counts; memory is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpulaunch.profiler.analysis.line_counts import MOST_LINES, LineCounts, RankLine, count_up_to

HolderLine = tuple[int, str, str]
"""A rank, the function that another thread of it runs, and a line of the program on that thread's stack; an empty line
stands for the function as a whole."""


class GilWaits:
    """Samples of main threads that wait for the GIL while another thread holds it."""

    def __init__(self) -> None:
        self._counts = Counter[HolderLine]()
        self._lines = LineCounts()
        self._thread_waits = Counter[int]()

    def add(self, rank: int, function: str, lines: Mapping[str, str]) -> None:
        """Count a sample.

        Args:
            rank: the rank.
            function: the outermost function of the program that the holder runs, or of a package.
            lines: `path:line` of the program on the holder's stack, the outermost first, and the function that each
                calls; "" where it is not known.
        """
        for line in ("", *lines):
            count_up_to(self._counts, (rank, function, line), MOST_LINES)
        for line, calls in lines.items():
            self._lines.add((rank, line), calls)

    def add_thread_wait(self, rank: int) -> None:
        """Count a sample in which a main thread waits for another thread or process by itself, as in `queue.get`."""
        self._thread_waits[rank] += 1

    @property
    def counts(self) -> Mapping[HolderLine, int]:
        """The samples by rank, function and line; with an empty line, all of the function."""
        return dict(self._counts)

    @property
    def calls(self) -> Mapping[RankLine, str]:
        """The function that each line mostly calls, by rank and line; empty: it is not known."""
        return self._lines.calls

    @property
    def thread_waits(self) -> Mapping[int, int]:
        """The samples in which a main thread waits for another thread or process by itself, by rank."""
        return dict(self._thread_waits)
