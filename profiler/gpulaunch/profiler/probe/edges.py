"""What happens at an edge: the clock is read, the step machine is told, the page is written.

Every method runs inside the user's training loop: it raises nothing, waits for nothing, takes about a microsecond. A
fault takes the part it happened in out of service and says so in the page, once.

The price is measured where it arises: each edge reads the clock on its way in, which the phases need anyway, and on its
way out. Not in it: the call of the wrapper itself (about 0.1 us an edge), which `benchmarks/probe.py` does see.
"""

from __future__ import annotations

from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.channel.layout import PHASES, Hook, TextSlot, Word
from gpulaunch.profiler.channel.page import PageWriter
from gpulaunch.profiler.probe.batch import queue_of, samples_in
from gpulaunch.profiler.probe.device import memory_of
from gpulaunch.profiler.probe.step import ClosedStep, StepMachine, bucket_of

__all__ = ["Probe"]

_GPU_MEMORY_EVERY_NS: Final = 1_000_000_000
_BATCHES: Final = int(Word.LOADER_BATCHES)
_WORKERS: Final = int(Word.LOADER_WORKERS_CONFIGURED)
_OUTSTANDING: Final = int(Word.LOADER_OUTSTANDING)
_READY: Final = int(Word.LOADER_READY)
_BLOCKED: Final = int(Word.LOADER_REORDER_BLOCKED)
_NO_THREAD: Final = 0  # get_ident is never 0


