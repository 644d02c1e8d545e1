"""Batches edges: they are noted as numbers, and the step machine processes them a few steps later, all at once.

Between torch's kernels caches are cold, and all code of the machine is cold. So the edges of plain steps may be noted
instead, each as one number (the time, and in its low bits the region after it, which identifies the edge), and
processed together: the first of them warms the code for the others. The other arguments of an edge must be constant
meanwhile; an edge for which they are not is not noted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpulaunch.profiler.channel.layout import REGION_BITS, StepSource
from gpulaunch.profiler.probe.account import MOST_NOTES, NO_PHASE, Record
from gpulaunch.profiler.probe.step import (
    IN_BACKWARD,
    IN_FORWARD,
    IN_LOADER,
    IN_OPTIMIZER,
    IN_OTHER,
    IN_STEPPING,
    IN_VALIDATION,
    StepMachine,
)

_BY_OPTIMIZER: Final = StepSource.OPTIMIZER

_REGION: Final = (1 << REGION_BITS) - 1
_EDGES: Final = 6  # of a plain step: a batch, a backward, an optimizer
COUNTED: Final = IN_VALIDATION
"""In a note, instead of FORWARD: a batch that is not reported to `on_batch`. (Validations are never noted.)"""


class NotedSteps(StepMachine):
    """A step machine that processes noted edges later."""

    __slots__ = ("_wanted_ns", "dataset", "on_batch", "samples")

    def __init__(self, on_step: Callable[[int, Record], None]) -> None:
        super().__init__(on_step)
        self.samples = self.dataset = 0
        """The properties of the noted batches, and the `id` of their dataset."""
        self.on_batch: Callable[[int], None] = lambda _wait_ns: None
        """Called with the wait for each of them when it is processed."""
        self._wanted_ns = 0  # when the last one was requested

    def note_samples(self, samples: int) -> None:
        """Note that a helper thread of the user's fetched a batch."""
        if len(self.notes) < MOST_NOTES:
            self.notes += (0, samples, NO_PHASE)
        else:  # prefetched, and not used by any step
            self.add_samples(samples)

    def catch_up(self) -> int:
        """Process the notes, in order.

        Returns:
            The region after the last edge of them; 0 if there was none.
        """
        notes = self.notes  # more may be added meanwhile
        region = done = 0
        try:
            if len(notes) >= _EDGES and self._is_between_steps() and self._take_plain(notes):
                region = IN_OTHER
            while done < len(notes):
                note = notes[done]
                edge, now_ns = note & _REGION, note >> REGION_BITS
                done += 1 if edge else 3
                if edge == IN_BACKWARD:
                    region = self.backward_enter(now_ns)
                elif edge == IN_STEPPING:
                    region = self.backward_exit(now_ns, True)
                elif edge == IN_OPTIMIZER:
                    region = self.optimizer_enter(now_ns, self.pivot)
                elif edge == IN_OTHER:
                    region = self.optimizer_exit(now_ns, self.pivot)
                elif edge == IN_LOADER:
                    self._wanted_ns = now_ns
                    region = self.loader_enter(now_ns)
                elif edge:
                    if edge == IN_FORWARD:
                        self.on_batch(now_ns - self._wanted_ns)
                    region = self.loader_exit(now_ns, self.samples, True, self.dataset)
                else:
                    amount, phase = notes[done - 2 : done]
                    if phase:
                        self._take_out(phase, now_ns, amount)
                    else:
                        self.add_samples(amount)
        finally:
            del notes[:done]  # a signal handler may have raised in between: the edge that it interrupted is lost
        return region

    def _is_between_steps(self) -> bool:
        """Whether no step is in progress: steps end with their optimizer, and one has just ended."""
        return (
            self._start_ns == self._edge_ns
            and self.source is _BY_OPTIMIZER
            and not (self._batches_waiting or self._depth or self._optimizer or self._others or self._forced)
            and not (self._exhausted or self._validates)
        )

    def _take_plain(self, notes: list[int]) -> bool:
        """Process the plain steps at the beginning of these, if any."""
        steps = []
        waits_ns = []
        taken = 0
        while len(notes) - taken >= _EDGES:
            asked, handed, began, done, steps_at, ended = notes[taken : taken + _EDGES]
            batch = handed & _REGION
            if (
                asked & _REGION != IN_LOADER
                or (batch != IN_FORWARD and batch != COUNTED)
                or began & _REGION != IN_BACKWARD
                or done & _REGION != IN_STEPPING
                or steps_at & _REGION != IN_OPTIMIZER
                or ended & _REGION != IN_OTHER
            ):
                break
            taken += _EDGES
            asked >>= REGION_BITS
            handed >>= REGION_BITS
            if batch == IN_FORWARD:
                waits_ns.append(handed - asked)
            began, done = began >> REGION_BITS, done >> REGION_BITS
            steps.append((asked, handed, began, done, steps_at >> REGION_BITS, ended >> REGION_BITS))
        if not steps:
            return False
        self._trained = self._dataset = self.dataset
        self._beside = 0
        self._close_plain(steps, self.samples, taken)
        for wait_ns in waits_ns:
            self.on_batch(wait_ns)
        return True
