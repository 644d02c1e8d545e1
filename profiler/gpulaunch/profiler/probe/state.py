"""The state behind the taps of one rank: step machine, segment, training thread, parts in service.

Nothing here raises into the user's code. A fault disables the part it happened in and is recorded in the segment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from gpulaunch.profiler.channel.layout import REGION_BITS, Hook, Region, StepSource, TextSlot, Word
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe import facts
from gpulaunch.profiler.probe.account import CHECKPOINT, MOST_NOTES
from gpulaunch.profiler.probe.bare import BARE, OFF, Bare
from gpulaunch.profiler.probe.batch import LoaderWatch
from gpulaunch.profiler.probe.noted import COUNTED
from gpulaunch.profiler.probe.price import BLOCK
from gpulaunch.profiler.probe.publish import Publisher
from gpulaunch.profiler.probe.service import Service
from gpulaunch.profiler.probe.user_signals import raised_by_program

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.gpu_time import GpuClock


TOGETHER: Final = BLOCK
"""Steps whose edges are processed together. All ranks do that after the same steps, so that their delays coincide.
As many as a block of `price` has, so that each block has one such moment."""

_PRICED_EVERY: Final = 8  # of the groups of TOGETHER steps one is priced; it stands for the others

_NO_THREAD: Final = 0  # get_ident is never 0
_QUIET_NS: Final = 2_000_000_000  # and four steps: then another thread that trains becomes the training thread
_SOON_NS: Final = 50_000_000  # so long without an edge, and it is worth to ask whether the thread still lives
_ASIDE: Final = -1  # the training thread is inside something whose inside does not count
_SECOND_NS: Final = 1_000_000_000
_LATEST_NS: Final = 250_000_000  # notes are processed by then, if the program runs on
_FEW: Final = 8
_PLAIN_FROM: Final = 8  # steps in a row, each with the one edge that ends it
_LAST_EDGE: Final = int(Word.LAST_EDGE)
_STEPS_MADE: Final = int(Word.STEPS_MADE)
_LAST_STEP: Final = Word.LAST_STEP_MONOTONIC_NS - Word.STEPS
_DURATION: Final = Word.STEP_NS_TOTAL - Word.STEPS
_OTHER: Final = int(Region.OTHER)
_FORWARD: Final = int(Region.FORWARD)
_BACKWARD: Final = int(Region.BACKWARD)
_OPTIMIZER: Final = int(Region.OPTIMIZER)
_REGION: Final = (1 << REGION_BITS) - 1
_BY_OPTIMIZER: Final = StepSource.OPTIMIZER

Nested = tuple[int, int]
"""When something nested began, and the machine's `nested_ns` then."""


