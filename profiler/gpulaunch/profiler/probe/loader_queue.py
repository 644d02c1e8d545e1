"""Reads the queue behind the iterator of a dataloader with workers: batches requested, ready, and out of order.

Everything here reads private fields of torch (the same from 2.6 to 2.13), and raises where another torch has others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

NO_PLACES: Final[tuple[int, Callable[[], int]]] = (0, int)


def queue_of(iterator: Any) -> tuple[int, int, int, int, int]:
    """The queue behind the iterator of a dataloader with workers.

    Returns:
        The segment's words LOADER_WORKERS_CONFIGURED..LOADER_PIN_BACKLOG: worker processes; batches requested from them
        and not yet received; batches that are ready; how many of those wait for an earlier one that is not; and batches
        that workers have delivered to the pin-memory thread.

    Raises:
        AttributeError, TypeError: this torch has other fields.
        NotImplementedError: this system does not report the length of a queue.
    """
    tasks = iterator._task_info  # index -> (worker,), and (worker, data) once it has arrived out of order
    outstanding = iterator._tasks_outstanding
    queue, delivered = iterator._data_queue, iterator._worker_result_queue
    queued = queue.qsize()
    backlog = 0 if delivered is queue else delivered.qsize()
    if len(tasks) <= outstanding:  # nothing is out of order, as usual: no need to iterate
        return iterator._num_workers, outstanding, queued, 0, backlog
    arrived = [index for index, task in tasks.items() if len(task) == 2]
    # If all outstanding batches are in the queue, the expected one is among them.
    blocked = 0 if iterator._rcvd_idx in arrived or queued >= outstanding > 0 else len(arrived)
    return iterator._num_workers, outstanding, queued + len(arrived), blocked, backlog


def places_of(iterator: Any) -> tuple[int, Callable[[], int]]:
    """The capacity in batches of the queue between workers and training thread, and a function that returns how many
    more would fit: as `Queue.qsize` does, without its calls. Zero capacity and zero batches where that is unavailable.
    """
    try:
        queue = iterator._data_queue
        if queue is not iterator._worker_result_queue:  # a thread pins
            return NO_PLACES
        most, left = queue._maxsize, queue._sem._semlock._get_value
        return (most, left) if most - left() == queue.qsize() else NO_PLACES
    except (AttributeError, TypeError, NotImplementedError):
        return NO_PLACES


def length_of(iterator: Any) -> int:
    """Batches in an epoch, if torch alone determines that; 0 if a user's sampler or dataset does."""
    batches = iterator._index_sampler
    sampler = getattr(batches, "sampler", None)
    torchs = all(type(each).__module__.startswith("torch.utils.data.") for each in (batches, sampler))
    return len(batches) if torchs and iterator._dataset_kind == 0 else 0  # 0: torch's _DatasetKind.Map


def has_out_of_order(iterator: Any) -> bool:
    """Whether batches have arrived that wait for an earlier one."""
    tasks = iterator._task_info
    return len(tasks) > iterator._tasks_outstanding and any(len(task) == 2 for task in tasks.values())


def one_worker_is_late(iterator: Any, number: int) -> bool:
    """Whether all workers but one have delivered whatever they were asked for, some of it out of order, in the middle
    of an epoch: its first batches come as the workers start, and for the last ones nothing else is asked for.

    Args:
        iterator: of a dataloader.
        number: of the batch that it has returned, from 1; the request that it makes then does not count.
    """
    workers = iterator._num_workers
    if number <= workers or not workers or not has_out_of_order(iterator):
        return False
    tasks, latest = iterator._task_info, iterator._send_idx - 1
    if len(tasks) < workers * iterator._prefetch_factor:
        return False
    missing = [task[0] for index, task in tasks.items() if len(task) == 1 and index != latest]
    return len(set(missing)) <= 1
