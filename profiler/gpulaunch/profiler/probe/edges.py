"""The taps at the edges of a step: they read the clock, notify the step machine and write the segment.

`hooks` puts the taps into torch. They run inside the user's training loop: they raise no exceptions of ours, never
block, and take one to two microseconds. A fault disables the part it happened in and is recorded in the segment.

They are closures, and do as little as possible: between torch's kernels caches are cold, and each further Python call
is about 0.3 us. An edge of a plain step is one number, the time and the region after it, for the segment and for the
step machine, which processes it later (`Probe.tell`, `Probe.catch_up`). Their first line is for torch.compile, which
may trace a tap: there the rest does not exist.

They measure their own overhead: see `cost`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any, Final

from gpulaunch.profiler.channel.layout import Region, Word
from gpulaunch.profiler.probe.account import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, OTHER
from gpulaunch.profiler.probe.batch import BLOCKED, LATE_NS, SHORT_NS
from gpulaunch.profiler.probe.gradients import MOST_STEPPED, stepped
from gpulaunch.profiler.probe.graph import GraphNodes
from gpulaunch.profiler.probe.state import Probe
from gpulaunch.profiler.probe.training_thread import OFF, UNOBSERVED

_LAST_EDGE: Final = int(Word.LAST_EDGE)
_STEPS_MADE: Final = int(Word.STEPS_MADE)
_LOADER: Final = int(Region.LOADER)
_FORWARD: Final = int(Region.FORWARD)
_BACKWARD: Final = int(Region.BACKWARD)
_STEPPING: Final = int(Region.STEPPING)
_OPTIMIZER: Final = int(Region.OPTIMIZER)
_OTHER: Final = int(Region.OTHER)
# The 3 in `now_ns << 3 | _LOADER` is layout.REGION_BITS.


def tap_next(probe: Probe, torch: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A dataloader iterator's `__next__` that reports when a batch is requested and when it is returned."""
    is_compiling = torch.compiler.is_dynamo_compiling
    grad_enabled = torch.is_grad_enabled
    machine = probe.machine
    loader = probe.loader
    unobserved = probe.unobserved
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    @functools.wraps(original)
    def tapped_next(self: Any) -> Any:
        if is_compiling():
            return original(self)
        if probe.thread <= OFF:
            if probe.thread == OFF:
                return original(self)
            if loader.iterator == id(self) and 0 < self._num_yielded < loader.look_at - 1 and grad_enabled():
                try:
                    batch = original(self)
                except StopIteration:
                    probe.loader_end()
                    raise
                if probe.thread == UNOBSERVED:
                    now_ns = monotonic_ns()
                    edge[0] = now_ns << 3 | _FORWARD
                    loader.passing += 1
                    if now_ns > unobserved.until_ns:  # no step has ended for a long time
                        unobserved.end()
                return batch
            if getattr(self, "_num_yielded", 1) and monotonic_ns() < unobserved.until_ns:
                return unobserved.fetch(original, self, grad_enabled)
            unobserved.end()  # an evaluation begins, or another epoch
        asked = asked_ns = 0
        try:
            asked_ns = monotonic_ns()
            if get_ident() == probe.thread or probe.stands_in(asked_ns):
                edge[0] = note = asked_ns << 3 | _LOADER
                probe.tell(note)
                if self._num_workers:
                    asked = loader.asked(self, asked_ns)
                if probe.closely:
                    probe.attend(DATA_WAIT, asked_ns)
                if asked_ns >= probe.late_ns:
                    probe.catch_up(True)
            elif self._num_workers:
                asked = loader.asked(self, asked_ns)
        except Exception as error:
            probe.fail(error)
        try:
            batch = original(self)
        except StopIteration:
            probe.loader_end()
            raise
        try:
            if probe.thread == OFF:
                return batch
            now_ns = monotonic_ns()
            trains = grad_enabled()
            if get_ident() == probe.thread or probe.stands_in(now_ns):
                if (
                    trains
                    and asked != BLOCKED
                    and (now_ns - asked_ns < (SHORT_NS if asked else LATE_NS) or not self._num_workers)
                    and loader.iterator == id(self)
                    and 1 < self._num_yielded < loader.look_at
                ):
                    if asked:
                        loader.ready_ns += now_ns - asked_ns
                    edge[0] = note = now_ns << 3 | _FORWARD
                    probe.tell(note)
                else:
                    samples = loader.handed(self, batch, asked, now_ns, now_ns - asked_ns, trains)
                    probe.handed(now_ns, samples, trains, id(self._dataset))
                if probe.closely:
                    probe.attend(FORWARD, now_ns)
            else:
                samples = loader.handed(self, batch, asked, now_ns, -1, trains)  # -1: not the training thread's wait
                if trains:
                    machine.note_samples(samples)
        except Exception as error:
            probe.fail(error)
        return batch

    return tapped_next


