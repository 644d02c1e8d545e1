"""The stack sampler: periodically samples the stack of each rank's main thread and counts stacks by phase.

It runs in its own thread, because the sampled process may be in any state, and a sample may take long. It samples one
rank after the other, twenty times a second in all. But once `CREDIT_S` is used up, it pauses after each sample in
proportion to that sample's CPU time, so its total - reading, or py-spy's CPU, and the writing of the file - stays below
`BUDGET` of one core, also on a slow machine or with 256 ranks. Pauses vary, so that they do not synchronise with the
steps.

The stacks are in `stacks.folded` in the run directory, which every sidecar of the run continues, and so does a later
run in the same directory.

Samples measure time, not CPU time: a waiting thread is sampled, too. The sampler has a higher nice value than the
ranks; on a machine without an idle core it runs when they wait, and over-represents that.
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
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import StepTotals
from gpulaunch.profiler.channel.segment import SegmentReader
from gpulaunch.profiler.files import read_file
from gpulaunch.profiler.record import AttemptGroup, RankPlace, Reading, StackState
from gpulaunch.profiler.samplers.folded import STACKS_FILE, Folded, labels_of, load
from gpulaunch.profiler.samplers.peek import Peek, StackSampler
from gpulaunch.profiler.samplers.phases import STARTUP, phase_of
from gpulaunch.profiler.samplers.pyspy import Look
from gpulaunch.profiler.stack import Frame

BUDGET: Final = 0.003
"""Of one core, on average: a third of what the whole sidecar may use."""

CREDIT_S: Final = 0.8
"""CPU seconds beyond that, from the first step on: a short run is to have enough samples to name a line, and to tell
what it costs: the share of one that holds a third of the steps has a standard error of 7 % after 20 s. A sample takes
0.6 ms, and 2 ms beside a program that trains, which leaves the caches cold: 0.4 s were 200 samples."""
_LONGEST_BEFORE_STEPS_S: Final = 5.0
"""Between samples before the first step, until they have cost `CREDIT_S`: the credit begins with a sample after it."""
_SHORTEST_S: Final = 0.05
"""Between two samples, of whatever ranks."""
_TURNS_OF_A_WORKER: Final = 10
"""Samples of a worker in a row: the first one costs ten times as much as the next ones."""
_REFUSED_S: Final = 60.0
"""The longest pause after failed samples: py-spy may be installed, or ptrace permitted, while the job runs."""
_REFUSALS: Final = 3
"""Failures in a row from which on the sampler counts as absent."""
_SAVE_S: Final = 30.0
_STUCK_S: Final = 10.0


class Stacks:
    """Samples stacks while it is being read."""

    def __init__(
        self,
        channel_dir: Path,
        group: Callable[[], AttemptGroup | None],
        *,
        sampler: StackSampler | None = None,
        heard: Callable[[RankPlace, str, Look], None] | None = None,
        workers: Callable[[int], Sequence[int]] = lambda _: (),
        heard_worker: Callable[[RankPlace, Sequence[Frame]], None] | None = None,
        shortest_s: float = _SHORTEST_S,
        clock: Callable[[], float] = time.monotonic,
        goes_on: bool = True,
    ) -> None:
        """`heard`: called by the sampling thread with rank, phase and stack of every sample that has one.
        `workers`: the pids of the dataloader workers of a rank, one of which is sampled at each turn of it;
        `heard_worker`: called with its frames.
        `goes_on`: existing stacks are of this run, not of an earlier one in the directory."""
        self._goes_on = goes_on
        self._channel_dir = channel_dir
        self._group = group
        self._sampler: StackSampler = sampler or Peek()
        self._heard = heard
        self._workers = workers
        self._heard_worker = heard_worker
        self._shortest_s = shortest_s
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the fields below: written by the thread, read by the sidecar's loop
        self._folded = Folded()
        self._path: Path | None = None
        self._errors: list[str] = []
        self._refusals = 0
        self._reason = ""
        self._cpu_s = 0.0
        self._turn_began_s: float | None = None
        # used by the thread only
        self._turns = 0
        self._allowance = Allowance(clock())
        self._save_at_s = 0.0
        self._unsaved = False

    def read(self, now: float) -> Reading[StackState]:
        """Return the samples so far; never waits for a sample. The first reading with a group starts the sampling."""
        absent = self._sampler.absent()
        if self._thread is None and not absent and self._group() is not None:
            thread = threading.Thread(target=self._run, name="stacks", daemon=True)
            thread.start()  # raises if no more threads are available; retried at the next reading
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
        """Have the file written a last time; does not wait for a hung sample or file system."""
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
            except Exception as error:  # a bug of ours: reported, and retried later
                self._fail(f"stacks: {type(error).__name__}")
            before_s, used_s = used_s, time.thread_time()
            cost_s += used_s - before_s
            self._turns += 1
            with self._lock:
                self._turn_began_s = None
                self._cpu_s += cost_s
                rest = rest_s(
                    self._allowance.owed_s(cost_s, self._clock()),
                    self._turns,
                    refusals=self._refusals,
                    shortest_s=self._shortest_s,
                )
        self._save()

    def _open(self) -> None:
        """Find the run directory, and load its stacks if they are of this run."""
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
        except OSError as error:  # then it is unknown what would be overwritten
            self._fail(f"{STACKS_FILE}: {error.strerror}")
            return
        with self._lock:
            self._folded, self._path = before, path

    def _turn(self) -> float:
        """Sample the next rank; return the CPU seconds that other processes have used for it."""
        group = self._group()
        if group is None or not group.ranks:
            return 0.0
        place = group.ranks[self._turns % len(group.ranks)]
        with contextlib.ExitStack() as opened:
            # Opened each time, to avoid keeping the segments of 256 ranks open twice.
            segment: SegmentReader | None = None
            with contextlib.suppress(OSError, ValueError):
                segment = opened.enter_context(SegmentReader(f"{self._channel_dir}/rank-{place.rank}.bin"))
            before, _ = _edge_of(segment)
            look = self._sampler.look(place.pid)
            after, every_step = _edge_of(segment)
        if look.failed:
            self._fail(look.failed)
            return look.cpu_s
        phase = phase_of(look.frames, before, after, every_step=every_step)
        if phase != STARTUP:
            self._allowance.extend()
        labels = labels_of(look.frames)
        with self._lock:
            self._refusals = 0
            if labels:
                self._folded.add(phase, labels)
                self._unsaved = True
        if labels and self._heard is not None:
            self._heard(place, phase, look)
        return look.cpu_s + self._sample_worker(place, self._turns // len(group.ranks))

    def _sample_worker(self, place: RankPlace, turn: int) -> float:
        """Sample a worker of a rank; return the same as `_turn`."""
        if self._heard_worker is None or not (pids := self._workers(place.rank)):
            return 0.0
        look = self._sampler.look(pids[turn // _TURNS_OF_A_WORKER % len(pids)])
        if look.frames:
            self._heard_worker(place, look.frames)
        return look.cpu_s

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._refusals += 1
            self._reason = reason
            if self._refusals <= _REFUSALS:  # beyond that it is absent, which is reported once
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


def _edge_of(segment: SegmentReader | None) -> tuple[int, bool]:
    """The word LAST_EDGE of a rank's segment, and whether all steps were observed; no edge if it is not known."""
    if segment is not None:
        with contextlib.suppress(OSError, ValueError):
            return segment.word(Word.LAST_EDGE), not segment.word(StepTotals.unobserved_steps)
    return 0, True


