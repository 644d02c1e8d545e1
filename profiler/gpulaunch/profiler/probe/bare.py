"""The probe steps aside for a few steps, to see what it costs; parts of it for good, if that is too much; and in the
end all of it for most steps.

When, and what comes of it, `price` decides; here it is done. In a bare step the taps let everything pass. Three things
are still done in it: batches are counted, the end of the step is noted, and whatever the program does only now and then
- a save, an evaluation, the end of an epoch - ends the block, for its time is to be seen. The taps have what a plain
batch and a plain step come to written out: it stays in what bare steps are compared with, and is most of the price
where few steps are observed.

What bare steps spent on what nobody knows. They are told to have been like the block before them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Hook, Region, Word
from gpulaunch.profiler.probe.account import CHECKPOINT, COMPILE, GC, VALIDATION
from gpulaunch.profiler.probe.price import BLOCK, Budget, Comparison, budget_ppm

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe


OFF: Final = -2
"""No thread has this number: nobody is the training thread any more. What is this or BARE lets everything pass."""

BARE: Final = -3
"""No thread has this number either: the training thread makes steps without the probe."""

_MOST_OTHERS: Final = 4  # optimizers' steps in a step, besides the one that ends it
_LONGEST_NS: Final = 4_000_000_000  # twice what the block before may have taken
_PUBLISHED_EVERY_NS: Final = 100_000_000  # readers come a few times a second
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
        self._blocks = 0  # that are to be bare, the one under way and those after it
        self._samples = self._ended_ns = 0  # of the block: in batches that were no plain ones; when it began
        self._micro = 0  # and their micro-steps
        self._others = 0  # steps of other optimizers
        self.thread = 0
        """The one that makes bare steps."""
        self.ends_ns: list[int] = []
        """When the steps of the block under way have ended."""
        self.due = BLOCK
        """So many of them are to be; then `over` is called."""
        self.pivot = 0
        """The optimizer (its `id`) that ends them; 0: the user says where they end."""
        self.begun = False
        """Whether it is at it: a class and its base may both be hooked, and tell twice."""
        self.until_ns = 0
        """When a bare block is over, whatever has or has not happened in it."""
        self.turn = self._comparison.turn
        """The number of steps at which `take` is to be called."""

    def can_do_without(self, hook: Hook, switch_off: Callable[[], None]) -> None:
        """`switch_off` ends this part of the probe, should it cost too much."""
        self._switches.append((hook, switch_off))

    def take(self, steps: int) -> None:
        """So many steps have ended, and all that is done at their end is done: a block begins or ends."""
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
        """What comes will have been like what came last."""
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
        """How long each of the last steps took, without what it took to take steps up, and how long that took."""
        lasted_ns = self._probe.writer.lasted_ns(BLOCK)
        apart_ns = 0
        for ended, took_ns in self._probe.taken_up:
            if 0 <= (step := ended - (steps - BLOCK)) < BLOCK:
                lasted_ns[step] -= took_ns
                apart_ns += took_ns
        return lasted_ns, apart_ns

    def fetch(self, original: Callable[[Any], Any], iterator: Any, grad_enabled: Callable[[], bool]) -> Any:
        """Hand out a dataloader's next batch, in a bare step; one that is no plain one."""
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
        """An optimizer (its `id`) has stepped in a bare step, and not the one that ends it; 0: the user says that a
        step ends."""
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
        """The block has been made, or takes too long."""
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
        """Observe again from here on, if this is the training thread: something comes that is no plain step."""
        probe = self._probe
        if probe.thread != BARE or get_ident() != self.thread:
            return
        try:
            self.leave()
        except Exception as error:
            probe.fail(error)

    def leave(self) -> None:
        """The block is over where it is, whoever says so."""
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
        self._words[Word.UNOBSERVED_STEPS] += steps
        probe.machine.unobserved(self._ended_ns, steps, samples, self._micro * steps // self._like_steps, like_ns)

    def _passed(self) -> int:
        """The samples of the batches since the block began, or since it was last asked."""
        samples, self._samples = self._samples + self._probe.loader.passed_samples(), 0
        return samples

    def _tell(self) -> None:
        words, comparison = self._words, self._comparison
        words[Word.PRICED_PAIRS] = 0  # so that nobody takes one figure with the error of another
        words[Word.PAIRED_COST_NS] = comparison.cost_ns // comparison.one_of % (1 << 64)
        words[Word.PAIRED_ERROR_NS] = comparison.error_ns // comparison.one_of
        words[Word.PRICED_PAIRS] = comparison.pairs

    def _reckon(self, steps: int) -> None:
        """Switch off the next part, if the price is too high."""
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
        """From now on, when so many steps have ended, of so many blocks one is observed."""
        self._comparison.observe_one_of(blocks, steps)
        self.turn = self._comparison.turn
        self._blocks = 0


def _steady(before: list[int], after: list[int]) -> list[int]:
    """What steps took between these totals: in all, and by phase; without what is only done now and then."""
    took = [new - old for new, old in zip(after, before, strict=True)][_DURATION : _DURATION + 1 + len(PHASES)]
    for phase in _NOW_AND_THEN:
        took[0] -= took[phase]
        took[phase] = 0
    return took
