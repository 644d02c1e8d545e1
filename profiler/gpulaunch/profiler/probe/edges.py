"""What happens at an edge: the clock is read, the step machine is told, the page is written.

Taps are what `hooks` puts into torch. They run inside the user's training loop: they raise nothing of their own, wait
for nothing, and take one to two microseconds. A fault takes the part it happened in out of service and says so in the
page.

They are closures, and call the machine themselves: between torch's kernels caches are cold, and each further Python
call is about 0.3 us. Their first line is for torch.compile, which may trace a tap: there the rest does not exist.

The price is measured where it arises, in one step of eight: there each edge reads the clock on its way in, which the
phases need anyway, and on its way out. Not in it: the call of the tap itself, and what torch loses of the caches;
`benchmarks/probe.py` sees those too, as about the same again.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.channel.layout import REGION_BITS, STEP_BOUNDS_NS, Hook, Region, TextSlot, Word
from gpulaunch.profiler.channel.page import PageWriter
from gpulaunch.profiler.probe.batch import queue_of, samples_in
from gpulaunch.profiler.probe.device import memory_of
from gpulaunch.profiler.probe.step import Record, StepMachine

__all__ = ["Probe", "tap_after_step", "tap_backward", "tap_before_step", "tap_next"]

_GPU_MEMORY_EVERY_NS: Final = 1_000_000_000
_QUEUE_EVERY_NS: Final = 10_000_000  # readers come a few times a second; steps of a millisecond need not pay for each
_NEVER: Final = 1 << 63
_PRICED_EVERY: Final = 8  # steps of which one is priced; it stands for the others
_BATCHES: Final = int(Word.LOADER_BATCHES)
_LAST_EDGE: Final = int(Word.LAST_EDGE)
_LAST_STEP: Final = Word.LAST_STEP_MONOTONIC_NS - Word.STEPS
_OTHER: Final = int(Region.OTHER)
_NO_THREAD: Final = 0  # get_ident is never 0
_OFF: Final = -1  # no thread has this either: nobody is the training thread any more


class Probe:
    """The state behind the taps of one rank, and its page.

    The first thread that computes gradients or steps an optimizer is the training thread; edges of others do not count.
    Until there is one, the first thread that reads a dataloader stands in for it.
    """

    __slots__ = (
        "_gpu_due_ns",
        "_loader_thread",
        "_torch",
        "batches",
        "counts_samples",
        "machine",
        "prices",
        "queue_due_ns",
        "thread",
        "writer",
    )

    def __init__(self, writer: PageWriter, torch: Any) -> None:
        self.writer = writer
        self._torch = torch
        self.machine = StepMachine(self._publish_first)
        self.thread = _NO_THREAD
        self._loader_thread = _NO_THREAD
        self.batches = 0
        self.counts_samples = True
        self.prices = False
        self._gpu_due_ns = self.queue_due_ns = 0
        self.armed(Hook.LOADER_QUEUE | Hook.SAMPLES | Hook.GPU_MEMORY)

    def off(self) -> None:
        """Do nothing any more; the taps fall straight through. For forked children, which must not write the page."""
        self.thread = _OFF

    def armed(self, hook: Hook) -> None:
        """Put it in the page that `hook` is in service."""
        self.writer.words[Word.HOOKS_ARMED] |= hook
        self.writer.words[Word.HOOKS_UNAVAILABLE] &= ~hook

    def unavailable(self, hook: Hook, why: str) -> None:
        """Put it in the page that `hook` is out of service, and why."""
        self.writer.words[Word.HOOKS_ARMED] &= ~hook
        self.writer.words[Word.HOOKS_UNAVAILABLE] |= hook
        self.writer.write_text(TextSlot.FAULT, f"{hook.name or hook}: {why}")

    def fail(self, error: Exception) -> None:
        """Our own fault: stop observing, keep training."""
        self.off()
        with suppress(Exception):  # if the page itself is what failed, there is nobody left to tell
            self.unavailable(Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER, repr(error))

    def adopts(self, now_ns: int) -> bool:
        """True if this thread, which is not the training thread, becomes it: the first to ask does."""
        if self.thread:
            return False
        self.thread = get_ident()
        if self._loader_thread != self.thread:  # else its steps have begun with its first batch
            self._begin(now_ns)
        return True

    def stands_in(self, now_ns: int) -> bool:
        """True if this thread's batches count although it is not the training thread: there is none yet."""
        if self.thread:
            return False
        if not self._loader_thread:
            self._loader_thread = get_ident()
            self._begin(now_ns)
        return self._loader_thread == get_ident()

    def loader_end(self) -> None:
        """The dataloader has no more batches."""
        try:
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.stands_in(now_ns):
                self._at(now_ns, self.machine.loader_end(now_ns))
        except Exception as error:
            self.fail(error)

    def write_queue(self, iterator: Any, now_ns: int) -> None:
        """Publish how the dataloader's queue stands."""
        self.queue_due_ns = now_ns + _QUEUE_EVERY_NS
        try:
            self.writer.write_queue(queue_of(iterator))
        except Exception as error:
            self.queue_due_ns = _NEVER
            self.unavailable(Hook.LOADER_QUEUE, repr(error))

    def count_no_samples(self, error: Exception) -> None:
        """A batch could not be looked into: a type of the user's own may do anything when it is."""
        self.counts_samples = False
        self.unavailable(Hook.SAMPLES, repr(error))

    def mark_step(self) -> None:
        """The user says that a step ends here."""
        try:
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.adopts(now_ns):
                self.machine.mark_step(now_ns)
                self._at(now_ns, _OTHER)
        except Exception as error:
            self.fail(error)

    def mark_phase(self, phase: int) -> int:
        """The user says which phase the time from here on belongs to (1 + its index in PHASES, or 0: as the edges say).

        Returns:
            What to set again when the user's block ends.
        """
        try:
            now_ns = monotonic_ns()
            if get_ident() == self.thread or self.adopts(now_ns):
                self._at(now_ns, _OTHER)
                return self.machine.mark_phase(now_ns, phase)
        except Exception as error:
            self.fail(error)
        return 0

    def note(self, text: str) -> None:
        """Put the user's words in the page."""
        try:
            if self.thread != _OFF:
                self.writer.write_text(TextSlot.NOTE, text)
        except Exception as error:
            self.fail(error)

    def _begin(self, now_ns: int) -> None:
        self.machine.begin(now_ns)
        self.writer.words[Word.FIRST_STEP_START_NS] = now_ns

    def _at(self, now_ns: int, region: int) -> None:
        """The training thread has passed an edge. The taps have this written out: `edge` is the word, 3 the bits."""
        self.writer.words[_LAST_EDGE] = now_ns << REGION_BITS | region

    def _publish_first(self, count: int, record: Record) -> None:
        """The first step has ended."""
        self.machine.on_step = self._publish
        self.writer.words[Word.FIRST_STEP_END_NS] = self.machine.totals[_LAST_STEP]
        self._publish(count, record)

    def _publish(self, count: int, record: Record) -> None:
        """Steps have ended: everything that is published once per step."""
        totals = self.machine.totals
        self.prices = totals[0] % _PRICED_EVERY == _PRICED_EVERY // 2  # not the first: it is like no other
        self.writer.end_step(totals, bisect_left(STEP_BOUNDS_NS, record[1]), count, record)
        now_ns = totals[_LAST_STEP]
        if now_ns >= self._gpu_due_ns:
            self._gpu_due_ns = now_ns + _GPU_MEMORY_EVERY_NS
            self._write_gpu_memory()

    def _write_gpu_memory(self) -> None:
        try:
            memory = memory_of(self._torch.cuda)
        except Exception as error:
            self._gpu_due_ns = _NEVER
            self.unavailable(Hook.GPU_MEMORY, repr(error))
            return
        if memory is not None:
            words = self.writer.words
            words[Word.GPU_ALLOCATED_BYTES] = memory.allocated_bytes
            words[Word.GPU_PEAK_ALLOCATED_BYTES] = memory.peak_allocated_bytes
            words[Word.GPU_RESERVED_BYTES] = memory.reserved_bytes


