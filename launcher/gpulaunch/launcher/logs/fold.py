"""Folds equal lines of several ranks into one: pure, the time is an argument.

Lines wait in groups, in the order of their first arrival. A rank's next line may only join a group behind that of its
last line, so reading the groups in order gives every rank its own lines in its own order; and each line of each rank is
in exactly one group, so folding neither loses nor invents any. Groups leave from the front: when their time is up, when
every rank has joined, or when too much is waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import NamedTuple

WINDOW_S = 0.1
MAX_WAITING_BYTES = 1024 * 1024
MAX_WAITING_LINES = 4096


class Fold(NamedTuple):
    """One line and the local ranks that wrote it, lowest first."""

    line: bytes
    ranks: tuple[int, ...]


class _Group:
    __slots__ = ("deadline_s", "line", "ranks")

    def __init__(self, line: bytes, rank: int, deadline_s: float) -> None:
        self.line = line
        self.ranks = [rank]
        self.deadline_s = deadline_s


class FoldWindow:
    """The lines that wait for other ranks to write the same."""

    def __init__(self, *, window_s: float = WINDOW_S, num_ranks: int = 0) -> None:
        self.num_ranks = num_ranks
        """Number of ranks after which a line waits no longer; 0 if unknown."""
        self._window_s = window_s
        self._groups: deque[_Group] = deque()
        self._first = 0  # the number of the group in front; groups are numbered on arrival
        self._by_line: dict[bytes, list[int]] = {}  # the numbers of the waiting groups with this line, ascending
        self._last_of: dict[int, int] = {}  # the number of the group with the rank's last line
        self._waiting_bytes = 0

    def add(self, now_s: float, rank: int, line: bytes) -> None:
        """Add a line; call `ready` afterwards."""
        groups_alike = self._by_line.setdefault(line, [])
        at = bisect_right(groups_alike, self._last_of.get(rank, -1))
        if at < len(groups_alike):
            number = groups_alike[at]
            self._groups[number - self._first].ranks.append(rank)
        else:
            number = self._first + len(self._groups)
            groups_alike.append(number)
            self._groups.append(_Group(line, rank, now_s + self._window_s))
            self._waiting_bytes += len(line)
        self._last_of[rank] = number

    def ready(self, now_s: float) -> list[Fold]:
        """Remove and return the lines that wait no longer."""
        folds: list[Fold] = []
        crowded = self._waiting_bytes > MAX_WAITING_BYTES or len(self._groups) > MAX_WAITING_LINES
        while self._groups:
            group = self._groups[0]
            if crowded:
                crowded = self._waiting_bytes > MAX_WAITING_BYTES // 2 or len(self._groups) > MAX_WAITING_LINES // 2
            elif group.deadline_s > now_s and len(group.ranks) != self.num_ranks:
                break
            folds.append(self._leave())
        return folds

    def flush(self) -> list[Fold]:
        """Remove and return all lines."""
        return [self._leave() for _ in range(len(self._groups))]

    def _leave(self) -> Fold:
        group = self._groups.popleft()
        self._first += 1
        self._waiting_bytes -= len(group.line)
        groups_alike = self._by_line[group.line]
        groups_alike.pop(0)
        if not groups_alike:
            del self._by_line[group.line]
        return Fold(group.line, tuple(sorted(group.ranks)))

    @property
    def deadline_s(self) -> float | None:
        """When the line in front has waited long enough; None when nothing waits."""
        return self._groups[0].deadline_s if self._groups else None
