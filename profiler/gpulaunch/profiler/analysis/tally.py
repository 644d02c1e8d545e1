"""Counts stack samples of the training threads: how many there are, and which lines of the program hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeVar

K = TypeVar("K")

_MOST_LINES: Final = 64
_MOST_CALLING: Final = 1024
_MOST_CALLS: Final = 16
"""Functions that are told apart in one line."""

RankLine = tuple[int, str]
"""A rank, and a line of its program as text: `train.py:41`."""


class Tally:
    """Counts samples in bounded memory. One thread adds, any other may read the counts."""

    def __init__(self) -> None:
        self._samples = Counter[int]()
        self._logged = Counter[RankLine]()
        self._calling = Counter[RankLine]()
        self._calls: dict[RankLine, Counter[str]] = {}
        self._spanning: set[RankLine] = set()

    def add(
        self, rank: int, phase: str, *, logs: str = "", at: str = "", calls: str = "", spans_steps: bool = False
    ) -> None:
        """Count a sample of a rank's main thread.

        Args:
            rank: the rank.
            phase: of `samplers.phases`.
            logs: `path:line` of the call into logging; empty: the thread was not inside logging.
            at: `path:line` of a call outside of the model's compute; empty: there is none.
            calls: the function that the line calls; empty: it is not known.
            spans_steps: that call contains the training loop, so it is none of a step.
        """
        if phase == "startup":  # before the first step, part of none
            return
        self._samples[rank] += 1
        if logs and phase != "data_wait":  # a progress bar around a loader waits for data, and logs nothing
            _count(self._logged, (rank, logs), _MOST_LINES)
        elif at and spans_steps:
            if len(self._spanning) < _MOST_LINES:
                self._spanning.add((rank, at))
        elif at and _count(self._calling, (rank, at), _MOST_CALLING):
            _count(self._calls.setdefault((rank, at), Counter()), calls, _MOST_CALLS)

    @property
    def samples(self) -> Mapping[int, int]:
        """All samples so far, by rank."""
        return dict(self._samples)

    @property
    def logged(self) -> Mapping[RankLine, int]:
        """Those inside logging, by rank and the program's line."""
        return dict(self._logged)

    @property
    def calling(self) -> Mapping[RankLine, int]:
        """Those in other calls outside of the model's compute, by rank and the program's line."""
        return {line: count for line, count in dict(self._calling).items() if line not in self._spanning}

    @property
    def calls(self) -> Mapping[RankLine, str]:
        """The function that each of these lines mostly calls; empty: it is not known."""
        return {line: max(counts, key=counts.__getitem__) for line, counts in list(self._calls.items()) if counts}


def _count(counts: Counter[K], what: K, most: int) -> bool:
    if what not in counts and len(counts) >= most:
        return False
    counts[what] += 1
    return True
