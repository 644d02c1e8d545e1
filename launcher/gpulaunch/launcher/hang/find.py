"""What one rank is doing, from its samples. Pure; the table is in `judge`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gpulaunch.launcher.hang import frames as stacks
from gpulaunch.launcher.hang.values import Category, Frame, Limits, Sample, Standing

__all__ = ["Finding", "find"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_CORES = 0.05
"""More than what watchdogs, pollers and loggers of an idle rank need; less than any work does."""
_SPIN_CORES = 0.5
_BUSY_BYTES_PER_S = 65536


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one rank is doing."""

    standing: Standing
    category: Category
    what: str
    """A phrase with a verb: `is in train.py:88 open()`."""
    where: str = ""
    frames: tuple[Frame, ...] = ()
    for_s: float = 0.0
    """For how long the samples have shown it without a break."""
    enough_s: float = 0.0
    """For how long they must, to be sure."""
    leaving: bool = False
    candidate: bool = False
    """A later sample may turn it into something definite: look again soon."""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.standing.rank


def find(standing: Standing, samples: Sequence[Sample], limits: Limits) -> Finding:
    """Put one rank into its category; `samples` oldest first."""
    last = samples[-1] if samples else Sample(at_s=0.0, state="")
    found = partial(Finding, standing=standing, frames=last.frames, where=_where(last.frames))
    if samples and last.state in ("", "Z", "X"):
        return found(category=Category.GONE, what="has ended")
    if last.traced or last.state == "t":
        return found(category=Category.TRACED, what="is held by a debugger")
    if standing.stopped_s >= limits.stopped_s:
        return found(category=Category.STOPPED, what="is stopped by a signal (state T)")
    held_s = _unbroken(samples, _still_held, limits)
    if held_s >= limits.idle_s * _patience(standing):
        what = f"holds the GIL in {stacks.describe(last.gil_frames)} without using the CPU"
        return found(category=Category.HELD, what=what, frames=last.gil_frames, for_s=held_s)
    holding = last.gil_thread != 0 and last.state != "D"
    if standing.armed and standing.region and standing.quiet_s < limits.floor_s:
        return found(category=Category.ALIVE, what=f"has moved within {limits.floor_s:g} s")
    return _by_stack(standing, samples, limits, found, holding=holding)


def _by_stack(
    standing: Standing,
    samples: Sequence[Sample],
    limits: Limits,
    found: partial[Finding],
    *,
    holding: bool,
) -> Finding:
    """The rest of the table: what needs stacks and CPU time."""
    place = ""
    if samples and samples[-1].frames:
        last = samples[-1]
        place = _place(last)
        call, enough_s = stacks.waits_in(last.frames), limits.deadlock_s * _patience(standing)
        if not call and last.gpu and standing.beyond and not standing.pauses and not stacks.is_pause(last.frames):
            call, enough_s = _waits_for_device(samples), limits.idle_s
        waiting_s = _unbroken(samples, _still_waiting, limits) if call else 0.0
        if call and (waiting_s or len(samples) < 2):
            what = f"waits in {call}"
            return found(category=Category.WAITING, what=what, for_s=waiting_s, enough_s=enough_s, candidate=True)
    idle_s = _unbroken(samples, _still_idle, limits)
    if len(samples) > 1 and not idle_s:
        return found(category=Category.ALIVE, what=f"runs in {place}" if place else "runs", candidate=holding)
    if not place:
        return found(category=Category.UNKNOWN, what="is in an unknown place")
    what = f"is in {place}" if not place.startswith("waits") else place
    if samples[-1].state == "D":
        what += ", waiting for a disk or a network file system (state D)"
        return found(category=Category.PAUSED, what=what, for_s=idle_s)
    leaving = stacks.is_leaving(samples[-1].frames)
    if leaving:
        what = "has ended its program and waits for its threads"
    if leaving or stacks.is_pause(samples[-1].frames) or not _may_be_stuck(standing):
        return found(category=Category.PAUSED, what=what, for_s=idle_s, leaving=leaving, candidate=holding)
    category = Category.STUCK if standing.beyond and idle_s >= limits.idle_s else Category.IDLE
    return found(category=category, what=what, for_s=idle_s, enough_s=limits.idle_s, candidate=standing.armed)


