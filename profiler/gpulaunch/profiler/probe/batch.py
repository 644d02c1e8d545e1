"""What a dataloader tells about itself when it hands out a batch: how many samples, and how its queue stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Queue", "queue_of", "samples_in"]

_LOOK_DEEP: Final = 4
_LOOK_WIDE: Final = 4


def samples_in(batch: Any, tensor: type[Any]) -> int:
    """The first tensor's leading dimension, looking a few levels into lists, tuples and mappings; 0 if none."""
    first = batch[0] if type(batch) in (list, tuple) and batch else batch
    if type(first) is tensor:  # what default_collate makes; four times as fast as to look around
        shape = first.shape
        if shape:
            return int(shape[0])
    return _samples_in(batch, tensor, _LOOK_DEEP)


def _samples_in(batch: Any, tensor: type[Any], depth: int) -> int:
    if isinstance(batch, tensor):
        shape = batch.shape
        return int(shape[0]) if len(shape) else 0
    if depth and isinstance(batch, (list, tuple, Mapping)):
        items = iter(batch.values()) if isinstance(batch, Mapping) else iter(batch)
        for _, item in zip(range(_LOOK_WIDE), items, strict=False):
            samples = _samples_in(item, tensor, depth - 1)
            if samples:
                return samples
    return 0


@dataclass(slots=True)
class Queue:
    """The state of a dataloader with worker processes, at the moment a batch is asked for."""

    workers: int
    outstanding: int
    """Batches asked of the workers and not yet received."""
    ready: int
    """Batches that could be handed out at once, or as soon as those before them are there."""
    reorder_blocked: int
    """Batches that have arrived and wait for an earlier one."""


def queue_of(iterator: Any) -> Queue | None:
    """The queue behind a dataloader's iterator (torch 2.6 to 2.13 keep it in these fields); None without workers.

    Raises:
        AttributeError, TypeError: this torch keeps it elsewhere.
        NotImplementedError: this system cannot tell the length of a queue.
    """
    if not getattr(iterator, "_num_workers", 0):
        return None
    tasks = iterator._task_info  # index -> (worker,), and (worker, data) once it has arrived out of order
    outstanding = iterator._tasks_outstanding
    arrived: list[int] = []
    if len(tasks) > outstanding:  # the usual case, nothing out of order, is spared the walk
        arrived = [index for index, task in tasks.items() if len(task) == 2]
    return Queue(
        iterator._num_workers,
        outstanding,
        iterator._data_queue.qsize() + len(arrived),
        0 if iterator._rcvd_idx in arrived else len(arrived),
    )
