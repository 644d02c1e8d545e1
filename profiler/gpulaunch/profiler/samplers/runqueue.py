"""Reads how long threads ran, and how long they were ready but had no core, from /proc/PID/task/TID/schedstat.

The file of the process itself covers its first thread only, but any other may wait: the one that runs the backward pass
on a GPU, OpenMP's, the pin-memory thread. So all threads of a process are read and summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """The kernel's figures of one thread since it was started."""

    ran_ns: int
    waited_ns: int


@dataclass(kw_only=True)
class RunQueue:
    """The sum over the threads of one process; a thread that has ended stays in it with its last values."""

    ran_ns: int = 0
    waited_ns: int = 0
    runnable_threads: float | None = None
    """How many threads ran or waited, on average between the last two samples; None before the second."""
    looked_s: float = float("-inf")
    _threads: Mapping[int, ThreadTimes] = field(default_factory=dict[int, ThreadTimes])

    def look(self, threads: Mapping[int, ThreadTimes], now: float) -> None:
        """Take the current figures of all live threads."""
        before_ns = self.ran_ns + self.waited_ns
        for tid, times in threads.items():
            known = self._threads.get(tid)
            if known is None or times.ran_ns < known.ran_ns or times.waited_ns < known.waited_ns:
                known = ThreadTimes(ran_ns=0, waited_ns=0)  # a new thread, though its id may be reused
            self.ran_ns += times.ran_ns - known.ran_ns
            self.waited_ns += times.waited_ns - known.waited_ns
        if float("-inf") < self.looked_s < now:
            self.runnable_threads = (self.ran_ns + self.waited_ns - before_ns) / 1e9 / (now - self.looked_s)
        self.looked_s = now
        self._threads = threads

    def wanted_s(self, tid: int) -> float | None:
        """Return how long a thread ran, or was ready to, since it was started; None if that is not known."""
        times = self._threads.get(tid)
        return None if times is None else (times.ran_ns + times.waited_ns) / 1e9


def parse_schedstat(text: bytes) -> ThreadTimes | None:
    """Parse a schedstat file: ns on a core, ns ready and waiting, number of time slices. None if it is invalid."""
    words = text.split()
    if len(words) != 3 or not all(word.isdigit() for word in words):
        return None
    return ThreadTimes(ran_ns=int(words[0]), waited_ns=int(words[1]))