def _may_be_stuck(standing: Standing) -> bool:
    """Whether rest means anything here: between training edges, or in a pause that is longer than pauses are."""
    return not standing.armed or standing.trains or (standing.pauses and standing.beyond)


def _patience(standing: Standing) -> int:
    """Starting is slow in ways of its own: drivers wake up with the GIL held, a store is still being started."""
    return 1 if standing.begun else 2


def _waits_for_device(samples: Sequence[Sample]) -> str:
    call = stacks.waits_for_device(samples[-1].frames)
    return call or ("GPU work" if len(samples) > 1 and _still_spinning(samples[-2], samples[-1]) else "")


def _unbroken(samples: Sequence[Sample], still: Callable[[Sample, Sample], bool], limits: Limits) -> float:
    """For how long, up to the last sample, every two neighbouring samples show the same."""
    longest_pause_s = 3 * limits.again_s + limits.sample_s
    first = len(samples) - 1
    while first > 0:
        before, after = samples[first - 1], samples[first]
        if after.at_s - before.at_s > longest_pause_s or not still(before, after):
            break
        first -= 1
    return samples[-1].at_s - samples[first].at_s if samples else 0.0


def _moved(before: Sample, after: Sample) -> bool:
    same = stacks.comparable(before.frames) == stacks.comparable(after.frames)
    return not same or before.worker_frames != after.worker_frames


def _cores(before_ticks: int, after_ticks: int, before: Sample, after: Sample) -> float:
    return (after_ticks - before_ticks) / _TICKS_PER_S / max(after.at_s - before.at_s, 0.001)


def _still_idle(before: Sample, after: Sample) -> bool:
    """The rank and everything below it rests, in the same place."""
    if after.state == "R" or _moved(before, after):
        return False
    read = (after.io_bytes - before.io_bytes) / max(after.at_s - before.at_s, 0.001)
    return read < _BUSY_BYTES_PER_S and _cores(before.tree_ticks, after.tree_ticks, before, after) < _BUSY_CORES


def _still_spinning(before: Sample, after: Sample) -> bool:
    """The main thread alone uses a core, in the same place: with a GPU, this is how CUDA waits."""
    if _moved(before, after):
        return False
    main = _cores(before.main_ticks, after.main_ticks, before, after)
    tree = _cores(before.tree_ticks, after.tree_ticks, before, after)
    return main > _SPIN_CORES and tree - main < _BUSY_CORES


def _still_waiting(before: Sample, after: Sample) -> bool:
    """The process (not its children: a logger of its own may do what it likes) rests, or spins for its GPU."""
    if after.state == "D" or _moved(before, after):
        return False
    own = _cores(before.own_ticks, after.own_ticks, before, after)
    return own < _BUSY_CORES or (after.gpu and _still_spinning(before, after))


def _still_held(before: Sample, after: Sample) -> bool:
    """The same idle thread holds the GIL in the same place, and nothing in the process works for it."""
    if not before.gil_thread or before.gil_thread != after.gil_thread or before.gil_frames != after.gil_frames:
        return False
    own = _cores(before.own_ticks, after.own_ticks, before, after)
    return after.state not in "DR" and own < _BUSY_CORES


def _where(frames: Sequence[Frame]) -> str:
    frame, _ = stacks.user_frame(frames)
    return f"{os.path.basename(frame.file)}:{frame.line}" if frame is not None else ""


def _place(sample: Sample) -> str:
    if sample.worker_frames:
        return f"waits for its DataLoader worker (pid {sample.worker_pid}) in {stacks.describe(sample.worker_frames)}"
    return stacks.describe(sample.frames)
