"""What happens at an edge: the clock is read, the step machine is told, the page is written.

Every method runs inside the user's training loop: it raises nothing, waits for nothing, takes about a microsecond. A
fault takes the part it happened in out of service and says so in the page, once.

The price is measured where it arises, because between torch's kernels the same code is several times as slow as in a
loop of its own (cold caches): each edge reads the clock on its way in, which the phases need anyway, and on its way out.
Not in it: the call of the tap itself, and what torch loses of the caches; `benchmarks/probe.py` sees those too, as about
the same again.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.channel.layout import STEP_BOUNDS_NS, Hook, TextSlot, Word
from gpulaunch.profiler.channel.page import PageWriter
from gpulaunch.profiler.probe.batch import queue_of, samples_in
from gpulaunch.profiler.probe.device import memory_of
from gpulaunch.profiler.probe.step import Record, StepMachine

__all__ = ["Probe"]

_GPU_MEMORY_EVERY_NS: Final = 1_000_000_000
_BATCHES: Final = int(Word.LOADER_BATCHES)
_NO_THREAD: Final = 0  # get_ident is never 0


class Probe:
    """The edges of one rank, written to its page.

    The first thread that computes gradients or steps an optimizer is the training thread; edges of others do not count.
    Until there is one, the first thread that reads a dataloader stands in for it.
    """

    __slots__ = (
        "_batches",
        "_counts_samples",
        "_gpu_due_ns",
        "_grad_enabled",
        "_loader_thread",
        "_machine",
        "_off",
        "_price_ns",
        "_reads_gpu",
        "_reads_queue",
        "_tensor",
        "_thread",
        "_torch",
        "_words",
        "_writer",
    )

    def __init__(self, writer: PageWriter, torch: Any) -> None:
        self._writer = writer
        self._words = writer.words
        self._batches = 0
        self._torch = torch
        self._tensor = torch.Tensor
        self._grad_enabled = torch.is_grad_enabled
        self._machine = StepMachine(self._publish)
        self._off = False
        self._reads_queue = self._counts_samples = self._reads_gpu = True
        self._thread = _NO_THREAD
        self._loader_thread = _NO_THREAD
        self._gpu_due_ns = 0
        self._price_ns = 0
        self.armed(Hook.LOADER_QUEUE | Hook.SAMPLES | Hook.GPU_MEMORY)

    def off(self) -> None:
        """Do nothing any more; the hooks fall straight through. For forked children, which must not write the page."""
        self._off = True

    def armed(self, hook: Hook) -> None:
        """Put it in the page that `hook` is in service."""
        self._writer.words[Word.HOOKS_ARMED] |= hook
        self._writer.words[Word.HOOKS_UNAVAILABLE] &= ~hook

    def unavailable(self, hook: Hook, why: str) -> None:
        """Put it in the page that `hook` is out of service, and why."""
        self._writer.words[Word.HOOKS_ARMED] &= ~hook
        self._writer.words[Word.HOOKS_UNAVAILABLE] |= hook
        self._writer.write_text(TextSlot.FAULT, f"{hook.name or hook}: {why}")

    def loader_enter(self, iterator: Any) -> None:
        """The dataloader is asked for a batch."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == self._thread or self._stands_in(now_ns):
                self._machine.loader_enter(now_ns)
            if self._reads_queue and iterator._num_workers:
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
            self._batches += 1
            self._words[_BATCHES] = self._batches
            samples = 0
            trains = self._grad_enabled()
            if trains and self._counts_samples:
                try:
                    samples = samples_in(batch, self._tensor)
                except Exception as error:  # a batch type of the user's own may do anything when it is looked into
                    self._counts_samples = False
                    self.unavailable(Hook.SAMPLES, repr(error))
            if get_ident() == self._thread or self._stands_in(now_ns):
                self._machine.loader_exit(now_ns, samples, trains)
            elif trains:
                self._machine.add_samples(samples)
            self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def loader_end(self) -> None:
        """The dataloader has no more batches."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == self._thread or self._stands_in(now_ns):
                self._machine.loader_end(now_ns)
        except Exception as error:
            self._fail(error)

    def backward_enter(self) -> None:
        """Autograd starts."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == self._thread or self._adopts(now_ns):
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
            if get_ident() == self._thread or self._adopts(now_ns):
                self._machine.backward_exit(now_ns, accumulates)
                self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def optimizer_enter(self, identity: int) -> None:
        """An optimizer starts to step."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == self._thread or self._adopts(now_ns):
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
            if get_ident() == self._thread or self._adopts(now_ns):
                self._machine.optimizer_exit(now_ns, identity)
                self._price_ns += monotonic_ns() - now_ns
        except Exception as error:
            self._fail(error)

    def mark_step(self) -> None:
        """The user says that a step ends here."""
        if self._off:
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == self._thread or self._adopts(now_ns):
                self._machine.mark_step(now_ns)
        except Exception as error:
            self._fail(error)

    def mark_phase(self, phase: int) -> int:
        """The user says which phase the time from here on belongs to (1 + its index in PHASES, or 0: as the edges say).

        Returns:
            What to set again when the user's block ends.
        """
        if self._off:
            return 0
        try:
            now_ns = monotonic_ns()
            if get_ident() == self._thread or self._adopts(now_ns):
                return self._machine.mark_phase(now_ns, phase)
        except Exception as error:
            self._fail(error)
        return 0

    def note(self, text: str) -> None:
        """Put the user's words in the page."""
        if self._off:
            return
        try:
            self._writer.write_text(TextSlot.NOTE, text)
        except Exception as error:
            self._fail(error)

    def _adopts(self, now_ns: int) -> bool:
        """True if this thread, which is not the training thread, becomes it: the first to ask does."""
        if self._thread:
            return False
        self._thread = get_ident()
        if self._loader_thread != self._thread:  # else its steps have begun with its first batch
            self._machine.begin(now_ns)
        return True

    def _stands_in(self, now_ns: int) -> bool:
        """True if this thread's batches count although it is not the training thread: there is none yet."""
        if self._thread:
            return False
        if not self._loader_thread:
            self._loader_thread = get_ident()
            self._machine.begin(now_ns)
        return self._loader_thread == get_ident()

    def _write_queue(self, iterator: Any) -> None:
        try:
            queue = queue_of(iterator)
        except Exception as error:
            self._reads_queue = False
            self.unavailable(Hook.LOADER_QUEUE, repr(error))
            return
        self._writer.write_queue(queue)

    def _publish(self, count: int, record: Record) -> None:
        """Steps have ended: everything that is published once per step."""
        bucket = bisect_left(STEP_BOUNDS_NS, record[1])
        self._writer.end_step(self._machine.totals, self._price_ns, bucket, count, record)
        now_ns = record[0] + record[1]
        if now_ns >= self._gpu_due_ns:
            self._gpu_due_ns = now_ns + _GPU_MEMORY_EVERY_NS
            self._write_gpu_memory()

    def _write_gpu_memory(self) -> None:
        if not self._reads_gpu:
            return
        try:
            memory = memory_of(self._torch.cuda)
        except Exception as error:
            self._reads_gpu = False
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
