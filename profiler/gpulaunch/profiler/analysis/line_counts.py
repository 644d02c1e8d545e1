"""Counts samples by line, with a bound on what is remembered.

One thread adds, any other may read the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeVar

K = TypeVar("K")

MOST_LINES: Final = 512
_MOST_CALLS: Final = 4
"""Functions that are told apart in one line."""

RankLine = tuple[int, str]
"""A rank, and a line of its program as text: `train.py:41`."""


class LineCounts:
    """Samples by line, and what each line calls."""

    def __init__(self) -> None:
        self._counts = Counter[RankLine]()
        self._counts_of_calls: dict[RankLine, Counter[str]] = {}
        self._calls: dict[RankLine, str] = {}

    def add(self, line: RankLine, calls: str) -> None:
        """Count a sample in a line; `calls`: the function that it calls, empty if not known."""
        if count_up_to(self._counts, line, MOST_LINES):
            counts = self._counts_of_calls.setdefault(line, Counter())
            count_up_to(counts, calls, _MOST_CALLS)
            self._calls[line] = max(counts, key=counts.__getitem__)  # here, as readers ask for all at every refresh

    @property
    def counts(self) -> Mapping[RankLine, int]:
        """The samples of each line."""
        return dict(self._counts)

    @property
    def calls(self) -> Mapping[RankLine, str]:
        """The function that each line mostly calls; empty: it is not known."""
        return dict(self._calls)


def count_up_to(counts: Counter[K], what: K, most: int) -> bool:
    """Count something, if it is known or there are not yet so many different ones; return whether it was counted."""
    if what not in counts and len(counts) >= most:
        return False
    counts[what] += 1
    return True
