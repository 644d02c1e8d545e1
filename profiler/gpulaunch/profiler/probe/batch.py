"""What a dataloader tells about itself when it hands out a batch: how many samples, and how its queue stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["queue_of", "samples_in"]

_LOOK_DEEP: Final = 4
_LOOK_WIDE: Final = 4


def samples_in(batch: Any, tensor: type[Any]) -> int:
    """The first tensor's leading dimension, looking a few levels into lists, tuples and mappings; 0 if none."""
    kind = type(batch)
    first = batch[0] if (kind is list or kind is tuple) and batch else batch
    if type(first) is tensor:  # what default_collate makes; four times as fast as to look around
        shape = first.shape
        if shape:
            samples: int = shape[0]
            return samples
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


def queue_of(iterator: Any) -> tuple[int, int, int, int]:
    """The queue behind the iterator of a dataloader with workers (torch 2.6 to 2.13 keep it in these fields).

    Returns:
        The page's words LOADER_WORKERS_CONFIGURED..LOADER_REORDER_BLOCKED: worker processes; batches asked of them and
        not yet received; batches that are there; and how many of those wait for an earlier one that is not.

    Raises:
        AttributeError, TypeError: this torch keeps it elsewhere.
        NotImplementedError: this system cannot tell the length of a queue.
    """
    tasks = iterator._task_info  # index -> (worker,), and (worker, data) once it has arrived out of order
    outstanding = iterator._tasks_outstanding
    queued = iterator._data_queue.qsize()
    if len(tasks) <= outstanding:  # nothing out of order, as usual: spared the walk
        return iterator._num_workers, outstanding, queued, 0
    arrived = [index for index, task in tasks.items() if len(task) == 2]
    blocked = 0 if iterator._rcvd_idx in arrived else len(arrived)
    return iterator._num_workers, outstanding, queued + len(arrived), blocked
