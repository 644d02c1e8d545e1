"""Programs that are run to be judged, and what others take of the cores meanwhile. Not a test module."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
OTHERS = 0.10
"""Of the cores; with more than this in the hands of others, a measurement may say nothing. With less it counts."""
CROWDED = 0.25
"""With more than this it says nothing."""
CALM_S = 180.0
CALM_IN_ALL_S = 900.0
"""Of waiting, for all tests of a session together."""
ATTEMPTS = 5
ENOUGH = 2
"""So many failures that count are no chance."""
MOST_AGAIN = 20
"""All tests of a session together measure so many times more: CI has an end."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a program took per step, and what was found in it."""

    step_ms: Mapping[int, float]
    """By rank; of those that time themselves."""
    output: str
    findings: list[dict[str, Any]]

    @property
    def rules(self) -> list[str]:
        return [found["rule"] for found in self.findings]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to run under gpulaunch."""

    path: Path
    args: tuple[str, ...] = ()
    ranks: int = 1
    env: Mapping[str, str] | None = None


Train = Callable[..., list[Trained]]
waited_s: list[float] = []


def fairly(measure: Callable[[], T], judge: Callable[[T], None]) -> None:
    """Measure, and judge what was measured; if that does not hold, some times more, when others leave us the cores.

    Two programs that are compared to within a third of their difference are now and then apart by more, on a machine
    that is not ours alone. So one failure may be chance, and any number of them where others had a part of the cores:
    other processes, or the host. But two, of measurements in which nobody else took the cores, are the program's own,
    whatever a third would say: a rule that is wrong four times in five would get through by its fifth.

    Where others have a good part of the cores the last time, too, nothing can be said here: what a program does to full
    cores is not to be told from what its neighbours do, and the rules do not try.

    Beside other tests there is no calm to wait for: the first failure counts, and `make test` asks again, alone.
    """
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        judge(measure())
        return
    calm = 0
    for attempt in range(ATTEMPTS):
        if attempt:
            wait_for_calm()
        cores = Cores()
        with Thefts() as thefts:
            measured = measure()
        taken = cores.taken_by_others()
        try:
            judge(measured)
        except (AssertionError, TypeError) as error:  # TypeError: a path is expected, and a finding has none
            calm += taken <= OTHERS and thefts.worst <= CROWDED
            told = f"attempt {attempt + 1}: others had {taken:.0%} of the cores; failures without them: {calm}"
            print(f"{told}\n{error}")
            error.add_note(told)
            if calm >= ENOUGH:
                raise
            if attempt == ATTEMPTS - 1 or len(waited_s) >= MOST_AGAIN:
                if taken <= CROWDED:
                    raise
                break
        else:
            return
    pytest.skip(f"others had {taken:.0%} of the cores, {attempt + 1} times")


def wait_for_calm() -> None:
    """Wait until others leave us the cores, but not for ever."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + min(CALM_S, CALM_IN_ALL_S - sum(waited_s)):
        cores = Cores()
        time.sleep(2.0)
        if cores.taken_by_others() <= OTHERS:
            break
    waited_s.append(time.monotonic() - began_s)


class Thefts:
    """How much of the cores the host took, in the worst two seconds of a block: little of a minute may spoil it."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Thefts:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        before_s, at_s = stolen_s(), time.monotonic()
        while not self.over.wait(2.0):
            now_s, then_s, at_s = stolen_s(), at_s, time.monotonic()
            self.worst = max(self.worst, (now_s - before_s) / (at_s - then_s) / (os.cpu_count() or 1))
            before_s = now_s


def stolen_s() -> float:
    """CPU seconds that the host has kept from this machine since it booted (proc(5))."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


class Cores:
    """The cores that we may use, from now on: who used them?"""

    def __init__(self) -> None:
        self._busy_s, self._idle_s, self._ours_s = self._look()

    def taken_by_others(self) -> float:
        """The share of their time that went neither to us, nor to what we started and have waited for, nor was idle."""
        busy_s, idle_s, ours_s = self._look()
        used_s, unused_s = busy_s - self._busy_s, idle_s - self._idle_s
        return max(0.0, used_s - (ours_s - self._ours_s)) / max(used_s + unused_s, 1e-9)

    def _look(self) -> tuple[float, float, float]:
        busy = idle = 0
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in cores:
                # proc(5): user nice system idle iowait irq softirq steal; guests are in user already
                idle += int(ticks[3]) + int(ticks[4])
                busy += sum(map(int, ticks[:8])) - int(ticks[3]) - int(ticks[4])
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        return busy / ticks_per_s, idle / ticks_per_s, sum(os.times()[:4])