class Probe:
    """The edges of one rank, written to its page.

    The first thread that computes gradients or steps an optimizer is the training thread; edges of others do not count.
    Until there is one, the first thread that reads a dataloader stands in for it.
    """

    __slots__ = (
        "_gpu_due_ns",
        "_grad_enabled",
        "_loader_thread",
        "_machine",
        "_off",
        "_parts",
        "_price_ns",
        "_tensor",
        "_thread",
        "_torch",
        "_writer",
    )

    def __init__(self, writer: PageWriter, torch: Any) -> None:
        self._writer = writer
        self._torch = torch
        self._tensor = torch.Tensor
        self._grad_enabled = torch.is_grad_enabled
        self._machine = StepMachine(self._publish)
        self._off = False
        self._parts = Hook.LOADER_QUEUE | Hook.SAMPLES | Hook.GPU_MEMORY
        self._thread = _NO_THREAD
        self._loader_thread = _NO_THREAD
        self._gpu_due_ns = 0
        self._price_ns = 0
        self.armed(self._parts)

    def off(self) -> None:
        """Do nothing any more; the hooks fall straight through. For forked children, which must not write the page."""
        self._off = True

    def armed(self, hook: Hook) -> None:
        """Put it in the page that `hook` is in service."""
        self._writer.words[Word.HOOKS_ARMED] |= hook
        self._writer.words[Word.HOOKS_UNAVAILABLE] &= ~hook

    def unavailable(self, hook: Hook, why: str) -> None:
        """Put it in the page that `hook` is out of service, and why."""
        self._parts &= ~hook
        self._writer.words[Word.HOOKS_ARMED] &= ~hook
        self._writer.words[Word.HOOKS_UNAVAILABLE] |= hook
        self._writer.write_text(TextSlot.FAULT, f"{hook.name or hook}: {why}")

    def loader_enter(self, iterator: Any) -> None:
        """The dataloader is asked for a batch."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if self._reads_for_training():
                self._machine.loader_enter(now_ns)
            if self._parts & Hook.LOADER_QUEUE:
                self._write_queue(iterator)
            self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def loader_exit(self, batch: object) -> None:
        """The dataloader hands out a batch."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            self._writer.words[_BATCHES] += 1
            trains = self._grad_enabled()
            samples = self._count_samples(batch) if trains else 0
            if self._reads_for_training():
                self._machine.loader_exit(now_ns, samples, trains=trains)
            else:
                self._machine.add_samples(samples)
            self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def loader_end(self) -> None:
        """The dataloader has no more batches."""
        if self._off:
            return
        try:
            if self._reads_for_training():
                self._machine.loader_end(monotonic_ns())
        except Exception as error:
            self._fail(error)

    def backward_enter(self) -> None:
        """Autograd starts."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if self._trains():
                self._machine.backward_enter(now_ns)
                self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def backward_exit(self, accumulates: bool) -> None:
        """Autograd is done."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if self._trains():
                self._machine.backward_exit(now_ns, accumulates=accumulates)
                self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def optimizer_enter(self, identity: int) -> None:
        """An optimizer starts to step."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if self._trains():
                self._machine.optimizer_enter(now_ns, identity)
                self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def optimizer_exit(self, identity: int) -> None:
        """An optimizer has stepped."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if self._trains():
                self._machine.optimizer_exit(now_ns, identity)
                self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def mark_step(self) -> None:
        """The user says that a step ends here."""
        if self._off:
            return
        try:
            if self._trains():
                self._machine.mark_step(monotonic_ns())
        except Exception as error:
            self._fail(error)

    def mark_phase(self, phase: int) -> int:
        """The user says which phase the time from here on belongs to (an index into PHASES, or -1: as the edges say).

        Returns:
            What to set again when the user's block ends.
        """
        if self._off:
            return -1
        try:
            return self._machine.mark_phase(monotonic_ns(), phase) if self._trains() else -1
        except Exception as error:
            self._fail(error)
            return -1

    def note(self, text: str) -> None:
        """Put the user's words in the page."""
        if self._off:
            return
        try:
            self._writer.write_text(TextSlot.NOTE, text)
        except Exception as error:
            self._fail(error)

    def _trains(self) -> bool:
        """True in the training thread; the first to ask becomes it."""
        thread = get_ident()
        if thread == self._thread:
            return True
        if self._thread:
            return False
        self._thread = thread
        if self._loader_thread not in (_NO_THREAD, thread):
            self._machine.restart()  # a helper thread reads the batches; its edges were not the training's
        return True

    def _reads_for_training(self) -> bool:
        """True in the training thread, or in the one that stands in for it."""
        thread = get_ident()
        if self._thread:
            return thread == self._thread
        if not self._loader_thread:
            self._loader_thread = thread
        return thread == self._loader_thread

    def _write_queue(self, iterator: Any) -> None:
        try:
            queue = queue_of(iterator)
        except Exception as error:
            self.unavailable(Hook.LOADER_QUEUE, repr(error))
            return
        if queue is not None:
            words = self._writer.words
            words[_WORKERS] = queue.workers
            words[_OUTSTANDING] = queue.outstanding
            words[_READY] = queue.ready
            words[_BLOCKED] = queue.reorder_blocked

    def _count_samples(self, batch: object) -> int:
        if not self._parts & Hook.SAMPLES:
            return 0
        try:
            return samples_in(batch, self._tensor)
        except Exception as error:  # a batch type of the user's own may do anything when it is looked into
            self.unavailable(Hook.SAMPLES, repr(error))
            return 0

    def _publish(self, step: ClosedStep) -> None:
        """A step has ended: everything that is published once per step."""
        machine = self._machine
        now_ns = step.start_ns + step.duration_ns
        self._writer.end_step(
            (
                machine.steps,
                machine.microsteps,
                machine.skipped_steps,
                machine.samples,
                machine.step_ns_total,
                *machine.phase_ns,
                now_ns,
                machine.source,
                self._price_ns,
            ),
            bucket_of(step.duration_ns),
            step.count,
            (
                step.start_ns,
                step.duration_ns,
                step.data_wait_ns,
                step.forward_ns,
                step.backward_ns,
                step.optimizer_ns,
                step.samples,
            ),
        )
        if now_ns >= self._gpu_due_ns:
            self._gpu_due_ns = now_ns + _GPU_MEMORY_EVERY_NS
            self._write_gpu_memory()

    def _write_gpu_memory(self) -> None:
        if not self._parts & Hook.GPU_MEMORY:
            return
        try:
            memory = memory_of(self._torch.cuda)
        except Exception as error:
            self.unavailable(Hook.GPU_MEMORY, repr(error))
            return
        if memory is not None:
            words = self._writer.words
            words[Word.GPU_ALLOCATED_BYTES] = memory.allocated_bytes
            words[Word.GPU_PEAK_ALLOCATED_BYTES] = memory.peak_allocated_bytes
            words[Word.GPU_RESERVED_BYTES] = memory.reserved_bytes

    def _fail(self, error: Exception) -> None:
        """Our own fault: stop observing, keep training."""
        self._off = True
        with suppress(Exception):  # if the page itself is what failed, there is nobody left to tell
            self.unavailable(Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER, repr(error))


assert len(PHASES) == 5, "the counters of end_step list five phases"
