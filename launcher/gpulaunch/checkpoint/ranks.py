"""The ranks of this job for saves: two separate gloo process groups.

Never the program's own group: a save communicates from its own thread, and collectives of two threads on one group
match in another order on every rank. Votes are made by the training thread, so they have a second group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

SAVE_TIMEOUT = timedelta(hours=24)  # a rank that writes to slow storage is alive; a dead one breaks its connection


class Vote(Protocol):
    """A reduction in progress."""

    def result(self) -> list[int]:
        """Wait for the reduction and return its result."""
        ...


class Ranks:
    """This rank's number and the number of ranks. Created collectively, once; a single rank without a process group."""

    def __init__(self) -> None:
        self.together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self.together else 0
        self.size: int = dist.get_world_size() if self.together else 1
        self.group: Any = None
        """Used by the saving thread, and by `resume`, which comes before any save."""
        self._votes: Any = None
        if self.together:
            self.group = new_group("gpulaunch.checkpoint", timeout=SAVE_TIMEOUT)
        if self.size > 1:
            self._votes = new_group("gpulaunch.checkpoint votes")

    @property
    def first(self) -> bool:
        """Whether this is the rank that decides and commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        result: T = values[0]
        return result

    def vote(self, values: Sequence[int]) -> Vote:
        """Begin a maximum reduction of each value over all ranks; does not wait."""
        return _Vote(torch.tensor(values, dtype=torch.int64), self._votes)


def new_group(name: str, **options: Any) -> Any:
    """A gloo group, of all ranks unless `ranks` is given, that lives as long as the process. Called by all ranks.

    Dropping the last reference to one waits, with the GIL, for threads that may be waiting for the GIL: they release
    the tensors of the last operation. A rank would hang at its end, with all work done.
    """
    group: Any = dist.new_group(backend="gloo", group_desc=name, **options)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


class _Vote:
    def __init__(self, values: torch.Tensor, group: Any) -> None:
        self._values = values  # gloo writes into it
        self._work: Any = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[int]:
        self._work.wait()
        values: list[int] = self._values.tolist()
        return values
