"""Counts the samples in which the training thread waits for Python's GIL, by what the thread that holds it runs.

One thread adds, any other may read the counts; memory is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

_MOST_LINES: Final = 512
_MOST_CALLS: Final = 4
"""Functions that are told apart in one line."""

HolderLine = tuple[int, str, str]
"""A rank, the function that another thread of it runs, and a line of the program on that thread's stack; an empty line
stands for the function as a whole."""


class GilWaits:
    """Samples of main threads that wait for the GIL while another thread holds it."""

    def __init__(self) -> None:
        self._counts = Counter[HolderLine]()
        self._calls: dict[tuple[int, str], Counter[str]] = {}
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
            key = rank, function, line
            if key in self._counts or len(self._counts) < _MOST_LINES:
                self._counts[key] += 1
        for line, call in lines.items():
            if (rank, line) in self._calls or len(self._calls) < _MOST_LINES:
                calls = self._calls.setdefault((rank, line), Counter())
                if call in calls or len(calls) < _MOST_CALLS:
                    calls[call] += 1

    def add_thread_wait(self, rank: int) -> None:
        """Count a sample in which a main thread waits for another thread or process by itself, as in `queue.get`."""
        self._thread_waits[rank] += 1

    @property
    def counts(self) -> Mapping[HolderLine, int]:
        """The samples by rank, function and line; with an empty line, all of the function."""
        return dict(self._counts)

    @property
    def calls(self) -> Mapping[tuple[int, str], str]:
        """The function that each line mostly calls, by rank and line; empty: it is not known."""
        return {line: max(calls, key=calls.__getitem__) for line, calls in dict(self._calls).items() if calls}

    @property
    def thread_waits(self) -> Mapping[int, int]:
        """The samples in which a main thread waits for another thread or process by itself, by rank."""
        return dict(self._thread_waits)
