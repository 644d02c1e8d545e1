"""The ranks of this job, as a save sees them: two process groups of its own, on gloo.

Never the program's own group: a save talks from a thread of its own, and collectives of two threads on one group meet
in another order on every rank. Votes are the training thread's, so they have a second group, for the same reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_SAVE_TIMEOUT = timedelta(hours=24)  # a rank that writes to slow storage is not dead; a dead one breaks its connection


class Vote(Protocol):
    """A reduction under way."""

    def result(self) -> list[int]:
        """Wait for it, and give it."""
        ...


class Ranks:
    """Which rank this is, of how many. Made collectively, once; alone where there is no process group."""

    def __init__(self) -> None:
        self.together = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self.together else 0
        self.size: int = dist.get_world_size() if self.together else 1
        self.group: Any = None
        """Of the thread that saves, and of `resume`, which comes before any save."""
        self._votes: Any = None
        if self.together:
            self.group = _new_group("gpulaunch.checkpoint", timeout=_SAVE_TIMEOUT)
        if self.size > 1:
            self._votes = _new_group("gpulaunch.checkpoint votes")

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
        """Begin to find the greatest of each value over all ranks; does not wait."""
        return _Vote(torch.tensor(values, dtype=torch.int64), self._votes)


def _new_group(name: str, **options: Any) -> Any:
    """A gloo group of all ranks that lives as long as the process.

    Whoever drops the last reference to one waits, with the GIL, for threads that may be waiting for the GIL: they let
    go of the tensors of what was done last. A rank would hang at its end, with everything done.
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