class Allowance:
    """The CPU seconds that samples may use: what is not used is kept, up to `CREDIT_S`."""

    def __init__(self, now_s: float) -> None:
        self._left_s = 0.0
        self._at_s = now_s
        self._extended = False
        self._before_steps_s = 0.0

    def extend(self) -> None:
        """Add `CREDIT_S`, once."""
        if not self._extended:
            self._extended = True
            self._left_s = CREDIT_S

    def owed_s(self, cost_s: float, now_s: float) -> float:
        """Take the cost of a sample; return how much more than allowed was used so far."""
        self._left_s = min(CREDIT_S, self._left_s + BUDGET * (now_s - self._at_s)) - cost_s
        self._at_s = now_s
        if not self._extended:
            self._before_steps_s += cost_s
            if self._before_steps_s <= CREDIT_S:
                self._left_s = max(self._left_s, -BUDGET * _LONGEST_BEFORE_STEPS_S)
        return max(0.0, -self._left_s)


def rest_s(
    owed_s: float, turn: int, *, refusals: int, shortest_s: float = _SHORTEST_S, budget: float = BUDGET
) -> float:
    """How long to pause after a sample.

    Args:
        owed_s: CPU seconds beyond what is allowed so far.
        turn: its number.
        refusals: how many samples in a row have failed.
        shortest_s: between two samples, on average.
        budget: how much of a core all samples may use.
    """
    if refusals >= _REFUSALS:
        shortest_s = min(_REFUSED_S, shortest_s * 2.0 ** min(refusals - _REFUSALS + 1, 16))
    # Between a half and three halves, evenly spread, by multiples of the golden ratio: needs no random generator.
    return max(shortest_s, owed_s / budget) * (0.5 + turn * 0.6180339887498949 % 1.0)
