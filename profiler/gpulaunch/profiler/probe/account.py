"""Accounts the time of training steps by phase, for `step`; pure.

The current step is a list of parts, one for each phase. When it ends they are added to the totals, which are the
segment's, and emitted as a record. `other` is the rest of a step after the named phases, so the parts always sum to the
step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, STEP_BOUNDS_NS, StepSource, Word, in_steps

# A phase is 1 + its index in PHASES; 0 is none.
_PARTS: Final = 1 + len(PHASES)
(
    NO_PHASE,
    DATA_WAIT,
    H2D,
    FORWARD,
    BACKWARD,
    COMM,
    OPTIMIZER,
    SYNC,
    CHECKPOINT,
    COMPILE,
    GC,
    VALIDATION,
    OTHER,
) = range(_PARTS)

# Their positions, and those of other step counters, in `Account.totals`; a phase: its number plus this.
_PHASE: Final = in_steps(Word.DATA_WAIT_NS_TOTAL) - DATA_WAIT
_STEPS: Final = in_steps(Word.STEPS)
_MICROSTEPS: Final = in_steps(Word.MICROSTEPS)
_SKIPPED: Final = in_steps(Word.SKIPPED_STEPS)
_SAMPLES: Final = in_steps(Word.SAMPLES)
_DURATION: Final = in_steps(Word.STEP_NS_TOTAL)
_LAST_STEP: Final = in_steps(Word.LAST_STEP_MONOTONIC_NS)
_SOURCE: Final = in_steps(Word.STEP_SOURCE)
_PROBE: Final = in_steps(Word.PROBE_NS_TOTAL)

_STEADY: Final = (DATA_WAIT, H2D, FORWARD, BACKWARD, COMM, OPTIMIZER, SYNC)
"""Phases that every step has, or none."""

MOST_NOTES: Final = 4096
"""Maximum number of notes that wait to be processed."""

Record = tuple[int, ...]
"""One step: start_ns, duration_ns, each phase in ns but the last (which is the rest), samples."""


def bucket_of(duration_ns: int) -> tuple[int, int, int]:
    """Return the bucket of a duration (`STEP_BOUNDS_NS`), and the bounds of that bucket: exclusive lower, inclusive
    upper."""
    bucket = bisect_left(STEP_BOUNDS_NS, duration_ns)
    first = STEP_BOUNDS_NS[bucket - 1] if bucket else -1
    return bucket, first, STEP_BOUNDS_NS[bucket] if bucket < len(STEP_BOUNDS_NS) else 1 << 64


class Account:
    """The time of one thread's steps, in nanoseconds of any one monotonic clock.

    A nested interval may be noted before an edge that was passed earlier, because Python may collect garbage between
    the clock reading and the note. So `_edge_ns` may be later than the time of an edge. It never goes back: the time up
    to it is assigned to a phase, and each advance adds to one phase.
    """

    __slots__ = (
        "_calls_grad",
        "_edge_ns",
        "_forced",
        "_idle_pending",
        "_last_micro",
        "_micro",
        "_parts",
        "_samples",
        "_start_ns",
        "_wait_pending",
        "exposed_ns",
        "microsteps",
        "nested_ns",
        "notes",
        "on_step",
        "on_steps",
        "optimized",
        "overhead_ns",
        "skipped_steps",
        "source",
        "totals",
    )

    def __init__(self, on_step: Callable[[int, Record], None]) -> None:
        self.on_step = on_step
        self.on_steps: Callable[[list[Record]], None] = self._each
        """Called with the records of successive steps that have ended, if several are reported at once."""
        self.source = StepSource.NONE
        self.microsteps = 0
        self.optimized = 0
        """Number of steps of any optimizer; incremented by the code that observes them."""
        self.skipped_steps = 0
        """Steps skipped by a gradient scaler."""
        self.notes: list[int] = []
        """Notes not yet processed (`NotedSteps.catch_up`)."""
        self.nested_ns = 0
        """How long nested intervals have taken so far, each without those inside it."""
        self.exposed_ns = 0
        """The part of a step's backward that is known to be a wait for other ranks' gradients."""
        self.overhead_ns = 0
        """Overhead of the probe so far, set by its caller; it is only published with the totals."""
        self.totals = [0] * (_PROBE + 1)
        """The segment's words STEPS..PROBE_NS_TOTAL as of the last step that has ended."""

        # the current step
        self._start_ns = 0
        self._edge_ns = 0
        self._parts = [0] * _PARTS  # indexed by phase; unassigned time ends up in "other" by subtraction
        self._samples = 0
        self._micro = 0  # backwards that accumulate gradients, outside an optimizer's closure
        self._calls_grad = False
        self._forced = NO_PHASE  # the phase that the user has named

        # batches fetched and not yet known to be for training: the wait for them, and the time between them
        self._wait_pending = 0
        self._idle_pending = 0

        self._last_micro = 0  # micro-steps of the last step, 0: there was none

    def begin(self, now_ns: int) -> None:
        """The first step starts here; earlier events do not count."""
        self._start_ns = self._edge_ns = now_ns
        self._parts = [0] * _PARTS
        self._samples = self._micro = self._wait_pending = self._idle_pending = 0
        self._calls_grad = False
        self._forced = NO_PHASE

    def nest(self, phase: int, began_ns: int, now_ns: int, nested_before_ns: int) -> int:
        """Assign the time between these instants to `phase` instead of the phase around it, except intervals nested
        inside it. Any thread may call this at any time, also during any other method.

        Args:
            phase: 1 + its index in PHASES.
            began_ns: when it began.
            now_ns: the time now.
            nested_before_ns: `nested_ns` when it began.

        Returns:
            How long it was, without what was nested inside it.
        """
        own_ns = now_ns - began_ns - self.nested_ns + nested_before_ns
        if own_ns <= 0:
            return 0
        self.nested_ns += own_ns
        if len(self.notes) < MOST_NOTES:  # else no edge was passed for a long time
            self.notes += (now_ns << REGION_BITS, own_ns, phase)
        return own_ns

    def _take_out(self, phase: int, now_ns: int, own_ns: int) -> None:
        """Assign this much of the time up to now to `phase`."""
        taken_ns = now_ns - self._edge_ns  # if an edge was passed in between, time up to it has its phase already
        if taken_ns > own_ns:
            taken_ns = own_ns
        if taken_ns > 0:
            self._parts[self._forced or phase] += taken_ns
            self._edge_ns += taken_ns

    def unobserved(self, end_ns: int, steps: int, samples: int, microsteps: int, like_ns: Sequence[int]) -> None:
        """Steps were made that were not observed, since the last observed one.

        Args:
            end_ns: when the last of them ended.
            steps: how many there were.
            samples: samples in their batches.
            microsteps: their number of micro-steps.
            like_ns: how long the same number of observed steps took: in total, and by phase. These steps are assumed to
                have the same times per phase, scaled down if they were shorter; any excess is "other".
        """
        took_ns = max(0, end_ns - self._edge_ns)
        of_all_ns = max(1, like_ns[0], took_ns)
        parts = [0] * _PARTS
        for phase in _STEADY:
            parts[phase] = like_ns[phase] * took_ns // of_all_ns
        # In the observed steps, DDP's exposed time was moved to comm; `_close` does that again.
        exposed_ns = min(steps * self.exposed_ns, parts[COMM])
        parts[BACKWARD] += exposed_ns
        parts[COMM] -= exposed_ns
        self.microsteps += microsteps
        self._parts = parts
        self._edge_ns = end_ns
        self._samples += samples
        self._close(steps)

    def _close_plain(self, edges: Sequence[tuple[int, int, int, int, int, int]], samples: int, notes: int) -> None:
        """Enter steps with exactly six edges each, at these times: all at once, which takes a third of the time of
        entering them one by one. No step is in progress before the first.

        Args:
            edges: of each step: request and arrival of its batch, start and end of its backward and its optimizer.
            samples: in each batch.
            notes: how many of the notes these were; they are removed.
        """
        start_ns = self._start_ns
        before_ns = start_ns
        exposed_ns = self.exposed_ns
        waits = forwards = backwards = comms = optimizers = 0
        records: list[Record] = []
        for asked_ns, handed_ns, began_ns, done_ns, steps_ns, end_ns in edges:
            wait, forward, backward = handed_ns - asked_ns, began_ns - handed_ns, done_ns - began_ns
            optimizer = end_ns - steps_ns
            comm = exposed_ns if exposed_ns < backward else backward
            backward -= comm
            waits += wait
            forwards += forward
            backwards += backward
            comms += comm
            optimizers += optimizer
            records.append(
                (start_ns, end_ns - start_ns, wait, 0, forward, backward, comm, optimizer, 0, 0, 0, 0, 0, samples)
            )
            start_ns = end_ns
        del self.notes[:notes]
        self._start_ns = self._edge_ns = start_ns
        self.microsteps += len(records)
        self._last_micro = 1
        took_ns = start_ns - before_ns
        totals = self.totals
        totals[_STEPS] += len(records)
        totals[_MICROSTEPS] = self.microsteps
        totals[_SKIPPED] = self.skipped_steps
        totals[_SAMPLES] += samples * len(records)
        totals[_DURATION] += took_ns
        totals[_PHASE + DATA_WAIT] += waits
        totals[_PHASE + FORWARD] += forwards
        totals[_PHASE + BACKWARD] += backwards
        totals[_PHASE + COMM] += comms
        totals[_PHASE + OPTIMIZER] += optimizers
        totals[_PHASE + OTHER] += took_ns - waits - forwards - backwards - comms - optimizers
        totals[_LAST_STEP] = start_ns
        totals[_SOURCE] = self.source
        totals[_PROBE] = self.overhead_ns
        self.on_steps(records)

    def _each(self, records: list[Record]) -> None:
        for record in records:
            self.on_step(1, record)

    def outside(self, now_ns: int) -> None:
        """The time since the last edge belongs to no phase."""
        self._pass(now_ns, OTHER)

    def _pass(self, now_ns: int, phase: int) -> None:
        """The time since the last edge belongs to `phase`, unless the user has named another.

        The edges of every step have this inlined, without "other", which `_close` computes from the rest. Calls are
        the main overhead of an edge: this and positional arguments saved 1.5 us per step.
        """
        if now_ns > self._edge_ns:
            self._parts[self._forced or phase] += now_ns - self._edge_ns
            self._edge_ns = now_ns

    def _close(self, count: int) -> None:
        """End the current step at the last edge, as `count` steps of equal length."""
        end_ns = self._edge_ns
        parts, self._parts = self._parts, [0] * _PARTS
        start_ns, self._start_ns = self._start_ns, end_ns
        _, wait, h2d, forward, backward, comm, optimizer, sync, saving, compiling, collecting, validation, _ = parts
        wait += self._wait_pending  # fetched ahead, for the next step, but in this one's time
        samples = self._samples
        self._wait_pending = self._idle_pending = self._samples = self._micro = 0
        self._calls_grad = False
        if self.exposed_ns:
            exposed_ns = min(count * self.exposed_ns, backward)
            backward -= exposed_ns
            comm += exposed_ns

        # Inlined: with map, sum and slices it takes 1.5 times as long.
        duration_ns = end_ns - start_ns
        other = duration_ns - wait - forward - backward - optimizer
        totals = self.totals
        totals[_STEPS] += count
        totals[_MICROSTEPS] = self.microsteps
        totals[_SKIPPED] = self.skipped_steps
        totals[_SAMPLES] += samples
        totals[_DURATION] += duration_ns
        totals[_PHASE + DATA_WAIT] += wait
        totals[_PHASE + FORWARD] += forward
        totals[_PHASE + BACKWARD] += backward
        totals[_PHASE + OPTIMIZER] += optimizer
        rare = h2d or comm or sync or saving or compiling or collecting or validation or count > 1
        if rare:
            other -= h2d + comm + sync + saving + compiling + collecting + validation
            totals[_PHASE + H2D] += h2d
            totals[_PHASE + COMM] += comm
            totals[_PHASE + SYNC] += sync
            totals[_PHASE + CHECKPOINT] += saving
            totals[_PHASE + COMPILE] += compiling
            totals[_PHASE + GC] += collecting
            totals[_PHASE + VALIDATION] += validation
        totals[_PHASE + OTHER] += other
        totals[_LAST_STEP] = end_ns
        totals[_SOURCE] = self.source
        totals[_PROBE] = self.overhead_ns
        if not rare:  # as in most steps: computing it from the parts takes twice as long
            self.on_step(
                1,
                (start_ns, duration_ns, wait, 0, forward, backward, 0, optimizer, 0, 0, 0, 0, 0, samples),
            )
            return
        parts = [wait, h2d, forward, backward, comm, optimizer, sync, saving, compiling, collecting, validation]
        if count > 1:
            duration_ns //= count
            parts = [ns // count for ns in parts]
            samples //= count
        self.on_step(count, (end_ns - duration_ns, duration_ns, *parts, samples))
