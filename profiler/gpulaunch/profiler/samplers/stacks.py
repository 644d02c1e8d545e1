"""Where ranks are in their programs: now and then the stack of one rank's main thread, counted by phase.

A thread of its own, because the process that is looked into may be in any state, and a look may take its time. It looks
into one rank after the other, into each of them twice a second. But after each look it rests for as long as that look's
price asks for, so all of it together - reading, or py-spy's CPU, and the writing of the file - stays below `BUDGET` of
one core, on a slow machine and with 256 ranks alike. Rests vary, so that they do not keep step with the steps.

The stacks are in `stacks.folded` of the run directory, which every sidecar of the run goes on with, and so does a later
run in the same directory.

What is sampled is time, not CPU time: a thread that waits is seen waiting. The sampler is nicer than the ranks; on a
machine without an idle core it gets its turn when they rest, and shows too much of that.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from gpulaunch.profiler.channel.ending import LOOK_ENDS_S
from gpulaunch.profiler.channel.layout import Hook, Word
from gpulaunch.profiler.channel.segment import SegmentReader
from gpulaunch.profiler.files import read_file
from gpulaunch.profiler.record import AttemptGroup, RankPlace, Reading, StackState
from gpulaunch.profiler.samplers.folded import STACKS_FILE, Folded, labels_of, load
from gpulaunch.profiler.samplers.peek import Peek, StackSampler
from gpulaunch.profiler.samplers.phases import phase_of
from gpulaunch.profiler.samplers.pyspy import Frame

BUDGET: Final = 0.003
"""Of one core, on the average: a third of what the whole sidecar may use."""

_SHORTEST_S: Final = 0.5
"""Between two looks into the same rank."""
_REFUSED_S: Final = 60.0
"""The longest rest after looks that failed: somebody may install py-spy, or permit ptrace, while the job runs."""
_REFUSALS: Final = 3
"""So many failures in a row are no accident."""
_SAVE_S: Final = 30.0
_STUCK_S: Final = 10.0


class Stacks:
    """Takes stacks while it is read."""

    def __init__(
        self,
        channel_dir: Path,
        group: Callable[[], AttemptGroup | None],
        *,
        sampler: StackSampler | None = None,
        heard: Callable[[RankPlace, str, Sequence[Frame]], None] | None = None,
        shortest_s: float = _SHORTEST_S,
        clock: Callable[[], float] = time.monotonic,
        goes_on: bool = True,
    ) -> None:
        """`heard` is told of every stack, by the sampling thread: whose, phase, frames (deepest first). `goes_on`: what
        is there already is of this run, and not of one before it in the directory."""
        self._goes_on = goes_on
        self._channel_dir = channel_dir
        self._group = group
        self._sampler: StackSampler = sampler or Peek()
        self._heard = heard
        self._shortest_s = shortest_s
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # around what follows: written by the thread, read by the sidecar's loop
        self._folded = Folded()
        self._path: Path | None = None
        self._errors: list[str] = []
        self._refusals = 0
        self._reason = ""
        self._cpu_s = 0.0
        self._turn_began_s: float | None = None
        # the thread's own
        self._turns = 0
        self._save_at_s = 0.0
        self._unsaved = False

    def read(self, now: float) -> Reading[StackState]:
        """Give what was sampled so far; never waits for a look. The first reading with a group starts the sampling."""
        absent = self._sampler.absent()
        if self._thread is None and not absent and self._group() is not None:
            thread = threading.Thread(target=self._run, name="stacks", daemon=True)
            thread.start()  # raises where no more threads are to be had: at the next reading there may be
            self._thread = thread
        with self._lock:
            errors, self._errors = self._errors, []
            if self._refusals >= _REFUSALS:
                absent = absent or self._reason
            if self._turn_began_s is not None and now - self._turn_began_s > _STUCK_S:
                absent = f"{self._sampler.name}: no answer for {now - self._turn_began_s:.0f} s"
            state = StackState(source=self._sampler.name, samples=self._folded.samples(), cpu_s=self._cpu_s)
        return Reading(values=state, absent=absent, errors=tuple(errors), late_s=self._clock() - now)

    def close(self) -> None:
        """Have the file written a last time; a look, or a file system, that hangs is left behind."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(LOOK_ENDS_S)

    # -- the thread

    def _run(self) -> None:
        self._open()
        rest = self._shortest_s
        used_s = time.thread_time()
        while not self._stop.wait(rest):
            with self._lock:
                self._turn_began_s = self._clock()
            cost_s = 0.0
            try:
                cost_s = self._turn()
                if self._unsaved and self._clock() >= self._save_at_s:
                    self._save()
            except Exception as error:  # a fault of ours: told, and tried again later
                self._fail(f"stacks: {type(error).__name__}")
            before_s, used_s = used_s, time.thread_time()
            cost_s += used_s - before_s
            self._turns += 1
            group = self._group()
            with self._lock:
                self._turn_began_s = None
                self._cpu_s += cost_s
                rest = rest_s(
                    cost_s,
                    self._turns,
                    num_ranks=0 if group is None else len(group.ranks),
                    refusals=self._refusals,
                    shortest_s=self._shortest_s,
                )
        self._save()

    def _open(self) -> None:
        """Find the run directory, and go on with the stacks that are there, if they are of this run."""
        try:
            document: Any = json.loads(read_file(self._channel_dir / "group.json"))
            path = Path(document["run_dir"]) / STACKS_FILE
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._fail(f"{STACKS_FILE}: no run directory ({type(error).__name__})")
            return
        before = Folded()
        try:
            if self._goes_on:
                load(path, before)
        except FileNotFoundError:
            pass
        except OSError as error:  # then it is not known what would be overwritten
            self._fail(f"{STACKS_FILE}: {error.strerror}")
            return
        with self._lock:
            self._folded, self._path = before, path

    def _turn(self) -> float:
        """Look into the rank whose turn it is; give the CPU seconds that other processes have used for it."""
        group = self._group()
        if group is None or not group.ranks:
            return 0.0
        place = group.ranks[self._turns % len(group.ranks)]
        before, _ = self._edge_of(place)
        look = self._sampler.look(place.pid)
        after, every_step = self._edge_of(place)
        if look.failed:
            self._fail(look.failed)
            return look.cpu_s
        phase = phase_of(look.frames, before, after, every_step=every_step)
        labels = labels_of(look.frames)
        with self._lock:
            self._refusals = 0
            if labels:
                self._folded.add(phase, labels)
                self._unsaved = True
        if labels and self._heard is not None:
            self._heard(place, phase, look.frames)
        return look.cpu_s

    def _edge_of(self, place: RankPlace) -> tuple[int, bool]:
        """The word LAST_EDGE of a rank's segment, and whether every step is observed; no edge, where it is not known.

        Opened anew each time: nobody needs the segments of 256 ranks held open twice.
        """
        with (
            contextlib.suppress(OSError, ValueError),
            SegmentReader(f"{self._channel_dir}/rank-{place.rank}.bin") as segment,
        ):
            return segment.word(Word.LAST_EDGE), not segment.word(Word.HOOKS_SHED) & Hook.EVERY_STEP
        return 0, True

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._refusals += 1
            self._reason = reason
            if self._refusals <= _REFUSALS:  # from then on it is absent, and that is told once
                self._errors.append(reason)

    def _save(self) -> None:
        self._save_at_s = self._clock() + _SAVE_S
        if self._path is None or not self._unsaved:
            return
        try:
            self._folded.save(self._path)  # without the lock: only this thread adds stacks
            self._unsaved = False
        except OSError as error:
            with self._lock:
                self._errors.append(f"{STACKS_FILE}: {error.strerror}")


def rest_s(
    cost_s: float, turn: int, *, num_ranks: int, refusals: int, shortest_s: float = _SHORTEST_S, budget: float = BUDGET
) -> float:
    """How long to rest after a look that has cost so much CPU.

    Args:
        cost_s: CPU seconds of the look.
        turn: its number.
        num_ranks: between how many ranks looks go round.
        refusals: how many looks in a row have failed.
        shortest_s: between two looks into the same rank, on the average.
        budget: how much of a core all looks may use.
    """
    shortest = shortest_s / max(1, num_ranks)
    if refusals >= _REFUSALS:
        shortest = min(_REFUSED_S, shortest_s * 2.0 ** min(refusals - _REFUSALS, 16))
    # Between a half and three halves, evenly spread, by multiples of the golden ratio: chance without a generator.
    return max(shortest, cost_s / budget) * (0.5 + turn * 0.6180339887498949 % 1.0)
