"""Runs bare steps: disables the probe for a few steps to measure its overhead; if that is too high, disables parts of
it permanently, and finally all of it for most steps.

`price` decides when, and evaluates the result; this module does it. In a bare step the taps pass everything through.
Three things are still done: batches are counted, the end of the step is noted, and rare events of the program - a save,
an evaluation, the end of an epoch - end the block, because their time must be observed. The taps have the handling of a
plain batch and a plain step inlined: it remains in bare steps too, and is most of the overhead where few steps are
observed.

The phases of bare steps are not known. They are reported as equal to those of the block before.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Hook, Region, Word
from gpulaunch.profiler.channel.quantities import ProbeTotals
from gpulaunch.profiler.probe.account import CHECKPOINT, COMPILE, GC, VALIDATION
from gpulaunch.profiler.probe.price import BLOCK, Budget, Comparison, budget_ppm

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe


OFF: Final = -2
"""No thread has this id: there is no training thread any more. With this or BARE the taps pass everything through."""

BARE: Final = -3
"""No thread has this id either: the training thread makes steps without the probe."""

_MOST_OTHERS: Final = 4  # optimizers' steps in a step, besides the one that ends it
_LONGEST_NS: Final = 4_000_000_000  # twice what the block before may have taken
_PUBLISHED_EVERY_NS: Final = 100_000_000  # readers read a few times a second
_LAST_EDGE: Final = int(Word.LAST_EDGE)
_OTHER: Final = int(Region.OTHER)
_FORWARD: Final = int(Region.FORWARD)
_MICROSTEPS: Final = Word.MICROSTEPS - Word.STEPS
_LAST_STEP: Final = Word.LAST_STEP_MONOTONIC_NS - Word.STEPS
_DURATION: Final = Word.STEP_NS_TOTAL - Word.STEPS
_PRICE: Final = Word.PROBE_NS_TOTAL - Word.STEPS
_NOW_AND_THEN: Final = (CHECKPOINT, COMPILE, GC, VALIDATION)


class Bare:
    """The bare steps of a probe, and the parts of it that can be switched off."""

    __slots__ = (
        "_before",
        "_blocks",
        "_budget",
        "_comparison",
        "_ended_ns",
        "_like_ns",
        "_like_steps",
        "_micro",
        "_others",
        "_probe",
        "_samples",
        "_switches",
        "_words",
        "begun",
        "due",
        "ends_ns",
        "pivot",
        "thread",
        "turn",
        "until_ns",
    )

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._words = probe.writer.words
        self._comparison = Comparison()
        self._budget = Budget(budget_ppm(os.environ.get("GPULAUNCH_PROFILE_BUDGET", "")))
        self._words[Word.BUDGET_PPM] = self._budget.ppm
        self._switches: list[tuple[Hook, Callable[[], None]]] = []
        self._before = [0] * len(probe.machine.totals)  # the machine's totals when the block before began
        self._like_ns: list[int] = []  # what its steps took: in all, and by phase
        self._like_steps = BLOCK  # so many
        self._blocks = 0  # to be bare: the current one and those after it
        self._samples = self._ended_ns = 0  # of the block: in batches that were no plain ones; when it began
        self._micro = 0  # and their micro-steps
        self._others = 0  # steps of other optimizers
        self.thread = 0
        """The thread that makes bare steps."""
        self.ends_ns: list[int] = []
        """When the steps of the current block ended."""
        self.due = BLOCK
        """Number of steps after which `over` is called."""
        self.pivot = 0
        """The optimizer (its `id`) that ends them; 0: the user marks their ends."""
        self.begun = False
        """Whether it is stepping: a class and its base may both be hooked, and report twice."""
        self.until_ns = 0
        """When a bare block ends at the latest."""
        self.turn = self._comparison.turn
        """The number of steps at which `take` is to be called."""

    def can_do_without(self, hook: Hook, switch_off: Callable[[], None]) -> None:
        """Register `switch_off`, which ends this part of the probe if its overhead is too high."""
        self._switches.append((hook, switch_off))

    def take(self, steps: int) -> None:
        """Called after the end of step number `steps`: a block begins or ends."""
        probe, comparison = self._probe, self._comparison
        machine = probe.machine
        if machine.inside_backward or not machine.ends_by_itself:
            comparison.give_up(steps)  # the end of a bare step would not be seen
            self.turn = comparison.turn
            return
        pairs = comparison.entered
        if comparison.take(steps, *self._block(steps)):
            self._look_back(machine.totals)
            self._ended_ns = machine.totals[_LAST_STEP]
            self.thread = probe.thread
            self._blocks = comparison.blocks
        else:
            self._blocks = 0
            self._before = list(machine.totals)
        if comparison.entered > pairs:
            self._tell()
            self._reckon(steps)
        self.turn = comparison.turn
        if self._blocks:
            self._step_aside()

    def _look_back(self, totals: list[int]) -> None:
        """Keep the last steps as the model for the coming ones."""
        before = self._before
        self._like_steps = max(1, totals[0] - before[0])
        self._like_ns = _steady(before, totals)
        self._micro = totals[_MICROSTEPS] - before[_MICROSTEPS]

    def _step_aside(self) -> None:
        """A bare block begins."""
        machine = self._probe.machine
        self._blocks -= 1
        self.ends_ns = []
        self.due = BLOCK
        self.pivot = machine.pivot if machine.ends_step(machine.pivot) else 0
        self.begun = False
        self._others = 0
        self.until_ns = self._ended_ns + _LONGEST_NS
        self._probe.thread = BARE  # last: what a signal handler raises may come between any two of these

    def _block(self, steps: int) -> tuple[list[int], int]:
        """How long each of the last steps took, without processing their notes, and how long that processing took."""
        lasted_ns = self._probe.writer.lasted_ns(BLOCK)
        apart_ns = 0
        for ended, took_ns in self._probe.taken_up:
            if 0 <= (step := ended - (steps - BLOCK)) < BLOCK:
                lasted_ns[step] -= took_ns
                apart_ns += took_ns
        return lasted_ns, apart_ns

    def fetch(self, original: Callable[[Any], Any], iterator: Any, grad_enabled: Callable[[], bool]) -> Any:
        """Return a dataloader's next batch in a bare step, if it is not a plain one."""
        probe = self._probe
        try:
            batch = original(iterator)
        except StopIteration:
            probe.loader_end()
            raise
        try:
            if probe.thread == BARE:
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
        """An optimizer (its `id`) other than the one that ends the bare step has stepped; 0: the user marks the end of
        a step."""
        if get_ident() != self.thread:
            self._probe.adopts(monotonic_ns())
            return
        if identity:
            self._others += 1
            if self._others > _MOST_OTHERS * (1 + len(self.ends_ns)):
                self.end()  # the program has made another optimizer: with its steps no block would ever end
        elif self._probe.machine.ends_step(0):
            now_ns = monotonic_ns()
            self._words[_LAST_EDGE] = now_ns << REGION_BITS | _OTHER
            self.ends_ns.append(now_ns)
            if len(self.ends_ns) >= self.due:
                self.over()

    def over(self) -> None:
        """The block is complete, or takes too long."""
        if len(self.ends_ns) < self.due:
            self.end()
            return
        now_ns = self.ends_ns[-1]
        if self._blocks and now_ns - self._ended_ns < _PUBLISHED_EVERY_NS:
            self._blocks -= 1
            self.due += BLOCK
            self.until_ns = now_ns + _LONGEST_NS
            return
        probe, lasted_ns = self._probe, self._lasted_ns()
        self._enter()
        if self._blocks:
            self._step_aside()
            return
        steps = probe.machine.totals[0]
        self._comparison.bare_ended(steps, lasted_ns)
        self._observe_again(steps)

    def _lasted_ns(self) -> list[int]:
        """How long each of the last steps took."""
        ends_ns = [self._ended_ns, *self.ends_ns][-BLOCK - 1 :]
        return [end_ns - begin_ns for begin_ns, end_ns in itertools.pairwise(ends_ns)]

    def is_here(self) -> bool:
        """True on the thread that makes bare steps."""
        return get_ident() == self.thread

    def end(self) -> None:
        """Observe again from now on, if this is the training thread: something other than a plain step begins."""
        probe = self._probe
        if probe.thread != BARE or get_ident() != self.thread:
            return
        try:
            self.leave()
        except Exception as error:
            probe.fail(error)

    def leave(self) -> None:
        """End the block here, from any thread."""
        probe = self._probe
        if self.ends_ns:
            self._enter()
        else:
            probe.thread = self.thread
            if samples := self._passed():  # in a batch of the step that this interrupts
                probe.machine.add_samples(samples)
        probe.machine.outside(monotonic_ns())
        steps = probe.machine.totals[0]
        self._comparison.give_up(steps)
        self._observe_again(steps)

    def _observe_again(self, steps: int) -> None:
        self._before = list(self._probe.machine.totals)
        self.turn = self._comparison.turn
        self._probe.unobserved(steps)

    def _enter(self) -> None:
        """The bare steps so far are published, and steps are observed again."""
        probe = self._probe
        probe.thread = self.thread
        steps = len(self.ends_ns)
        self._ended_ns = self.ends_ns[-1]
        samples = self._passed()
        like_ns = [ns * steps // self._like_steps for ns in self._like_ns]
        self._words[ProbeTotals.unobserved_steps] += steps
        probe.machine.unobserved(self._ended_ns, steps, samples, self._micro * steps // self._like_steps, like_ns)

    def _passed(self) -> int:
        """The samples of the batches since the block began, or since the last call."""
        samples, self._samples = self._samples + self._probe.loader.passed_samples(), 0
        return samples

    def _tell(self) -> None:
        words, comparison = self._words, self._comparison
        words[Word.PRICED_PAIRS] = 0  # so that no reader combines one figure with the error of another
        words[Word.PAIRED_COST_NS] = comparison.cost_ns // comparison.one_of % (1 << 64)
        words[Word.PAIRED_ERROR_NS] = comparison.error_ns // comparison.one_of
        words[Word.PRICED_PAIRS] = comparison.pairs

    def _reckon(self, steps: int) -> None:
        """Switch off the next part, if the overhead is too high."""
        words, totals = self._words, self._probe.machine.totals
        if not self._budget.too_high(monotonic_ns(), steps, totals[_DURATION], totals[_PRICE], self._comparison):
            return
        hooks = self._budget.next_of(words[Word.HOOKS_ARMED])
        for hook, switch_off in self._switches:
            if hook & hooks:
                switch_off()
        if hooks:
            words[Word.HOOKS_ARMED] &= ~hooks
            self._comparison.start_over()
            words[Word.HOOKS_SHED] |= hooks
        else:
            words[Word.HOOKS_SHED] |= Hook.EVERY_STEP
            self.observe_one_of(self._budget.blocks(self._comparison.one_of), steps)
        self._tell()

    def observe_one_of(self, blocks: int, steps: int) -> None:
        """From now on, after step number `steps`, observe one of `blocks` blocks."""
        self._comparison.observe_one_of(blocks, steps)
        self.turn = self._comparison.turn
        self._blocks = 0


def _steady(before: list[int], after: list[int]) -> list[int]:
    """Time of the steps between these totals: in all, and by phase; without rare events."""
    took = [new - old for new, old in zip(after, before, strict=True)][_DURATION : _DURATION + 1 + len(PHASES)]
    for phase in _NOW_AND_THEN:
        took[0] -= took[phase]
        took[phase] = 0
    return took