def tap_get_iterator(probe: Probe, torch: Any, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`DataLoader._get_iterator`, which starts the workers of an epoch, or of all of them."""
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def tapped_get_iterator(self: Any) -> Any:
        if is_compiling():
            return original(self)
        began_ns = monotonic_ns()
        probe.loader.reset_ns = 0
        iterator = original(self)
        try:
            if probe.trains_here():
                probe.loader.starts.started(iterator, monotonic_ns() - began_ns - probe.loader.reset_ns)
        except Exception as error:
            probe.fail(error)
        return iterator

    return tapped_get_iterator


def tap_reset(probe: Probe, torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """`_MultiProcessingDataLoaderIter._reset`, which draws the first indices: a sampler's time, not that of workers.

    Unless it is the first one of an iterator, it waits until its workers answer. Lightning does that at once.
    """
    is_compiling = torch.compiler.is_dynamo_compiling

    @functools.wraps(original)
    def tapped_reset(self: Any, loader: Any, first_iter: bool = False) -> Any:
        if is_compiling():
            return original(self, loader, first_iter)
        began_ns = monotonic_ns()
        try:
            return original(self, loader, first_iter)
        finally:
            took_ns = monotonic_ns() - began_ns
            try:
                if not first_iter and probe.trains_here():
                    probe.loader.starts.resumed(self, took_ns - probe.loader.reset_ns)
            except Exception as error:
                probe.fail(error)
            probe.loader.reset_ns += took_ns

    return tapped_reset


def tap_shutdown(probe: Probe, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`_MultiProcessingDataLoaderIter._shutdown_workers`: at the end of an epoch, or when the iterator is deleted."""
    clock_ns, is_finalizing = monotonic_ns, sys.is_finalizing

    @functools.wraps(original)
    def tapped_shutdown(self: Any) -> Any:
        began_ns = clock_ns()
        try:
            return original(self)
        finally:
            # The last iterator is deleted when modules may have lost what they hold.
            if not is_finalizing():
                try:
                    if probe.trains_here():
                        probe.loader.starts.ended(self, clock_ns() - began_ns)
                except Exception as error:
                    probe.fail(error)

    return tapped_shutdown


def tap_backward(probe: Probe, torch: Any, nodes: GraphNodes, original: Callable[..., Any]) -> Callable[..., Any]:
    """The entry to the autograd engine, reporting when it starts and when it is done."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    @functools.wraps(original)
    def tapped_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or probe.thread == UNOBSERVED:
            return original(t_outputs, *args, **kwargs)
        around = _STEPPING
        counts = False
        try:
            # Of `backward(inputs=...)`, the engine leaves out what the graph has besides.
            reads = nodes.left and kwargs.get("accumulate_grad", False) and not any(args[3:4])
            if reads and get_ident() == probe.thread:
                counts = True
                began_ns = monotonic_ns()
                nodes.count(t_outputs, keeps=args[1:3] == (True, False))  # retain_graph, create_graph
                machine.overhead_ns += monotonic_ns() - began_ns
            now_ns = monotonic_ns()
            if get_ident() == probe.thread or probe.adopts(now_ns):
                around = edge[0] & 7
                edge[0] = note = now_ns << 3 | _BACKWARD
                probe.tell(note)
                if probe.closely:
                    probe.attend(BACKWARD, now_ns)
        except Exception as error:
            probe.fail(error)
        try:
            return original(t_outputs, *args, **kwargs)
        finally:
            try:
                now_ns = monotonic_ns()
                if counts:
                    nodes.passed()
                if get_ident() == probe.thread:
                    # `backward` accumulates gradients into parameters, `grad` does not.
                    if kwargs.get("accumulate_grad", False):
                        note = now_ns << 3 | _STEPPING
                        # In a backward (a checkpoint recomputes) or an optimizer's closure, that region continues.
                        edge[0] = now_ns << 3 | around if around in (_BACKWARD, _OPTIMIZER) else note
                        probe.tell(note)
                    else:
                        probe.catch_up()
                        probe.edge(now_ns, machine.backward_exit(now_ns, False))
                    if probe.closely:
                        probe.attend(OTHER, now_ns)
                    if now_ns >= probe.late_ns:
                        probe.catch_up(True)
            except Exception as error:
                probe.fail(error)

    return tapped_run_backward


def tap_before_step(probe: Probe, torch: Any) -> Callable[[Any, Any, Any], None]:
    """An optimizer pre-hook."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine
    unobserved = probe.unobserved
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling():
            return
        if probe.thread == UNOBSERVED:
            if id(optimizer) == unobserved.pivot:
                unobserved.begun = True
            return
        try:
            now_ns = monotonic_ns()
            if get_ident() == probe.thread or probe.adopts(now_ns):
                if id(optimizer) == probe.pivot:
                    edge[0] = note = now_ns << 3 | _OPTIMIZER
                    probe.tell(note)
                else:
                    probe.catch_up()
                    probe.edge(now_ns, machine.optimizer_enter(now_ns, id(optimizer)))
                if probe.closely:
                    probe.attend(OPTIMIZER, now_ns)
        except Exception as error:
            probe.fail(error)

    return before_step


def tap_after_step(probe: Probe, torch: Any) -> Callable[[Any, Any, Any], None]:
    """An optimizer post-hook."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine
    unobserved = probe.unobserved
    edge = probe.writer.words[_LAST_EDGE : _LAST_EDGE + 1]

    made = probe.writer.words[_STEPS_MADE : _STEPS_MADE + 1]

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling():
            return
        try:
            now_ns = monotonic_ns()
            if len(stepped) < MOST_STEPPED:
                stepped.add(id(optimizer))
            if get_ident() == probe.thread:
                if id(optimizer) == probe.pivot:
                    edge[0] = note = now_ns << 3 | _OTHER
                    probe.tell(note)
                    machine.optimized += 1
                    steps = probe.steps = probe.steps + 1
                    made[0] = steps
                    if probe.closely:
                        probe.attend(OTHER, now_ns)
                    if steps >= probe.turn or now_ns >= probe.late_ns:
                        probe.catch_up(True)
                else:
                    probe.catch_up()
                    machine.optimized += 1
                    probe.edge(now_ns, machine.optimizer_exit(now_ns, id(optimizer)))
                    if probe.closely:
                        probe.attend(OTHER, now_ns)
                return
            machine.optimized += 1
            if probe.thread != UNOBSERVED:
                machine.compiled()  # autograd's thread for a GPU: a gradient hook steps there, no end is observed
            elif id(optimizer) != unobserved.pivot:
                unobserved.step_ended(id(optimizer))
            elif unobserved.begun and get_ident() == unobserved.thread:
                unobserved.begun = False
                unobserved.ends_ns.append(now_ns)
                edge[0] = now_ns << 3 | _OTHER
                if len(unobserved.ends_ns) >= unobserved.due or now_ns > unobserved.until_ns:
                    unobserved.over()
            elif get_ident() != unobserved.thread:
                probe.adopts(now_ns)
        except Exception as error:
            probe.fail(error)

    return after_step


def tap_scaler(probe: Probe, torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """`GradScaler.step`, which skips the optimizer's step when gradients have overflowed."""
    is_compiling = torch.compiler.is_dynamo_compiling
    machine = probe.machine

    @functools.wraps(original)
    def tapped_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not probe.trains_here():
            return original(self, optimizer, *args, **kwargs)
        before = machine.optimized
        result = original(self, optimizer, *args, **kwargs)
        if machine.optimized == before:
            machine.left_out(id(optimizer))
        return result

    return tapped_step