def tap_next(probe: Probe, torch: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A dataloader iterator's `__next__` that tells when it is asked for a batch, and when it hands one out."""
    is_compiling = torch.compiler.is_dynamo_compiling
    grad_enabled = torch.is_grad_enabled
    tensor = torch.Tensor
    machine = probe.machine
    words = probe.writer.words
    edge = words[_LAST_EDGE : _LAST_EDGE + 1]

    @functools.wraps(original)
    def tapped_next(self: Any) -> Any:
        if is_compiling() or probe.thread == _OFF:
            return original(self)
        try:
            now_ns = monotonic_ns()
            if get_ident() == probe.thread or probe.stands_in(now_ns):
                edge[0] = now_ns << 3 | machine.loader_enter(now_ns)
            if now_ns >= probe.queue_due_ns and self._num_workers:
                probe.write_queue(self, now_ns)
            if probe.prices:
                machine.price_ns += _PRICED_EVERY * (monotonic_ns() - now_ns)
        except Exception as error:
            probe.fail(error)
        try:
            batch = original(self)
        except StopIteration:
            probe.loader_end()
            raise
        try:
            now_ns = monotonic_ns()
            probe.batches += 1
            words[_BATCHES] = probe.batches
            samples = 0
            trains = grad_enabled()
            if trains and probe.counts_samples:
                try:
                    samples = samples_in(batch, tensor)
                except Exception as error:
                    probe.count_no_samples(error)
            if get_ident() == probe.thread or probe.stands_in(now_ns):
                edge[0] = now_ns << 3 | machine.loader_exit(now_ns, samples, trains)
            elif trains:
                machine.add_samples(samples)
            if probe.prices:
                machine.price_ns += _PRICED_EVERY * (monotonic_ns() - now_ns)
        except Exception as error:
            probe.fail(error)
        return batch

    return tapped_next


def tap_backward(probe: Probe, torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """The entry to the autograd engine, telling when it starts and when it is done."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    @functools.wraps(original)
    def tapped_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(t_outputs, *args, **kwargs)
        try:
            now_ns = monotonic_ns()
            if get_ident() == probe.thread or probe.adopts(now_ns):
                edge[0] = now_ns << 3 | machine.backward_enter(now_ns)
                if probe.prices:
                    machine.price_ns += _PRICED_EVERY * (monotonic_ns() - now_ns)
        except Exception as error:
            probe.fail(error)
        try:
            return original(t_outputs, *args, **kwargs)
        finally:
            try:
                now_ns = monotonic_ns()
                if get_ident() == probe.thread:
                    # `backward` accumulates gradients into parameters, `grad` does not.
                    accumulates = kwargs.get("accumulate_grad", False)
                    edge[0] = now_ns << 3 | machine.backward_exit(now_ns, accumulates)
                    if probe.prices:
                        machine.price_ns += _PRICED_EVERY * (monotonic_ns() - now_ns)
            except Exception as error:
                probe.fail(error)

    return tapped_run_backward


def tap_before_step(probe: Probe, torch: Any) -> Callable[[Any, Any, Any], None]:
    """An optimizer pre-hook."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == probe.thread or probe.adopts(now_ns):
                edge[0] = now_ns << 3 | machine.optimizer_enter(now_ns, id(optimizer))
                if probe.prices:
                    machine.price_ns += _PRICED_EVERY * (monotonic_ns() - now_ns)
        except Exception as error:
            probe.fail(error)

    return before_step


def tap_after_step(probe: Probe, torch: Any) -> Callable[[Any, Any, Any], None]:
    """An optimizer post-hook."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == probe.thread:
                edge[0] = now_ns << 3 | machine.optimizer_exit(now_ns, id(optimizer))
                if probe.prices:
                    machine.price_ns += _PRICED_EVERY * (monotonic_ns() - now_ns)
        except Exception as error:
            probe.fail(error)

    return after_step
