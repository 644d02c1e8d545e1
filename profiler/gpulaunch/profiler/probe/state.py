"""The state behind the taps of one rank: which thread trains, and whether it is observed now.

Nothing here raises into the user's code. A fault disables the part it happened in and is recorded in the segment.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.channel.layout import REGION_BITS, Hook, Region, TextSlot, Word, in_steps
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe.account import CHECKPOINT, MOST_NOTES
from gpulaunch.profiler.probe.observed import ObservedSteps
from gpulaunch.profiler.probe.training_thread import NESTED, NO_THREAD, OFF, UNOBSERVED
from gpulaunch.profiler.probe.unobserved import UnobservedSteps
from gpulaunch.profiler.probe.user_signals import raised_by_program

_QUIET_NS: Final = 2_000_000_000  # and four steps: after that, another thread that trains becomes the training thread
_SOON_NS: Final = 50_000_000  # after this time without an edge, it is checked whether the thread is still alive
_LAST_EDGE: Final = int(Word.LAST_EDGE)
_DURATION: Final = in_steps(Word.STEP_NS_TOTAL)
_OTHER: Final = int(Region.OTHER)
_BACKWARD: Final = int(Region.BACKWARD)
_OPTIMIZER: Final = int(Region.OPTIMIZER)
_REGION: Final = (1 << REGION_BITS) - 1

Nested = tuple[int, int]
"""When something nested began, and the machine's `nested_ns` then."""


class Probe(ObservedSteps):
    """The state behind the taps of one rank, and its segment.

    The first thread that computes gradients or steps an optimizer is the training thread; edges of others do not count,
    unless it has ended, or passes no more edges while another one trains: then that one replaces it. Until there is
    one, the first thread that reads a dataloader substitutes for it.
    """

    __slots__ = ("_asked_ns", "_stood_here")

    def __init__(self, writer: SegmentWriter, torch: Any = None) -> None:
        super().__init__(writer, torch)
        self.unobserved = UnobservedSteps(self)
        self._stood_here = NO_THREAD
        self._asked_ns = 0  # when it was last checked whether it still trains

    def ended(self) -> None:
        """The program has ended: write the rest to the segment."""
        try:
            if self.thread != OFF:
                self.unobserved.end()
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

    # --- which thread, and its state --------------------------------------------------------------------------------

    def adopts(self, now_ns: int) -> bool:
        """True if this thread, which is not the training thread, becomes it: the first caller does."""
        if self.thread:
            return self._takes_over(now_ns)
        self.thread = get_ident()
        if self._loader_thread != self.thread:  # else its steps began with its first batch
            self._begin(now_ns)
        return True

    def _takes_over(self, now_ns: int) -> bool:
        """True if this thread replaces the training thread, which no longer trains."""
        thread = self.unobserved.thread if self.thread == UNOBSERVED else self.thread
        if thread <= NO_THREAD or thread == get_ident() or now_ns < self._asked_ns + _SOON_NS:
            return False
        self._asked_ns = now_ns
        edge, totals = self.writer.words[_LAST_EDGE], self.machine.totals
        step_ns = totals[_DURATION] // max(1, totals[0])
        quiet_ns = now_ns - (edge >> REGION_BITS)
        if quiet_ns < _SOON_NS:
            return False
        # In a backward or a step, other threads work for it: gradient hooks on a GPU, parts of an optimizer.
        if quiet_ns < _QUIET_NS + 4 * step_ns or edge & _REGION in (_BACKWARD, _OPTIMIZER):
            running = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - it is documented
            if thread in running:
                return False
        if self.thread == UNOBSERVED:
            self.unobserved.leave()
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

    def trains_here(self) -> bool:
        """True on the training thread, in an unobserved step too."""
        return get_ident() == self.thread or (self.thread == UNOBSERVED and self.unobserved.is_here())

    def is_in_backward(self) -> bool:
        """True while the training thread is inside autograd; on any thread."""
        return self.writer.words[_LAST_EDGE] & _REGION == _BACKWARD

    def nested(self) -> Nested | None:
        """An interval begins on this thread that is counted as a whole: a save, a compilation.

        Until `nested_end` the training thread is not observed. None, and no `nested_end`, on any other thread.
        """
        self.unobserved.end()
        if not self.is_training():
            return None
        self._stood_here, self.thread = self.thread, NESTED
        return monotonic_ns(), self.machine.nested_ns

    def nested_end(self, phase: int, began: Nested) -> int:
        """It has ended; the time since belongs to `phase`, and is returned."""
        if self.thread != NESTED:  # disabled meanwhile
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
        """As the machine's, for an interval observed by a tap: there may be any number between two edges."""
        own_ns = self.machine.nest(phase, began_ns, now_ns, nested_before_ns)
        if len(self.machine.notes) > MOST_NOTES // 2:
            self._catch_up_here()
        return own_ns

    def optimizer_made(self, identity: int) -> None:
        """The program has created an optimizer; its `id` may be that of a deleted one whose steps ended steps."""
        try:
            if identity == self.unobserved.pivot:
                self.unobserved.end()
            if identity == self.pivot and self.is_training():
                self.catch_up()
                self._take_each()
            self.machine.optimizer_made(identity)
        except Exception as error:
            self.fail(error)

    # --- called by taps -------------------------------------------------------------------------------------------

    def loader_end(self) -> None:
        """The dataloader has no more batches."""
        try:
            self.unobserved.end()
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.stands_in(now_ns):
                self.catch_up()
                self._at(now_ns, self.machine.loader_end(now_ns))
                self.loader.flush()
        except Exception as error:
            self.fail(error)

    # --- marks of the user -------------------------------------------------------------------------------------------

    def mark_step(self) -> None:
        """The user marks the end of a step."""
        try:
            if self.thread == UNOBSERVED:
                self.unobserved.step_ended(0)
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
        """The user sets the phase of the time from here on (1 + its index in PHASES, or 0: determined by the edges).

        Returns:
            The value to restore when the user's block ends.
        """
        try:
            self.unobserved.end()
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

    def _begin(self, now_ns: int) -> None:
        self.machine.begin(now_ns)
        self.writer.words[Word.FIRST_STEP_START_NS] = now_ns
        self._look_around(now_ns)
