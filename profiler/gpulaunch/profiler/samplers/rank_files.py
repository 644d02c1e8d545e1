"""Keeps the files that ranks write continuously open, one of a kind per rank.

Files are replaced with each attempt, and by successive programs in a rank; totals continue. So a file that was replaced
is read a last time before the new one is opened: counts since the previous reading are not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class _Reader(Protocol):
    """A file that is kept open."""

    def replaced(self) -> bool:
        """Whether its path has another file now, or none."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


R = TypeVar("R", bound=_Reader)


class RankFiles(Generic[R]):
    """Readers by rank."""

    def __init__(self, opened: Callable[[int], R]) -> None:
        """`opened`: opens the file of a rank."""
        self._opened = opened
        self._readers: dict[int, R] = {}

    def only(self, ranks: Collection[int]) -> None:
        """Close the files of all ranks except these."""
        for rank in self._readers.keys() - set(ranks):
            self._readers.pop(rank).close()

    def read(self, rank: int, look: Callable[[int, R], T]) -> T:
        """Return the result of `look` for the rank's file; if it was replaced, `look` gets the old file first.

        Raises:
            OSError, ValueError: the file cannot be opened or read; the next call tries again.
        """
        reader = self._readers.get(rank)
        if reader is not None and reader.replaced():
            del self._readers[rank]
            try:
                look(rank, reader)
            finally:
                reader.close()
            reader = None
        if reader is None:
            reader = self._readers[rank] = self._opened(rank)
        return look(rank, reader)

    def close(self) -> None:
        """Close all files."""
        self.only(())
