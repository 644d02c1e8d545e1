"""Reports of a program about its saves: when it is blocked by a save, what is committed, what it resumed from.

For `gpulaunch.checkpoint`. Nothing here raises or waits; without an armed probe all of it does nothing. Any thread may
report a commit or a failure. The thread that called `checkpoint_began` counts as blocked from then on, until it reports
a stall, a commit or a failure itself; if it is the training thread, that time is its step's "checkpoint".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import CheckpointState
from gpulaunch.profiler.probe.inject import current

if TYPE_CHECKING:
    from gpulaunch.profiler.probe.state import Probe


P = ParamSpec("P")

# A background thread may commit while the training thread is blocked by the next save. No lock: Python does not
# change threads within `words[...] += n`, and without the GIL the only damage is a lost count.
_stands_still = 0  # the thread inside a save; get_ident is never 0
_nested_before_ns = 0  # `nested_ns` of the step machine when the save began


def _told(tell: Callable[Concatenate[Probe, P], None]) -> Callable[P, None]:
    """Pass the probe of this rank to `tell`, if it has one; a value that does not fit into a word is ignored."""

    @functools.wraps(tell)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(Exception):
            probe = current()
            if probe is not None:
                tell(probe, *args, **kwargs)

    return told


@_told
def checkpoint_began(probe: Probe) -> None:
    """This thread, the training thread, is blocked by a save from now on."""
    global _stands_still, _nested_before_ns
    probe.unobserved.end()
    _stands_still, _nested_before_ns = get_ident(), probe.machine.nested_ns
    probe.writer.words[CheckpointState.blocking_since_ns] = monotonic_ns()


@_told
def checkpoint_stalled(probe: Probe, stall_ns: int) -> None:
    """The training thread continues; it was blocked for `stall_ns`. The save itself may still be in progress."""
    _goes_on(probe)
    _add_stall(probe, stall_ns)


@_told
def checkpoint_saved(probe: Probe, *, step: int, captured_ns: int, stall_ns: int, size_bytes: int) -> None:
    """A checkpoint is committed.

    Args:
        probe: passed by the decorator, not by the caller.
        step: its step.
        captured_ns: CLOCK_MONOTONIC when its state was captured.
        stall_ns: how long it blocked the training thread, unless already reported by `checkpoint_stalled`.
        size_bytes: the bytes written by this rank.
    """
    _goes_on(probe)
    if stall_ns:
        _add_stall(probe, stall_ns)
    words = probe.writer.words
    words[CheckpointState.bytes_total] += size_bytes
    words[CheckpointState.step] = step
    words[CheckpointState.captured_ns] = captured_ns
    words[CheckpointState.saves] += 1


@_told
def checkpoint_failed(probe: Probe) -> None:
    """A save failed; training continues."""
    _goes_on(probe)
    probe.writer.words[CheckpointState.failures] += 1


@_told
def resumed(probe: Probe, step: int) -> None:
    """This rank has resumed from a checkpoint of this step."""
    probe.writer.words[CheckpointState.resumed_step] = step


@_told
def listens(probe: Probe) -> None:
    """This rank will end by itself after a preemption notice."""
    probe.writer.words[Word.LISTENS] |= 1


def _add_stall(probe: Probe, stall_ns: int) -> None:
    probe.writer.words[CheckpointState.stall_ns_total] += stall_ns
    probe.writer.words[CheckpointState.last_stall_ns] = stall_ns


def _goes_on(probe: Probe) -> None:
    """The training thread is no longer blocked, if this is it."""
    global _stands_still
    if get_ident() != _stands_still:
        return
    _stands_still = 0
    words = probe.writer.words
    since_ns, words[CheckpointState.blocking_since_ns] = words[CheckpointState.blocking_since_ns], 0
    probe.stood_still(since_ns, _nested_before_ns)
