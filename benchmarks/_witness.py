"""When a machine stood still: a process for each core that wants to run every millisecond, before all others.

    python _witness.py CORE     (needs the right to SCHED_FIFO)

What it is held up by is not of this machine's doing: a host that gives the core to others. Printed, when stdin ends:
from when to when it was held up by more than a millisecond, as JSON (CLOCK_MONOTONIC, seconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator

__all__ = ["Stalls", "witnesses"]

_EVERY_S = 0.001
_HELD_UP_S = 0.001


class Stalls:
    """What the witnesses saw, once they have been asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] | None = None
        """None: they may not run before all others, and so know nothing."""

    @property
    def stood_still_s(self) -> float:
        """Of all cores together."""
        return round(sum(end - begin for begin, end in self.seen or ()), 2)

    def held_up_s(self, began_s: float, ended_s: float) -> float:
        """How long a core or another stood still meanwhile."""
        held_up_s = 0.0
        for begin, end in self.seen or ():
            if began_s < min(end, ended_s):
                held_up_s += max(0.0, min(end, ended_s) - max(begin, began_s))
                began_s = max(began_s, end)
        return held_up_s

    def during(self, began_s: float, ended_s: float) -> bool:
        """Whether a core stood still meanwhile."""
        return any(begin < ended_s and began_s < end for begin, end in self.seen or ())


@contextlib.contextmanager
def witnesses() -> Generator[Stalls]:
    """Have every core watched."""
    stalls = Stalls()
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for core in sorted(os.sched_getaffinity(0))
        ]
        try:
            yield stalls
        finally:
            told = [process.communicate()[0] for process in processes]
    if all(told):
        stalls.seen = sorted((begin, end) for each in told for begin, end in json.loads(each))


def main(core: int) -> None:
    os.sched_setaffinity(0, {core})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except PermissionError:
        return
    stalls: list[tuple[float, float]] = []
    while True:
        began_s = time.monotonic()
        over = select.select([sys.stdin], [], [], _EVERY_S)[0]
        now_s = time.monotonic()
        if over:
            break
        if now_s - began_s > _EVERY_S + _HELD_UP_S:
            stalls.append((began_s, now_s))
    print(json.dumps(stalls))


if __name__ == "__main__":
    main(int(sys.argv[1]))
