"""From edges to steps and phases: a pure machine; it knows no torch, no clock and no page.

The training thread passes six edges, each with the time: enter and exit of the dataloader's `next`, of the autograd
engine, and of an optimizer's step. The time between two edges belongs to one phase:

    before a loader exit       data_wait, once a backward shows that the batch was for training
    before a backward enter    forward
    before a backward exit     backward
    before an optimizer exit   optimizer
    anything else              other: gradient clipping, logging, validation, checkpoints

`other` is what the named phases leave of a step, so the parts always sum to the step.

Each edge gives the region that the thread is in from there on (`layout.Region`).

A step ends when its optimizer has stepped. Where no optimizer is seen for `PATIENCE` micro-steps (a compiled or
home-made one) it ends with each backward, and where there is no backward either, with each batch (a wholly compiled
step). What was waited through until then is entered as that many steps of equal length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpulaunch.profiler.channel.layout import PHASES, Region, StepSource, Word

__all__ = ["PATIENCE", "Record", "StepMachine"]

PATIENCE: Final = 64
"""Micro-steps (or batches) without the better edge after which the next worse one ends the steps. Gradients are rarely
accumulated over more; to be wrong costs a few short steps in the count, once."""

_NO_PHASE, _DATA_WAIT, _FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = range(1 + len(PHASES))

# To look a member up in its enum costs as much as an edge; these names do not.
_UNKNOWN: Final = StepSource.NONE
_BY_OPTIMIZER: Final = StepSource.OPTIMIZER
_BY_BACKWARD: Final = StepSource.BACKWARD
_BY_DATALOADER: Final = StepSource.DATALOADER
_BY_MARK: Final = StepSource.MARK

# Plain numbers, as the page has them.
_IN_LOADER: Final = int(Region.LOADER)
_IN_FORWARD: Final = int(Region.FORWARD)
_IN_BACKWARD: Final = int(Region.BACKWARD)
_IN_STEPPING: Final = int(Region.STEPPING)
_IN_OPTIMIZER: Final = int(Region.OPTIMIZER)
_IN_OTHER: Final = int(Region.OTHER)


Record = tuple[int, int, int, int, int, int, int]
"""One step: start_ns, duration_ns, data_wait_ns, forward_ns, backward_ns, optimizer_ns, samples."""


class StepMachine:
    """Counts one thread's steps.

    Times are nanoseconds of any one monotonic clock. `begin` comes before any edge. Whenever a step has ended,
    `on_step` is told how many (1, but for the first ones of a loop without optimizer) and the record of one, or of
    their mean.
    """

    __slots__ = (
        "_batches_waiting",
        "_before_last_micro",
        "_calls_grad",
        "_depth",
        "_edge_ns",
        "_exhausted",
        "_forced",
        "_last_micro",
        "_micro",
        "_optimizer",
        "_others",
        "_parts",
        "_pivot",
        "_samples",
        "_samples_waiting",
        "_start_ns",
        "_wait_pending",
        "microsteps",
        "on_step",
        "price_ns",
        "skipped_steps",
        "source",
        "totals",
    )

    def __init__(self, on_step: Callable[[int, Record], None]) -> None:
        self.on_step = on_step
        self.source = _UNKNOWN
        self.microsteps = 0
        self.skipped_steps = 0
        self.price_ns = 0
        """What observing has cost so far, as whoever observes says; it only goes along with the totals."""
        self.totals: tuple[int, ...] = (0,) * (Word.PROBE_NS_TOTAL - Word.STEPS + 1)
        """The page's words STEPS..PROBE_NS_TOTAL as of the last step that has ended."""

        # the step that is under way
        self._start_ns = 0
        self._edge_ns = 0
        self._parts = [0] * (1 + len(PHASES))  # indexed by phase; what nobody named stays in "other" by subtraction
        self._samples = 0
        self._micro = 0  # backwards that accumulate gradients, outside an optimizer's closure
        self._calls_grad = False

        # batches fetched and not yet known to be for training
        self._wait_pending = 0
        self._samples_waiting = 0
        self._batches_waiting = 0
        self._exhausted = False

        self._depth = 0  # autograd calls within each other
        self._optimizer = 0  # the outermost optimizer that is stepping, or 0
        self._pivot = 0  # the optimizer whose step ends the step
        self._others: set[int] = set()  # the others that stepped since
        self._forced = _NO_PHASE  # the phase that the user has named

        # micro-steps of the last two steps, 0: there was none
        self._last_micro = 0
        self._before_last_micro = 0

    def begin(self, now_ns: int) -> None:
        """The first step starts here; what was seen before does not count."""
        self._start_ns = self._edge_ns = now_ns
        self._parts = [0] * (1 + len(PHASES))
        self._wait_pending = 0

    def loader_enter(self, now_ns: int) -> int:
        """A batch is asked for."""
        self._optimizer = 0  # no optimizer reads data: one that is still open has raised
        if self._exhausted:
            self._forget_batches()  # an evaluation ran to its end, and the next thing is not a backward
        if self._forced:
            self._pass(now_ns, _OTHER)
        self._edge_ns = now_ns
        if self._batches_waiting:
            if self.source is _BY_DATALOADER:
                self._use_batches()
                self._close(now_ns, 1)
            elif self._batches_waiting >= PATIENCE:
                if self.source is _UNKNOWN:
                    self.source = _BY_DATALOADER
                    batches = self._batches_waiting
                    self._use_batches()
                    self._close(now_ns, batches)
                else:
                    self._forget_batches()
        return _IN_LOADER

    def loader_exit(self, now_ns: int, samples: int, trains: bool) -> int:
        """A batch is there; `trains` is False when gradients are off, so that it cannot be for training."""
        if not trains:
            self._pass(now_ns, _OTHER)
            return _IN_OTHER
        if self._forced:
            self._pass(now_ns, _OTHER)
        else:
            self._wait_pending += now_ns - self._edge_ns
            self._edge_ns = now_ns
        self._samples_waiting += samples
        self._batches_waiting += 1
        return _IN_FORWARD

    def loader_end(self, now_ns: int) -> int:
        """The loader has no more batches."""
        self._pass(now_ns, _OTHER)
        self._exhausted = True
        return _IN_OTHER

    def backward_enter(self, now_ns: int) -> int:
        """Autograd starts (`backward` or `grad`)."""
        self._depth += 1
        if self._depth > 1:
            return _IN_BACKWARD  # a checkpoint recomputes inside the backward
        self._parts[self._forced or _FORWARD] += now_ns - self._edge_ns
        self._edge_ns = now_ns
        if self._batches_waiting:  # they are trained on
            self._parts[_DATA_WAIT] += self._wait_pending
            self._samples += self._samples_waiting
            self._wait_pending = self._samples_waiting = self._batches_waiting = 0
        self._exhausted = False
        if self.source is _BY_DATALOADER:
            self.source = _UNKNOWN
        return _IN_BACKWARD

    def backward_exit(self, now_ns: int, accumulates: bool) -> int:
        """Autograd is done; `accumulates` tells `backward`, which fills gradients for a step, from `grad`."""
        self._depth -= 1
        if self._depth > 0:
            return _IN_BACKWARD
        self._depth = 0
        self._parts[self._forced or _BACKWARD] += now_ns - self._edge_ns
        self._edge_ns = now_ns
        if not accumulates:
            self._calls_grad = True
            return _IN_OPTIMIZER if self._optimizer else _IN_STEPPING
        self.microsteps += 1
        if self._optimizer:
            return _IN_OPTIMIZER  # a closure (LBFGS) evaluates as often as it likes
        self._micro += 1
        if self.source is _BY_BACKWARD:
            self._close(now_ns, 1)
        elif self._micro >= PATIENCE and self._micro >= 4 * self._last_micro and self.source is not _BY_MARK:
            self.source = _BY_BACKWARD
            self._close(now_ns, self._micro)
        return _IN_STEPPING

    def optimizer_enter(self, now_ns: int, identity: int) -> int:
        """An optimizer starts to step; `identity` is its `id`."""
        if self._optimizer:
            return _IN_OPTIMIZER  # one optimizer wraps another
        self._optimizer = identity
        if self._forced or self._depth:  # optimizers may step from gradient hooks, within a backward
            self._pass(now_ns, _BACKWARD if self._depth else _OTHER)
        self._edge_ns = now_ns
        return _IN_OPTIMIZER

    def optimizer_exit(self, now_ns: int, identity: int) -> int:
        """An optimizer has stepped."""
        if self._optimizer != identity:
            return _IN_OPTIMIZER if self._optimizer else _IN_OTHER
        self._optimizer = 0
        self._parts[self._forced or _OPTIMIZER] += now_ns - self._edge_ns
        self._edge_ns = now_ns
        region = _IN_BACKWARD if self._depth else _IN_OTHER
        if self.source is _BY_MARK:
            return region
        if self.source is not _BY_OPTIMIZER:
            self.source = _BY_OPTIMIZER
            self._pivot = identity
        # Of several optimizers (a GAN's two, one per layer), one is counted: the first seen, or, when another steps
        # twice in its absence, that one.
        if identity != self._pivot:
            if identity not in self._others:
                self._others.add(identity)
                return region
            self._pivot = identity
        if self._others:
            self._others.clear()
        micro = self._micro
        if self._calls_grad and not micro:
            self.microsteps += 1
            micro = 1
        if micro and not micro == self._last_micro == self._before_last_micro:
            self._note_skips(micro)
        self._close(now_ns, 1)
        return region

    def mark_step(self, now_ns: int) -> None:
        """The user says that a step ends here; from now on nothing else ends one."""
        self.source = _BY_MARK
        self._pass(now_ns, _OTHER)
        self._use_batches()
        self._close(now_ns, 1)

    def mark_phase(self, now_ns: int, phase: int) -> int:
        """From here on the time belongs to `phase` (1 + its index in PHASES), or again to what the edges say (0).

        Returns:
            What held before, to be handed back when the user's block ends.
        """
        self._pass(now_ns, _OTHER)
        before = self._forced
        self._forced = phase
        return before

    def add_samples(self, samples: int) -> None:
        """A helper thread of the user's fetched a batch; its wait is not the training thread's."""
        self._samples_waiting += samples
        self._batches_waiting += 1

    def _pass(self, now_ns: int, phase: int) -> None:
        """The time since the last edge belongs to `phase`, unless the user has named another.

        The edges of every step have this written out, and leave out "other", which `_close` makes from the rest. Calls
        are what an edge costs: this and positional arguments took 1.5 us off a step.
        """
        self._parts[self._forced or phase] += now_ns - self._edge_ns
        self._edge_ns = now_ns

    def _use_batches(self) -> None:
        """The batches that wait are trained on."""
        self._parts[_DATA_WAIT] += self._wait_pending
        self._samples += self._samples_waiting
        self._wait_pending = self._samples_waiting = self._batches_waiting = 0

    def _forget_batches(self) -> None:
        """The batches that wait were not for training."""
        self._wait_pending = self._samples_waiting = self._batches_waiting = 0
        self._exhausted = False

    def _note_skips(self, micro: int) -> None:
        """Tell skipped steps (GradScaler found inf: no optimizer step) from accumulation, which looks the same.

        A step took a multiple of the micro-steps of the one after it, and of the one before it if there was one: the
        optimizer was left out in between. A change of rhythm, or a short last batch of an epoch, does not do that.
        """
        before, last = self._before_last_micro, self._last_micro
        if last > micro and last % micro == 0 and before in (0, micro):
            self.skipped_steps += last // micro - 1
        self._before_last_micro, self._last_micro = last, micro

    def _close(self, now_ns: int, count: int) -> None:
        """End the step that is under way, as `count` steps of equal length."""
        _, data_wait_ns, forward_ns, backward_ns, optimizer_ns, _ = self._parts
        data_wait_ns += self._wait_pending  # fetched ahead, for the next step, but in this one's time
        duration_ns = now_ns - self._start_ns
        samples = self._samples
        steps, _, _, all_samples, total, data_wait, forward, backward, optimizer, other, _, _, _ = self.totals
        self.totals = (
            steps + count,
            self.microsteps,
            self.skipped_steps,
            all_samples + samples,
            total + duration_ns,
            data_wait + data_wait_ns,
            forward + forward_ns,
            backward + backward_ns,
            optimizer + optimizer_ns,
            other + duration_ns - data_wait_ns - forward_ns - backward_ns - optimizer_ns,
            now_ns,
            self.source,
            self.price_ns,
        )
        self._start_ns = now_ns
        self._parts = [0, 0, 0, 0, 0, 0]
        self._wait_pending = self._samples = self._micro = 0
        self._calls_grad = False
        if count > 1:
            duration_ns //= count
            data_wait_ns //= count
            forward_ns //= count
            backward_ns //= count
            optimizer_ns //= count
            samples //= count
        self.on_step(
            count,
            (now_ns - duration_ns, duration_ns, data_wait_ns, forward_ns, backward_ns, optimizer_ns, samples),
        )
