"""Turns edges into steps and phases: a pure state machine without torch, clock or segment.

The training thread passes six edges, each with the time: enter and exit of the dataloader's `next`, of the autograd
engine, and of an optimizer's step. The time between two edges belongs to one phase:

    before a loader exit       data_wait, once a backward shows that the batch was for training
    before a backward enter    forward
    before a backward exit     backward
    before an optimizer exit   optimizer
    from a loader exit on, of  validation: a batch without gradients, or batches that ran out without a backward
    a batch not for training
    anything else              other: gradient clipping, logging

Intervals with their own beginning and end are nested in these: a copy, a sync, a collective, a checkpoint, a
compilation, a garbage collection. `nest` subtracts their time from the phase around them. `other` is the rest of a step
after the named phases, so the parts always sum to the step.

Each edge determines the region of the thread from there on (`layout.Region`).

A step ends when its optimizer has stepped. If no optimizer is observed for `PATIENCE` micro-steps (a compiled or custom
one), it ends with each backward, and if there is no backward either, with each batch (a fully compiled step). The time
until then is counted as that many steps of equal length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpulaunch.profiler.channel.layout import Region, StepSource
from gpulaunch.profiler.probe.account import (
    BACKWARD,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    VALIDATION,
    Account,
    Record,
)

PATIENCE: Final = 64
"""Micro-steps (or batches) without the preferred edge after which the next one ends the steps. Gradients are rarely
accumulated over more; an error adds a few short steps to the count, once."""

_LONG_PATIENCE: Final = 16 * PATIENCE
"""The same if an optimizer exists that cannot be part of compiled code: it is expected to step."""

_GONE: Final = -1  # no optimizer has this `id`
_MANY: Final = 16  # optimizers of one program that each step once per step, after their own backwards

# An enum member lookup takes as long as an edge.
_UNKNOWN: Final = StepSource.NONE
_BY_OPTIMIZER: Final = StepSource.OPTIMIZER
_BY_BACKWARD: Final = StepSource.BACKWARD
_BY_DATALOADER: Final = StepSource.DATALOADER
_BY_MARK: Final = StepSource.MARK

# Plain numbers, as in the segment.
IN_LOADER: Final = int(Region.LOADER)
IN_FORWARD: Final = int(Region.FORWARD)
IN_BACKWARD: Final = int(Region.BACKWARD)
IN_STEPPING: Final = int(Region.STEPPING)
IN_OPTIMIZER: Final = int(Region.OPTIMIZER)
IN_OTHER: Final = int(Region.OTHER)
IN_VALIDATION: Final = int(Region.VALIDATION)


class StepMachine(Account):
    """Counts one thread's steps.

    Times are nanoseconds of any one monotonic clock. `begin` comes before any edge. Whenever a step has ended,
    `on_step` gets the number (1, except for the first ones of a loop without optimizer) and the record of one, or of
    their mean.

    Only the training thread calls this. Any thread may note, at any time: see `Account`.
    """

    __slots__ = (
        "_apart",
        "_batches_waiting",
        "_beside",
        "_compiles",
        "_dataset",
        "_depth",
        "_exhausted",
        "_fed",
        "_micro_apart",
        "_mixed",
        "_optimizer",
        "_others",
        "_patience",
        "_pivot_since",
        "_samples_waiting",
        "_trained",
        "_validates",
        "on_evaluated",
        "pivot",
    )

    def __init__(self, on_step: Callable[[int, Record], None]) -> None:
        super().__init__(on_step)
        self.on_evaluated: Callable[[int, bool], None] = lambda _batches, _trains: None
        """Called with the number of batches fetched with gradients on that were not for training after all, and whether
        others of the same dataset are."""

        # batches fetched and not yet known to be for training
        self._samples_waiting = 0
        self._batches_waiting = 0
        self._exhausted = False
        self._validates = False  # the last batch was fetched without gradients, and its loader has not ended
        self._dataset = self._trained = 0  # the dataset of the last batch, and of the last one used for training
        self._mixed = self._beside = 0  # other datasets: with pending batches, and trained on with the last
        self._fed = False  # batches were used for training since an optimizer stepped

        self._depth = 0  # autograd calls within each other
        self._optimizer = 0  # the outermost optimizer that is stepping, or 0
        self.pivot = 0
        """The optimizer whose step ends the step (its `id`): those that are noted are its."""
        self._pivot_since = 0  # this many steps ago it was another
        self._others: set[int] = set()  # the others that stepped since
        self._apart = self._micro_apart = 0  # how often with their own backward; micro-steps up to the last one
        self._patience = PATIENCE
        self._compiles = False

    def start_over(self, now_ns: int) -> None:
        """Another thread trains from now on: the current step is abandoned."""
        self.notes.clear()
        self.begin(now_ns)
        self._samples_waiting = self._batches_waiting = self._mixed = 0
        self._depth = self._optimizer = self._apart = self._micro_apart = 0
        self._exhausted = self._validates = self._fed = False
        self._others.clear()

    @property
    def inside_backward(self) -> bool:
        """Whether the thread is inside autograd."""
        return self._depth > 0

    @property
    def ends_by_itself(self) -> bool:
        """Whether steps end with one optimizer's, or at the user's marks, also without the edges before that."""
        if self.source is _BY_OPTIMIZER:
            return not self._pivot_since or self.totals[0] - self._pivot_since >= PATIENCE
        return self.source is _BY_MARK

    def optimizer_made(self, identity: int) -> None:
        """The program has created an optimizer. Its `id` may be that of a deleted one."""
        if not self._compiles:
            self._patience = _LONG_PATIENCE
        self._others.discard(identity)
        if identity == self.pivot:
            self.pivot = _GONE

    def compiled(self) -> None:
        """Code was compiled, possibly the optimizer's step, which is then not observed."""
        self._compiles = True
        self._patience = PATIENCE

    def left_out(self, identity: int) -> None:
        """A gradient scaler has skipped the step of this optimizer (its `id`)."""
        if self._compiles and not self.optimized:
            return  # its steps are compiled and never observed
        if self.pivot in (0, _GONE, identity):
            self.pivot = identity
            self.skipped_steps += 1

    def loader_enter(self, now_ns: int) -> int:
        """A batch is requested."""
        self._optimizer = self._depth = 0  # neither of them reads data: what is still open has raised
        if self._exhausted:
            self._forget_batches()  # an evaluation has ended, and no backward follows
        if now_ns < self._edge_ns:
            now_ns = self._edge_ns
        if self._forced:
            self._parts[self._forced] += now_ns - self._edge_ns
        elif self._validates:
            self._parts[VALIDATION] += now_ns - self._edge_ns
        elif self._batches_waiting:
            self._idle_pending += now_ns - self._edge_ns
        self._edge_ns = now_ns
        if self._batches_waiting:
            if self.source is _BY_DATALOADER:
                self._use_batches()
                self._close(1)
            elif self._batches_waiting >= PATIENCE:
                if self.source is not _UNKNOWN:
                    if self._dataset != self._trained:  # else it is prefetched
                        self._forget_batches()
                elif self._patience == PATIENCE:
                    self.source = _BY_DATALOADER
                    batches = self._batches_waiting
                    self._use_batches()
                    self._close(batches)
        return IN_LOADER

    def loader_exit(self, now_ns: int, samples: int, trains: bool, dataset: int = 0) -> int:
        """A batch of a dataset (its `id`) has arrived; `trains` is False when gradients are off: not for training."""
        self._validates = not trains
        if not trains:
            self._pass(now_ns, VALIDATION)
            return IN_VALIDATION
        if self._batches_waiting and dataset != self._dataset:
            if dataset == self._trained and self._dataset != self._beside and self._batches_waiting > 1:
                self._forget_batches()  # an evaluation was aborted: training continues, with its own batches
            else:
                self._mixed = self._dataset
        if now_ns < self._edge_ns:
            now_ns = self._edge_ns
        if self._forced:
            self._parts[self._forced] += now_ns - self._edge_ns
        else:
            self._wait_pending += now_ns - self._edge_ns
        self._edge_ns = now_ns
        self._samples_waiting += samples
        self._batches_waiting += 1
        self._dataset = dataset
        return IN_FORWARD

    def loader_end(self, now_ns: int) -> int:
        """The loader has no more batches."""
        edge_ns = self._edge_ns
        self._pass(now_ns, VALIDATION if self._validates else OTHER)
        if self._batches_waiting and not (self._validates or self._forced):
            self._idle_pending += self._edge_ns - edge_ns
        self._exhausted = not self._validates
        self._validates = False
        return IN_OTHER

    def backward_enter(self, now_ns: int) -> int:
        """Autograd starts (`backward` or `grad`)."""
        self._depth += 1
        if self._depth > 1:
            return IN_BACKWARD  # a checkpoint recomputes inside the backward
        if now_ns < self._edge_ns:
            now_ns = self._edge_ns
        self._parts[self._forced or FORWARD] += now_ns - self._edge_ns
        self._edge_ns = now_ns
        if self._batches_waiting:  # they are used for training
            self._parts[DATA_WAIT] += self._wait_pending
            self._samples += self._samples_waiting
            self._wait_pending = self._idle_pending = self._samples_waiting = self._batches_waiting = 0
            self._trained = self._dataset
            self._beside, self._mixed = self._mixed, 0
            self._fed = True
        self._exhausted = self._validates = False
        if self.source is _BY_DATALOADER:
            self.source = _UNKNOWN
        return IN_BACKWARD

    def backward_exit(self, now_ns: int, accumulates: bool) -> int:
        """Autograd is done; `accumulates` distinguishes `backward`, which fills gradients for a step, from `grad`."""
        self._depth -= 1
        if self._depth > 0:
            return IN_BACKWARD
        self._depth = 0
        if now_ns < self._edge_ns:
            now_ns = self._edge_ns
        self._parts[self._forced or BACKWARD] += now_ns - self._edge_ns
        self._edge_ns = now_ns
        if not accumulates:
            self._calls_grad = True
            return IN_OPTIMIZER if self._optimizer else IN_STEPPING
        self.microsteps += 1
        if self._optimizer:
            return IN_OPTIMIZER  # a closure (LBFGS) may evaluate any number of times
        self._micro += 1
        if self.source is _BY_BACKWARD:
            self._close(1)
        elif self._micro >= self._patience and self._micro >= 4 * self._last_micro and self.source is not _BY_MARK:
            self.source = _BY_BACKWARD
            self._close(self._micro)
        return IN_STEPPING

    def optimizer_enter(self, now_ns: int, identity: int) -> int:
        """An optimizer starts to step; `identity` is its `id`."""
        if self._optimizer:
            return IN_OPTIMIZER  # one optimizer wraps another
        self._optimizer = identity
        if self._forced or self._depth:  # optimizers may step from gradient hooks, within a backward
            self._pass(now_ns, BACKWARD if self._depth else OTHER)
        elif now_ns > self._edge_ns:
            self._edge_ns = now_ns
        return IN_OPTIMIZER

    def optimizer_exit(self, now_ns: int, identity: int) -> int:
        """An optimizer has stepped."""
        if self._optimizer != identity:
            return IN_OPTIMIZER if self._optimizer else IN_OTHER
        self._optimizer = 0
        if now_ns < self._edge_ns:
            now_ns = self._edge_ns
        self._parts[self._forced or OPTIMIZER] += now_ns - self._edge_ns
        self._edge_ns = now_ns
        region = IN_BACKWARD if self._depth else IN_OTHER
        if self.source is _BY_MARK:
            return region
        if self.source is not _BY_OPTIMIZER:
            self.source = _BY_OPTIMIZER
            self.pivot = identity
        # Of several optimizers that share a batch (a GAN's two, one per layer), the first observed one counts. Another
        # one counts if it had its own batch; if it steps twice while the first does not; or if many do, each after its
        # own backward: such optimizers exist for a step or two, as those of federated clients.
        fed, self._fed = self._fed, False
        count = 1
        if identity != self.pivot:
            if self._micro > self._micro_apart:
                self._micro_apart = self._micro
                self._apart += 1
            if not fed:
                if identity not in self._others and self._apart < _MANY:
                    self._others.add(identity)
                    return region
                count = max(1, self._apart)
            self.pivot, self._pivot_since = identity, self.totals[0]
        if self._others:
            self._others.clear()
        self._apart = self._micro_apart = 0
        micro = self._micro
        if self._calls_grad and not micro:
            self.microsteps += 1
            micro = 1
        if micro:
            self._last_micro = micro
        elif not self.microsteps:
            self._use_batches()  # no backward was ever observed: that of this torch cannot be tapped
            self._trained = self._dataset
        self._close(count)
        return region

    def mark_step(self, now_ns: int) -> None:
        """The user marks the end of a step; from now on nothing else ends one."""
        self.source = _BY_MARK
        self._pass(now_ns, VALIDATION if self._validates else OTHER)
        self._use_batches()
        self._close(1)

    def mark_phase(self, now_ns: int, phase: int) -> int:
        """From here on the time belongs to `phase` (1 + its index in PHASES), or to that of the edges (0).

        Returns:
            The previous value, to be restored when the user's block ends.
        """
        self._pass(now_ns, VALIDATION if self._validates else OTHER)
        before = self._forced
        self._forced = phase
        return before

    def add_samples(self, samples: int) -> None:
        """A helper thread of the user's fetched a batch; its wait is not the training thread's."""
        self._samples_waiting += samples
        self._batches_waiting += 1

    def ends_step(self, identity: int) -> bool:
        """True if steps end when this optimizer (its `id`) has stepped; 0: at the user's marks."""
        return self.source is _BY_MARK if not identity else self.source is _BY_OPTIMIZER and identity == self.pivot

    def _use_batches(self) -> None:
        """The pending batches are used for training."""
        self._parts[DATA_WAIT] += self._wait_pending
        self._samples += self._samples_waiting
        self._wait_pending = self._idle_pending = self._samples_waiting = self._batches_waiting = 0

    def _forget_batches(self) -> None:
        """The pending batches were not for training."""
        self._parts[VALIDATION] += self._wait_pending + self._idle_pending
        self.on_evaluated(self._batches_waiting, self._dataset == self._trained or not self._trained)
        self._mixed = 0
        self._wait_pending = self._idle_pending = self._samples_waiting = self._batches_waiting = 0
        self._exhausted = False