class Probe(Service):
    """The state behind the taps of one rank, and its segment.

    The first thread that computes gradients or steps an optimizer is the training thread; edges of others do not count,
    unless it has ended, or passes none any more while another trains: then that one is. Until there is one, the first
    thread that reads a dataloader stands in for it.
    """

    __slots__ = (
        "_asked_ns",
        "_catches_up",
        "_due_ns",
        "_ended",
        "_loader_thread",
        "_plain",
        "_price_ns",
        "_priced",
        "_settled",
        "_stood_here",
        "bare",
        "clock",
        "closely",
        "late_ns",
        "loader",
        "machine",
        "pivot",
        "prices",
        "steps",
        "taken_up",
        "tell",
        "thread",
        "times",
        "turn",
    )

    def __init__(self, writer: SegmentWriter, torch: Any = None) -> None:
        super().__init__(writer)
        self.machine = Publisher(writer).machine
        self.loader = LoaderWatch(writer, self.unavailable, getattr(torch, "Tensor", type(None)))
        self.machine.on_evaluated = self.loader.evaluated
        self.machine.on_batch = self.loader.plain
        self.loader.before_change = self._catch_up_here
        self.thread = _NO_THREAD
        self._loader_thread = _NO_THREAD
        self._stood_here = _NO_THREAD
        self._asked_ns = 0  # when it was last asked whether it still trains
        self._catches_up = False
        self._plain = 0  # steps in a row that were plain
        self._settled = self._ended = 0  # steps, and steps of optimizers, when the last of them were settled
        self._price_ns = 0  # of a step, of the group that was priced last
        self._priced = 0  # steps that have been priced so far, of the group that is
        self.taken_up: tuple[tuple[int, int], ...] = ()
        """When steps were processed last: how many had ended, and how long it took."""
        self.pivot = 0
        """The optimizer (its `id`) whose edges may be noted; 0: none, each edge is processed at once."""
        self.steps = self.turn = 0
        """While there is one: steps that have ended, and the number at which `catch_up` must be called."""
        self.late_ns = 0
        """When `catch_up` must be called at the latest."""
        self.tell: Callable[[int], object] = self._take_up
        """Called with the time of an edge of the training thread and the region after it, as in LAST_EDGE."""
        self.prices = self.times = False
        self.closely = False
        """Whether the current step's overhead is measured, or it is timed on the GPU: `attend` must be called."""
        self.clock: GpuClock | None = None
        """The clock that times phases on the GPU, if any; set by its owner."""
        self.bare = Bare(self)
        self._due_ns = 0
        self.bare.can_do_without(Hook.GPU_TIME, self._stop_clock)

    def ended(self) -> None:
        """The program has ended: write the rest to the segment."""
        try:
            if self.thread != OFF:
                self.bare.end()
                running = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - it is documented
                if self.is_training() or self.thread not in running:
                    self.catch_up()
                self.loader.flush()
        except Exception as error:
            self.fail(error)

    def off(self) -> None:
        """Disable the probe; the taps pass everything through. For forked children: they must not write the segment."""
        self.thread = OFF

    def fail(self, error: Exception) -> None:
        """Our own fault: stop observing, keep training.

        Raises:
            BaseException: `error` itself, if it is the program's: what a signal handler raised while this ran.
        """
        if raised_by_program(error):
            raise error
        self.off()
        with suppress(Exception):  # if the segment itself failed, the error cannot be reported
            self.unavailable(Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER, repr(error))

    # --- which thread, and where it is ------------------------------------------------------------------------------

    def adopts(self, now_ns: int) -> bool:
        """True if this thread, which is not the training thread, becomes it: the first to ask does."""
        if self.thread:
            return self._takes_over(now_ns)
        self.thread = get_ident()
        if self._loader_thread != self.thread:  # else its steps have begun with its first batch
            self._begin(now_ns)
        return True

    def _takes_over(self, now_ns: int) -> bool:
        """True if this thread replaces the training thread, which no longer trains."""
        thread = self.bare.thread if self.thread == BARE else self.thread
        if thread <= _NO_THREAD or thread == get_ident() or now_ns < self._asked_ns + _SOON_NS:
            return False
        self._asked_ns = now_ns
        edge, totals = self.writer.words[_LAST_EDGE], self.machine.totals
        step_ns = totals[_DURATION] // max(1, totals[0])
        quiet_ns = now_ns - (edge >> REGION_BITS)
        if quiet_ns < _SOON_NS:
            return False
        # In a backward or a step it has others work for it: hooks of gradients on a GPU, parts of an optimizer.
        if quiet_ns < _QUIET_NS + 4 * step_ns or edge & _REGION in (_BACKWARD, _OPTIMIZER):
            running = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - it is documented
            if thread in running:
                return False
        if self.thread == BARE:
            self.bare.leave()
        self.thread = get_ident()
        self.catch_up()
        self._take_each()
        self.machine.start_over(now_ns)
        return True

    def stands_in(self, now_ns: int) -> bool:
        """True if this thread's batches count although it is not the training thread: there is none yet."""
        if self.thread:
            return False
        if not self._loader_thread:
            self._loader_thread = get_ident()
            self._begin(now_ns)
        return self._loader_thread == get_ident()

    def is_training(self) -> bool:
        """True on the thread whose steps count, or that stands in for it."""
        return get_ident() == (self.thread or self._loader_thread)

    def trains_here(self) -> bool:
        """True on the training thread, in a bare step too."""
        return get_ident() == self.thread or (self.thread == BARE and self.bare.is_here())

    def is_in_backward(self) -> bool:
        """True while the training thread is inside autograd; on any thread."""
        return self.writer.words[_LAST_EDGE] & _REGION == _BACKWARD

    def nested(self) -> Nested | None:
        """An interval begins on this thread that counts as a whole: a save, a compilation.

        Until `nested_end` the training thread is not observed. None, and no `nested_end`, on any other thread.
        """
        self.bare.end()
        if not self.is_training():
            return None
        self._stood_here, self.thread = self.thread, _ASIDE
        return monotonic_ns(), self.machine.nested_ns

    def nested_end(self, phase: int, began: Nested) -> int:
        """It has ended; the time since belongs to `phase`, and is returned."""
        if self.thread != _ASIDE:  # switched off meanwhile
            return 0
        self.thread = self._stood_here
        try:
            return self.nest(phase, began[0], monotonic_ns(), began[1])
        except Exception as error:
            self.fail(error)
            return 0

    def stood_still(self, since_ns: int, nested_before_ns: int) -> None:
        """This thread was blocked by a save since then, when the machine's `nested_ns` was this."""
        if self.is_training():
            self.nest(CHECKPOINT, since_ns, monotonic_ns(), nested_before_ns)

    def nest(self, phase: int, began_ns: int, now_ns: int, nested_before_ns: int) -> int:
        """As the machine's, for what a tap has seen: any number of them may lie between two edges."""
        own_ns = self.machine.nest(phase, began_ns, now_ns, nested_before_ns)
        if len(self.machine.notes) > MOST_NOTES // 2:
            self._catch_up_here()
        return own_ns

    # --- edges: noted, or taken up at once --------------------------------------------------------------------------

    def catch_up(self, apart: bool = False) -> int:
        """Process the notes of the training thread, and do the work at the end of steps. On that thread only.

        Args:
            apart: its duration is in no span reported to `attend`.

        Returns:
            The region after the last edge that was noted; 0 if there was none.
        """
        if self._catches_up:
            return 0  # a signal handler of the program's came in between
        self._catches_up = True
        try:
            machine = self.machine
            began_ns = monotonic_ns()
            region = machine.catch_up()
            steps = machine.totals[0]
            if steps != self._settled:
                self._settle(steps, steps - self._settled)
            elif machine.optimized != self._ended:
                self._take_each()  # it has ended no step: another's, or a wrapped one's
            self.late_ns = began_ns + _LATEST_NS
            if apart:
                spent_ns = monotonic_ns() - began_ns
                machine.price_ns += spent_ns
                self.taken_up = (*self.taken_up[1 - _FEW :], (steps, spent_ns))
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
        """The training thread was handed a batch that is no plain one: see `StepMachine.loader_exit`."""
        machine = self.machine
        if trains and self.pivot and samples == machine.samples and dataset == machine.dataset:
            self._at(now_ns, _FORWARD)
            self.tell(now_ns << REGION_BITS | COUNTED)
            return
        self.catch_up()
        machine.samples, machine.dataset = samples, dataset
        self.edge(now_ns, machine.loader_exit(now_ns, samples, trains, dataset))

    def _take_up(self, note: int) -> None:
        """Take up an edge at once."""
        self.machine.notes.append(note)
        region = self.catch_up()
        if region:
            self._at(note >> REGION_BITS, region)

    def _settle(self, steps: int, observed: int) -> None:
        """Step number `steps` has ended and is published; `observed` of the steps since the last call were observed."""
        machine = self.machine
        if self.prices:
            self._priced += observed
            if self._priced and (not self._price_ns or steps // TOGETHER != self._settled // TOGETHER):
                self._price_ns = machine.spent_ns // self._priced
        machine.price_ns += observed * self._price_ns
        if self.clock is not None and steps != self._settled:
            try:
                self.times = self.clock.step(steps)
            except Exception as error:
                self._untimed(error)
        now_ns = machine.totals[_LAST_STEP]
        if now_ns >= self._due_ns:
            self._look_around(now_ns)
        if steps >= self.bare.turn:
            self.bare.take(steps)
            if self.thread == BARE and self.clock is not None:
                self.clock.drop()
                self.times = False
        if not self.prices or steps // TOGETHER != self._settled // TOGETHER:
            self.prices = _is_priced(steps)
            self._priced = machine.spent_ns = 0
        self.closely = self.prices or self.times
        if machine.source is _BY_OPTIMIZER and machine.optimized - self._ended == observed:
            self._plain += observed
            if self._plain >= _PLAIN_FROM:
                self.pivot, self.tell = machine.pivot, machine.notes.append
                self.steps = steps
                self.turn = steps + 1 if self.times else min(self.bare.turn, steps - steps % TOGETHER + TOGETHER)
        else:
            self._take_each()
        self._settled, self._ended = steps, machine.optimized

    def _take_each(self) -> None:
        """The next edges are not predictable: each is processed at once."""
        if self.pivot:
            self.writer.words[_STEPS_MADE] = 0
        self._plain = self.pivot = 0
        self.tell = self._take_up
        self._ended = self.machine.optimized

    def optimizer_made(self, identity: int) -> None:
        """The program has made an optimizer; its `id` may be that of one that is gone, whose steps ended steps."""
        try:
            if identity == self.bare.pivot:
                self.bare.end()
            if identity == self.pivot and self.is_training():
                self.catch_up()
                self._take_each()
            self.machine.optimizer_made(identity)
        except Exception as error:
            self.fail(error)

    # --- what the taps call -----------------------------------------------------------------------------------------

    def loader_end(self) -> None:
        """The dataloader has no more batches."""
        try:
            self.bare.end()
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.stands_in(now_ns):
                self.catch_up()
                self._at(now_ns, self.machine.loader_end(now_ns))
                self.loader.flush()
        except Exception as error:
            self.fail(error)

    def attend(self, phase: int, began_ns: int) -> None:
        """A phase begins, in a step that is timed on the GPU or priced; what is done for it began then."""
        if self.times and self.clock is not None:
            try:
                self.clock.edge(phase)
            except Exception as error:
                self._untimed(error)
        if self.prices:
            self.machine.spent_ns += monotonic_ns() - began_ns

    # --- what the user says -----------------------------------------------------------------------------------------

    def mark_step(self) -> None:
        """The user says that a step ends here."""
        try:
            if self.thread == BARE:
                self.bare.step_ended(0)
                return
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.adopts(now_ns):
                self.catch_up()
                self.machine.mark_step(now_ns)
                self._at(now_ns, _OTHER)
                self.catch_up()
        except Exception as error:
            self.fail(error)

    def mark_phase(self, phase: int) -> int:
        """The user says which phase the time from here on belongs to (1 + its index in PHASES, or 0: as the edges say).

        Returns:
            What to set again when the user's block ends.
        """
        try:
            self.bare.end()
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.adopts(now_ns):
                self.catch_up()
                self._at(now_ns, _OTHER)
                return self.machine.mark_phase(now_ns, phase)
        except Exception as error:
            self.fail(error)
        return 0

    def note(self, text: str) -> None:
        """Write the user's note to the segment."""
        try:
            if self.thread != OFF:
                self.writer.write_text(TextSlot.NOTE, text)
        except Exception as error:
            self.fail(error)

    # --- what is published ------------------------------------------------------------------------------------------

    def _begin(self, now_ns: int) -> None:
        self.machine.begin(now_ns)
        self.writer.words[Word.FIRST_STEP_START_NS] = now_ns
        self._look_around(now_ns)

    def _at(self, now_ns: int, region: int) -> None:
        """The training thread has passed an edge. The taps have this inlined: `edge` is the word, 3 the bits."""
        self.writer.words[_LAST_EDGE] = now_ns << REGION_BITS | region

    def _look_around(self, now_ns: int) -> None:
        """What is done once a second."""
        self._due_ns = now_ns + _SECOND_NS
        self.call_each()
        self.loader.flush()
        facts.flush()

    def _stop_clock(self) -> None:
        """Stop timing phases on the GPU."""
        clock, self.clock, self.times = self.clock, None, False
        if clock is not None:
            with suppress(Exception):
                clock.drop()  # other users of it time nothing either

    def unobserved(self, steps: int) -> None:
        """Steps were made without the probe, and are published; `steps` have ended now."""
        self._ended = self.machine.optimized
        self._settle(steps, 0)

    def _untimed(self, error: Exception) -> None:
        """The timing of phases on the GPU failed."""
        if raised_by_program(error):
            raise error
        self._stop_clock()
        self.unavailable(Hook.GPU_TIME, repr(error))


def _is_priced(steps: int) -> bool:
    """Whether the steps after so many are priced, up to the end of their group: not at even distances, or what a
    program does every ten steps would be priced too often, or never. Of the first group, whose steps are like no
    others, half.
    """
    group, at = divmod(steps, TOGETHER)
    return ((group * 1103515245 + 12345) >> 16) % _PRICED_EVERY == 0 if group else at >= TOGETHER // 2
