"""Processes the edges of observed steps: notes them while steps are plain, and publishes each group of steps.

The taps pass edges to it, in the training thread. The results are in the segment.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import REGION_BITS, Hook, Region, StepSource, Word, in_steps
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.batch import LoaderWatch
from gpulaunch.profiler.probe.budget import BLOCK
from gpulaunch.profiler.probe.cost import Cost
from gpulaunch.profiler.probe.noted import COUNTED
from gpulaunch.profiler.probe.publish import Publisher
from gpulaunch.profiler.probe.service import Service
from gpulaunch.profiler.probe.training_thread import NO_THREAD, UNOBSERVED
from gpulaunch.profiler.probe.user_signals import raised_by_program

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.gpu_time import GpuClock
    from gpulaunch.profiler.probe.unobserved import UnobservedSteps


LOOKS_EVERY_NS: Final = 1_000_000_000
"""Interval of the work that is done once a second, at the next end of a step."""
_LATEST_NS: Final = 250_000_000  # notes are processed by then, if the program continues
_PLAIN_FROM: Final = 8  # consecutive steps, each with only the edge that ends it
_LAST_EDGE: Final = int(Word.LAST_EDGE)
_STEPS_MADE: Final = int(Word.STEPS_MADE)
_LAST_STEP: Final = in_steps(Word.LAST_STEP_MONOTONIC_NS)
_FORWARD: Final = int(Region.FORWARD)
_BY_OPTIMIZER: Final = StepSource.OPTIMIZER


class ObservedSteps(Service):
    """The edges of one rank's training thread, and the parts of its probe that are in service."""

    __slots__ = (
        "_catches_up",
        "_due_ns",
        "_ended",
        "_loader_thread",
        "_plain",
        "_settled",
        "clock",
        "closely",
        "cost",
        "late_ns",
        "loader",
        "machine",
        "pivot",
        "steps",
        "tell",
        "thread",
        "times",
        "turn",
        "unobserved",
    )

    unobserved: UnobservedSteps
    """The unobserved steps; set by the subclass."""

    def __init__(self, writer: SegmentWriter, torch: Any = None) -> None:
        super().__init__(writer)
        self.machine = Publisher(writer).machine
        self.loader = LoaderWatch(writer, self.unavailable, getattr(torch, "Tensor", type(None)))
        self.machine.on_evaluated = self.loader.evaluated
        self.machine.on_batch = self.loader.plain
        self.loader.before_change = self._catch_up_here
        self.thread = NO_THREAD
        """The training thread (its `get_ident`), or a value of `training_thread`."""
        self._loader_thread = NO_THREAD  # the thread that substitutes for it
        self._catches_up = False
        self._plain = 0  # consecutive plain steps
        self._settled = self._ended = 0  # steps, and steps of optimizers, when the last of them were published
        self._due_ns = 0
        self.pivot = 0
        """The optimizer (its `id`) whose edges may be noted; 0: none, each edge is processed at once."""
        self.steps = self.turn = 0
        """While there is one: the number of steps that have ended, and that at which `catch_up` must be called."""
        self.late_ns = 0
        """When `catch_up` must be called at the latest."""
        self.tell: Callable[[int], object] = self._take_up
        """Called with the time of an edge of the training thread and the region after it, as in LAST_EDGE."""
        self.cost = Cost()
        self.clock: GpuClock | None = None
        """The clock that times phases on the GPU, if any; set by its owner."""
        self.times = False
        """Whether the current step is timed on the GPU."""
        self.closely = False
        """Whether it is, or its cost is measured: `attend` must be called."""

    def is_training(self) -> bool:
        """True on the training thread or its substitute."""
        return get_ident() == (self.thread or self._loader_thread)

    def catch_up(self, apart: bool = False) -> int:
        """Process the notes of the training thread, and do the work at the end of steps. On that thread only.

        Args:
            apart: its duration is in no span reported to `attend`.

        Returns:
            The region after the last edge that was noted; 0 if there was none.
        """
        if self._catches_up:
            return 0  # a signal handler of the program ran in between
        self._catches_up = True
        try:
            machine = self.machine
            began_ns = monotonic_ns()
            region = machine.catch_up()
            steps = machine.totals[0]
            if steps != self._settled:
                self._settle(steps, steps - self._settled)
            elif machine.optimized != self._ended:
                self._take_each()  # it ended no step: it belongs to another thread, or is wrapped
            self.late_ns = began_ns + _LATEST_NS
            if apart:
                machine.overhead_ns += monotonic_ns() - began_ns
        finally:
            self._catches_up = False
        return region

    def _catch_up_here(self) -> None:
        """The same, on any thread: on others nothing is done."""
        if self.is_training():
            self.catch_up()

    def edge(self, now_ns: int, region: int) -> None:
        """The training thread has passed an edge that was not noted, after `catch_up`."""
        self._at(now_ns, region)
        self.catch_up()

    def handed(self, now_ns: int, samples: int, trains: bool, dataset: int) -> None:
        """The training thread received a batch that is not plain: see `StepMachine.loader_exit`."""
        machine = self.machine
        if trains and self.pivot and samples == machine.samples and dataset == machine.dataset:
            self._at(now_ns, _FORWARD)
            self.tell(now_ns << REGION_BITS | COUNTED)
            return
        self.catch_up()
        machine.samples, machine.dataset = samples, dataset
        self.edge(now_ns, machine.loader_exit(now_ns, samples, trains, dataset))

    def _take_up(self, note: int) -> None:
        """Process an edge immediately."""
        self.machine.notes.append(note)
        region = self.catch_up()
        if region:
            self._at(note >> REGION_BITS, region)

    def _settle(self, steps: int, observed: int) -> None:
        """Step number `steps` has ended and is published; `observed` of the steps since the last call were observed."""
        machine = self.machine
        machine.overhead_ns += self.cost.settle(self._settled, steps, observed)
        if self.clock is not None and steps != self._settled:
            try:
                self.times = self.clock.step(steps)
            except Exception as error:
                self._untimed(error)
        now_ns = machine.totals[_LAST_STEP]
        if now_ns >= self._due_ns:
            self._look_around(now_ns)
        if steps >= self.unobserved.turn:
            self.unobserved.begin(steps)
            if self.thread == UNOBSERVED and self.clock is not None:
                self.clock.drop()
                self.times = False
        self.closely = self.cost.measures or self.times
        if machine.source is _BY_OPTIMIZER and machine.optimized - self._ended == observed:
            self._plain += observed
            if self._plain >= _PLAIN_FROM:
                self.pivot, self.tell = machine.pivot, machine.notes.append
                self.steps = steps
                self.turn = steps + 1 if self.times else min(self.unobserved.turn, steps - steps % BLOCK + BLOCK)
        else:
            self._take_each()
        self._settled, self._ended = steps, machine.optimized

    def _take_each(self) -> None:
        """The next edges are not predictable: each is processed immediately."""
        if self.pivot:
            self.writer.words[_STEPS_MADE] = 0
        self._plain = self.pivot = 0
        self.tell = self._take_up
        self._ended = self.machine.optimized

    def attend(self, phase: int, began_ns: int) -> None:
        """A phase begins, in a step that is timed on the GPU or measured; its handling started at this time."""
        if self.times and self.clock is not None:
            try:
                self.clock.edge(phase)
            except Exception as error:
                self._untimed(error)
        if self.cost.measures:
            self.cost.spent(began_ns)

    def observe_again(self, steps: int) -> None:
        """Unobserved steps were made and published; `steps` have ended now."""
        self._ended = self.machine.optimized
        self._settle(steps, 0)

    def _at(self, now_ns: int, region: int) -> None:
        """The training thread has passed an edge. The taps have this inlined: `edge` is the word, 3 the bits."""
        self.writer.words[_LAST_EDGE] = now_ns << REGION_BITS | region

    def _look_around(self, now_ns: int) -> None:
        """Work done once a second."""
        self._due_ns = now_ns + LOOKS_EVERY_NS
        self.unobserved.look(now_ns, self.cost.calls_ns)
        self.call_each()
        self.loader.flush()
        facts.flush()

    def _stop_clock(self) -> None:
        """Stop timing phases on the GPU."""
        clock, self.clock, self.times = self.clock, None, False
        if clock is not None:
            with suppress(Exception):
                clock.drop()  # other users of it stop as well

    def _untimed(self, error: Exception) -> None:
        """The timing of phases on the GPU failed."""
        if raised_by_program(error):
            raise error
        self._stop_clock()
        self.unavailable(Hook.GPU_TIME, repr(error))
