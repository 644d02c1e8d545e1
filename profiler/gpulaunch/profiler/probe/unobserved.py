"""Handles steps that are not observed, while only some blocks of steps are (`budget`).

In such a step the taps pass everything through. Three things are still done: batches are counted, the end of the step
is noted, and rare events of the program - a save, an evaluation, the end of an epoch - end the block, because their
time must be observed. The taps have the handling of a plain batch and a plain step inlined.

The phases of these steps are unknown. They are reported as equal to those of the steps observed before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final, Protocol

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Region, Word, in_steps
from gpulaunch.profiler.channel.quantities import StepTotals
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe.account import CHECKPOINT, COMPILE, GC, VALIDATION
from gpulaunch.profiler.probe.batch import LoaderWatch
from gpulaunch.profiler.probe.budget import BLOCK, NEVER, Budget, Totals, budget_ppm, next_turn
from gpulaunch.profiler.probe.noted import NotedSteps
from gpulaunch.profiler.probe.training_thread import OFF, UNOBSERVED

_MOST_OTHERS: Final = 4  # steps of other optimizers in a step, besides the one that ends it
_LONGEST_NS: Final = 4_000_000_000  # twice the expected duration of the unobserved blocks
_PUBLISHED_EVERY_NS: Final = 100_000_000  # readers read a few times a second
_LAST_EDGE: Final = int(Word.LAST_EDGE)
_OTHER: Final = int(Region.OTHER)
_FORWARD: Final = int(Region.FORWARD)
_MICROSTEPS: Final = in_steps(Word.MICROSTEPS)
_LAST_STEP: Final = in_steps(Word.LAST_STEP_MONOTONIC_NS)
_DURATION: Final = in_steps(Word.STEP_NS_TOTAL)
_NOW_AND_THEN: Final = (CHECKPOINT, COMPILE, GC, VALIDATION)


class Owner(Protocol):
    """The interface of a probe for its unobserved steps; see `state.Probe`."""

    thread: int
    writer: SegmentWriter
    machine: NotedSteps
    loader: LoaderWatch

    def adopts(self, now_ns: int) -> bool:
        """A thread that is not the training thread trains."""
        ...

    def edge(self, now_ns: int, region: int) -> None:
        """The training thread has passed an edge."""

    def loader_end(self) -> None:
        """The dataloader has no more batches."""

    def observe_again(self, steps: int) -> None:
        """`steps` have ended, and the next ones are observed."""

    def fail(self, error: Exception) -> None:
        """Our own fault: stop observing."""


class UnobservedSteps:
    """The unobserved steps of a probe."""

    __slots__ = (
        "_before",
        "_budget",
        "_like_ns",
        "_like_steps",
        "_micro",
        "_others",
        "_others_at",
        "_probe",
        "_samples",
        "_until",
        "_words",
        "begun",
        "due",
        "ends_ns",
        "pivot",
        "thread",
        "turn",
        "until_ns",
    )

    def __init__(self, probe: Owner) -> None:
        self._probe = probe
        self._words = probe.writer.words
        self._budget = Budget(budget_ppm(os.environ.get("GPULAUNCH_PROFILE_BUDGET", "")))
        self._words[StepTotals.budget_ppm] = self._budget.ppm
        self._before = list(probe.machine.totals)  # the machine's totals when the steps before started to be observed
        self._like_ns: list[int] = []  # their duration: total, and by phase
        self._like_steps = 1  # their number
        self._micro = 0  # and their micro-steps
        self._until = 0  # after this many steps they are observed again
        self._samples = 0  # of the block: in batches that were not plain
        self._others = self._others_at = 0  # steps of other optimizers in a step, and how many steps had ended then
        self.thread = 0
        """The thread that makes unobserved steps."""
        self.ends_ns: list[int] = []
        """When the steps ended that are not published yet."""
        self.due = BLOCK
        """Number of them after which `over` is called."""
        self.pivot = 0
        """The optimizer (its `id`) that ends them; 0: the user marks their ends."""
        self.begun = False
        """Whether it is stepping: a class and its base may both be hooked, and report twice."""
        self.until_ns = 0
        """When steps are observed again at the latest."""
        self.turn = NEVER
        """The number of steps at which `begin` is to be called."""

    def look(self, now_ns: int, calls_ns: int) -> None:
        """Check what the probe costs; called about once a second.

        Args:
            now_ns: the time now.
            calls_ns: the cost of calling the taps in each step.
        """
        machine = self._probe.machine
        steps, step_ns = machine.totals[0], machine.totals[_DURATION]
        before = self._budget.one_of
        self._budget.look(
            Totals(now_ns, steps, self._words[StepTotals.unobserved_steps], step_ns, machine.overhead_ns), calls_ns
        )
        if self._budget.one_of != before:
            self.observe_one_of(self._budget.one_of)

    def observe_one_of(self, blocks: int) -> None:
        """From now on, observe one of `blocks` blocks."""
        self._budget.one_of = blocks
        self._observed_from_here()

    def begin(self, steps: int) -> None:
        """Called after the end of step number `steps`: the next ones are not observed."""
        machine = self._probe.machine
        is_turn = steps == self.turn  # several may have been published as one
        self.turn = next_turn(steps, self._budget.one_of)
        if not is_turn or machine.inside_backward or not machine.ends_by_itself:
            return  # or their ends would not be observed
        before, totals = self._before, machine.totals
        self._like_steps = max(1, steps - before[0])
        self._like_ns = _steady(before, totals)
        self._micro = totals[_MICROSTEPS] - before[_MICROSTEPS]
        self._until = steps + (self._budget.one_of - 1) * BLOCK
        self.thread = self._probe.thread
        self._step_aside()

    def _step_aside(self) -> None:
        """From here on nothing is observed."""
        machine = self._probe.machine
        self.ends_ns = []
        self.due = BLOCK
        self.pivot = machine.pivot if machine.ends_step(machine.pivot) else 0
        self.begun = False
        self._others = 0
        self.until_ns = machine.totals[_LAST_STEP] + _LONGEST_NS
        self._probe.thread = UNOBSERVED  # last: a signal handler may raise between any two of these

    def fetch(self, original: Callable[[Any], Any], iterator: Any, grad_enabled: Callable[[], bool]) -> Any:
        """Return a dataloader's next batch in an unobserved step, if it is not plain."""
        probe = self._probe
        try:
            batch = original(iterator)
        except StopIteration:
            probe.loader_end()
            raise
        try:
            if probe.thread == UNOBSERVED:
                trains = grad_enabled()
                samples = probe.loader.passed(iterator, batch, trains)
                if trains:
                    self._samples += samples
                elif self.is_here():
                    self.end()
                    now_ns = monotonic_ns()
                    probe.edge(now_ns, probe.machine.loader_exit(now_ns, 0, False))
                if trains and self.is_here():
                    self._words[_LAST_EDGE] = monotonic_ns() << REGION_BITS | _FORWARD
            elif probe.thread != OFF:  # the block has ended while this thread, another one, was waiting for its batch
                trains = grad_enabled()
                samples = probe.loader.passed(iterator, batch, trains)
                if trains:
                    probe.machine.note_samples(samples)
        except Exception as error:
            probe.fail(error)
        return batch

    def step_ended(self, identity: int) -> None:
        """An optimizer (its `id`) other than the one that ends the step has stepped; 0: the user marks the end of a
        step."""
        if get_ident() != self.thread:
            self._probe.adopts(monotonic_ns())
            return
        if identity:
            made = len(self.ends_ns)
            self._others, self._others_at = self._others + 1 if made == self._others_at else 1, made
            if self._others > _MOST_OTHERS:
                self.end()  # the program has created another optimizer: with its steps no block would ever end
        elif self._probe.machine.ends_step(0):
            now_ns = monotonic_ns()
            self._words[_LAST_EDGE] = now_ns << REGION_BITS | _OTHER
            self.ends_ns.append(now_ns)
            if len(self.ends_ns) >= self.due:
                self.over()

    def over(self) -> None:
        """`due` steps have been made, or they take too long."""
        made = len(self.ends_ns)
        if made < self.due:
            self.end()
            return
        totals, now_ns = self._probe.machine.totals, self.ends_ns[-1]
        goes_on = totals[0] + made < self._until
        if goes_on and now_ns - totals[_LAST_STEP] < _PUBLISHED_EVERY_NS:
            self.due += BLOCK
            self.until_ns = now_ns + _LONGEST_NS
            return
        self._enter()
        if goes_on:
            self._step_aside()
        else:
            self._observe_again()

    def is_here(self) -> bool:
        """True on the thread that makes unobserved steps."""
        return get_ident() == self.thread

    def end(self) -> None:
        """Observe again from now on, if this is the training thread: something other than a plain step begins."""
        probe = self._probe
        if probe.thread != UNOBSERVED or get_ident() != self.thread:
            return
        try:
            self.leave()
        except Exception as error:
            probe.fail(error)

    def leave(self) -> None:
        """Observe again from now on; on any thread."""
        probe = self._probe
        if self.ends_ns:
            self._enter()
        else:
            probe.thread = self.thread
            if samples := self._passed():  # in a batch of the step that this interrupts
                probe.machine.add_samples(samples)
        probe.machine.outside(monotonic_ns())
        self._observe_again()

    def _observe_again(self) -> None:
        self._observed_from_here()
        self._probe.observe_again(self._before[0])

    def _observed_from_here(self) -> None:
        self._before = list(self._probe.machine.totals)
        self.turn = next_turn(self._before[0], self._budget.one_of)

    def _enter(self) -> None:
        """The steps so far are published, and steps are observed again."""
        probe = self._probe
        probe.thread = self.thread
        steps = len(self.ends_ns)
        samples = self._passed()
        like_ns = [ns * steps // self._like_steps for ns in self._like_ns]
        self._words[StepTotals.unobserved_steps] += steps
        probe.machine.unobserved(self.ends_ns[-1], steps, samples, self._micro * steps // self._like_steps, like_ns)

    def _passed(self) -> int:
        """The samples of the batches since the block began, or since the last call."""
        samples, self._samples = self._samples + self._probe.loader.passed_samples(), 0
        return samples


def _steady(before: list[int], after: list[int]) -> list[int]:
    """Time of the steps between these totals: total, and by phase; without rare events."""
    took = [new - old for new, old in zip(after, before, strict=True)][_DURATION : _DURATION + 1 + len(PHASES)]
    for phase in _NOW_AND_THEN:
        took[0] -= took[phase]
        took[phase] = 0
    return took
