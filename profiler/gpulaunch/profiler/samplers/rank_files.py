"""The files that ranks write all the time, one of a kind for each rank, held open.

Files come and go with attempts, and with programs that follow each other in a rank; what they count goes on. So a file
that was replaced is read a last time before the new one is opened: what was counted since the reading before is not
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class _Reader(Protocol):
    """A file that is held open."""

    def replaced(self) -> bool:
        """Whether its path has another file now, or none."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


R = TypeVar("R", bound=_Reader)


class RankFiles(Generic[R]):
    """Readers by rank."""

    def __init__(self, opened: Callable[[int], R]) -> None:
        """`opened`: opens the file of a rank."""
        self._opened = opened
        self._readers: dict[int, R] = {}

    def only(self, ranks: Collection[int]) -> None:
        """Let go of the files of all ranks but these."""
        for rank in self._readers.keys() - set(ranks):
            self._readers.pop(rank).close()

    def read(self, rank: int, look: Callable[[int, R], T]) -> T:
        """Give what `look` makes of the rank and its file; before that it gets the file before, if there is a new one.

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
        """Let all files go."""
        self.only(())
