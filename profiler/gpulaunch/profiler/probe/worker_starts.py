"""What it costs the training thread that an epoch starts its workers anew.

It waits until they are stopped, started, and have a first batch. After a fork, both processes share all pages of
memory: the training thread faults at each one that it then writes to, and the kernel copies it. So its first step is
longer: with Adam by 3.3 to 3.7 us for each of these faults, which is 48 of 72 ms with 2.4 million parameters (measured
on a virtual machine with two cores).
"""

from __future__ import annotations

from resource import RUSAGE_THREAD, getrusage
from typing import Any, Final

_FAULTS: Final = 6  # the position of ru_minflt


def page_faults() -> int:
    """Return how often the calling thread has touched a page of memory that the kernel had yet to map or copy."""
    return getrusage(RUSAGE_THREAD)[_FAULTS]


class WorkerStarts:
    """The starts of workers for training, of one rank.

    Iterators are the dataloader's, times are nanoseconds of any one monotonic clock. All calls are the training
    thread's.
    """

    __slots__ = (
        "_end_ns",
        "_faults",
        "_first",
        "_newest",
        "_since_ns",
        "_start_ns",
        "_trained",
        "epochs",
        "first_wait_ns",
        "looks",
        "restarts",
        "shared_faults",
        "shared_ns",
    )

    def __init__(self) -> None:
        self.epochs = self.first_wait_ns = 0
        """Epochs whose first batch was waited for, and how long, with the start of its workers, and the end of those
        before."""
        self.restarts = self.shared_ns = self.shared_faults = 0
        """Those that started workers, but for the first one; how long the thread then was about its first batch or its
        second (the longer one: some programs fetch a batch ahead), and how many page faults more than about the other.
        """
        self.looks = False
        """Whether this is looked at now: `asked` and `arrived` are to be called."""
        self._newest = self._start_ns = 0  # the newest iterator (its `id`), and how long it took to start its workers
        self._trained = 0  # the last iterator that gave a training batch first in its epoch (its `id`)
        self._end_ns = 0  # how long it took to stop its workers, until the next epoch begins
        self._since_ns = self._faults = 0  # when the last batch arrived, and the page faults of the thread then
        self._first: tuple[int, int] | None = None  # the same of the time between the first batch and the next request

    def started(self, iterator: Any, start_ns: int) -> None:
        """An iterator was created, and with it perhaps workers: it took so long."""
        self._newest, self._start_ns = id(iterator), start_ns

    def resumed(self, iterator: Any, resume_ns: int) -> None:
        """The thread has waited for the workers of an iterator to begin: just after they were started, that is a part
        of their start; for persistent ones, of every epoch."""
        if self._newest == id(iterator):
            self._start_ns += max(0, resume_ns)

    def ended(self, iterator: Any, end_ns: int) -> None:
        """The workers of an iterator were stopped: it took so long."""
        if id(iterator) == self._trained:
            self._end_ns += end_ns

    def trains(self, iterator: Any, now_ns: int, wait_ns: int) -> None:
        """The first batch of an epoch of training has arrived, `wait_ns` after the request."""
        self.epochs += 1
        self.first_wait_ns += wait_ns + self._end_ns
        if self._newest == id(iterator):
            self.first_wait_ns += self._start_ns
            if self.epochs > 1 and iterator._num_workers:  # the first step of all is not like the others
                self.looks, self._first = True, None
                self.arrived(now_ns)
        self._newest = self._start_ns = self._end_ns = 0
        self._trained = id(iterator)

    def evaluates(self, iterator: Any) -> None:
        """The first batch of an evaluation has arrived."""
        if id(iterator) == self._trained:  # at the same address
            self._trained = 0

    def arrived(self, now_ns: int) -> None:
        """A batch has arrived."""
        self._since_ns, self._faults = now_ns, page_faults()

    def asked(self, iterator: Any, now_ns: int) -> None:
        """The next one is requested."""
        took_ns, faults = now_ns - self._since_ns, page_faults() - self._faults
        if self._first is None and iterator._num_yielded == 1:
            self._first = took_ns, faults
            return
        self.looks = False
        if self._first is not None and iterator._num_yielded == 2:  # else there were batches that were not observed
            first_ns, first_faults = self._first
            self.restarts += 1
            self.shared_ns += max(first_ns, took_ns)
            self.shared_faults += abs(first_faults - faults)
