"""Classifies what one rank is doing, from its samples. Pure; the table is in `judge`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpulaunch.launcher.hang import frames as stacks
from gpulaunch.launcher.hang.values import Category, Limits, RankProgress, Sample
from gpulaunch.profiler.stack import Frame

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY_CORES = 0.05
"""More CPU time than watchdogs, pollers and loggers of an idle rank need; less than any work does."""
_SPIN_CORES = 0.5
_MAX_DELAYED = 0.8
"""The part of the time without a core that is taken into account: beyond, too little was seen of the rank."""
_BUSY_BYTES_PER_S = 65536
_READY = 0.5
"""The part of the time in which a process runs, or is ready to without a core, only if it works."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What one rank is doing."""

    progress: RankProgress
    category: Category
    what: str
    """A phrase with a verb: `is in train.py:88 open()`."""
    where: str = ""
    frames: tuple[Frame, ...] = ()
    for_s: float = 0.0
    """How long the samples have shown it without interruption."""
    enough_s: float = 0.0
    """How long they must show it to be certain."""
    call: str = ""
    """The collective in which it waits; "": none, or it creates a process group, or waits for its GPU."""
    report_after_s: float = 0.0
    """How long it may be quiet before it is reported."""
    stalled_s: float = 0.0
    """How long it is known to have stood still: quiet, and not working in any sample."""
    proof_in_s: float = math.inf
    """It counts as proof after this time, if nothing changes until then."""
    may_work: bool = False
    """It probably waits for its GPU, but other calls on that line would look the same."""
    only_device: bool = False
    """It waits for its GPU, but not in a collective."""
    leaving: bool = False
    candidate: bool = False
    """A later sample may give a definite result: sample again soon."""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.progress.rank


def following(before: Sample | None, sample: Sample, standing: RankProgress, limits: Limits) -> Sample:
    """Add a new sample to the previous ones: it records when the rank was last seen to move or to work.

    Before the first sample this is unknown, and only the time until sampling begins counts as rest.
    """
    if before is None:
        return replace(sample, moved_s=None if standing.quiet_s < 2 * limits.floor_s else sample.at_s)
    return replace(sample, moved_s=before.moved_s if _stands_still(before, sample) else sample.at_s)


def activity_of(standing: RankProgress, samples: Sequence[Sample], limits: Limits) -> Activity:
    """Assign one rank to its category; `samples` oldest first."""
    last = samples[-1] if samples else Sample(at_s=0.0, state="")
    stalled_s = 0.0  # nothing is known with fewer than two samples
    if len(samples) > 1:
        stalled_s = standing.quiet_s if last.moved_s is None else min(standing.quiet_s, last.at_s - last.moved_s)
    found = partial(Activity, progress=standing, frames=last.frames, where=_where(last.frames), stalled_s=stalled_s)
    if samples and last.state in ("", "Z", "X"):
        return found(category=Category.GONE, what="has ended")
    if last.traced or last.state == "t" or stacks.is_prompt(last.frames):
        return found(category=Category.TRACED, what="is held by a debugger")
    if standing.stopped_s >= limits.stopped_s:
        return found(category=Category.STOPPED, what="is stopped by a signal (state T)")
    held_s = _unbroken(samples, _still_held, limits)
    proof_in_s = limits.held_s * _patience(standing) - held_s if held_s else math.inf
    if proof_in_s <= 0:
        what, report_after_s = _holds(standing, last), standing.allowed_s
        return found(
            category=Category.HELD,
            what=what,
            frames=last.gil_frames,
            for_s=held_s,
            report_after_s=report_after_s,
            candidate=True,
        )
    found = partial(found, proof_in_s=proof_in_s)
    if standing.armed and standing.region and standing.quiet_s < limits.floor_s:
        return found(category=Category.ALIVE, what=f"has moved within {limits.floor_s:g} s", report_after_s=math.inf)
    return _by_stack(standing, samples, limits, found)


def _by_stack(standing: RankProgress, samples: Sequence[Sample], limits: Limits, found: partial[Activity]) -> Activity:
    """The rest of the table: the cases that need stacks and CPU time."""
    last = samples[-1] if samples else Sample(at_s=0.0, state="")
    place = _place(last) if last.frames else ""
    holding = last.gil_thread != 0 and last.state != "D"
    patiently_s = max(standing.allowed_s, min(limits.told_patiently_s, limits.timeout_s / 2))
    collective = stacks.waits_in(last.frames)
    call = collective or (stacks.waits_for_device(last.frames) if last.gpu else "")
    if call and (len(samples) < 2 or _still_waiting(samples[-2], last)):
        for_s, enough_s = _unbroken(samples, _still_waiting, limits), limits.deadlock_s * _patience(standing)
        return found(
            category=Category.WAITING,
            what=f"waits in {call}",
            for_s=for_s,
            enough_s=enough_s,
            call="" if stacks.is_set_up(last.frames) else collective,
            only_device=not collective,
            may_work=not collective and not stacks.certainly_waits_for_device(last.frames),
            report_after_s=standing.allowed_s,
            candidate=for_s < enough_s,
        )
    if len(samples) > 1 and not _still_idle(samples[-2], last):
        what = f"runs in {place}" if place else "runs"
        return found(category=Category.ALIVE, what=what, report_after_s=patiently_s, candidate=holding)
    what = "is in an unknown place" if not place else place if last.worker_frames else f"is in {place}"
    leaving = stacks.is_leaving(last.frames)
    if leaving:
        what = "has ended its program and waits for its threads"
    report_after_s = patiently_s if leaving or stacks.is_pause(last.frames) else standing.allowed_s
    if last.state == "D":
        what += ", waiting for a disk or a network file system (state D)"
    return found(
        category=Category.RESTING, what=what, report_after_s=report_after_s, leaving=leaving, candidate=holding
    )


def _holds(standing: RankProgress, last: Sample) -> str:
    where = f"holds the GIL in {stacks.describe(last.gil_frames)} without using the CPU"
    if not standing.left_group:
        return where
    steps = f"{standing.steps} steps; its process group is destroyed"
    return f"has finished ({steps}), is stuck in its teardown and {where}"


def _patience(standing: RankProgress) -> int:
    """Startup is slow in its own ways: drivers wake up with the GIL held, a store is still being started."""
    return 1 if standing.begun else 2


def _unbroken(samples: Sequence[Sample], still: Callable[[Sample, Sample], bool], limits: Limits) -> float:
    """How long, up to the last sample, each pair of neighbouring samples satisfies `still`."""
    longest_pause_s = 3 * limits.again_s + limits.sample_s
    first = len(samples) - 1
    while first > 0:
        before, after = samples[first - 1], samples[first]
        if after.at_s - before.at_s > longest_pause_s or not still(before, after):
            break
        first -= 1
    return samples[-1].at_s - samples[first].at_s if samples else 0.0


def _stands_still(before: Sample, after: Sample) -> bool:
    """It rests, alone or in a collective: a state that may last a minute or forever.

    A collective that moves data is slow, not stuck.
    """
    waits = stacks.waits_in(after.frames) or (after.gpu and stacks.certainly_waits_for_device(after.frames))
    if waits and _still_waiting(before, after):
        return _bytes_per_s(before, after) < _BUSY_BYTES_PER_S
    return _still_idle(before, after)


def _moved(before: Sample, after: Sample) -> bool:
    same = stacks.comparable(before.frames) == stacks.comparable(after.frames)
    return not same or before.worker_frames != after.worker_frames


def _cores(before_ticks: int, after_ticks: int, before: Sample, after: Sample) -> float:
    """The cores that it would use on a host that is not crowded: the time in which it got none does not count.

    Measured: a rank that computes for 1 ms of each 11 uses 0.089 cores, and 0.043 beside 24 busy processes on 2 cores;
    corrected so, 0.081 to 0.090 in both cases.
    """
    lasted_s = max(after.at_s - before.at_s, 0.001)
    delayed_s = min(after.main_delay_s - before.main_delay_s, _MAX_DELAYED * lasted_s)
    return (after_ticks - before_ticks) / _TICKS_PER_S / (lasted_s - delayed_s)


def _bytes_per_s(before: Sample, after: Sample) -> float:
    return (after.io_bytes - before.io_bytes) / max(after.at_s - before.at_s, 0.001)


def _still_idle(before: Sample, after: Sample) -> bool:
    """The rank and all of its descendants rest, in the same place."""
    if after.state == "R" or _moved(before, after) or _works_below(before, after):
        return False
    moves = _bytes_per_s(before, after) >= _BUSY_BYTES_PER_S
    return not moves and _cores(before.tree_ticks, after.tree_ticks, before, after) < _BUSY_CORES


def _works_below(before: Sample, after: Sample) -> bool:
    """Whether a descendant works although it may get less than `_BUSY_CORES` of a crowded host, as a compiler may: it
    runs in both samples, or is ready to for most of the time between them. In one sample it may be a logger that polls.
    """
    if not set(before.running).isdisjoint(after.running):
        return True
    least_s = _READY * (after.at_s - before.at_s)
    return any(after.wanted_s[pid] - before.wanted_s[pid] > least_s for pid in before.wanted_s.keys() & after.wanted_s)


def _still_spinning(before: Sample, after: Sample) -> bool:
    """Only the main thread uses a core, in the same place: with a GPU, this is how CUDA waits."""
    if _moved(before, after):
        return False
    main = _cores(before.main_ticks, after.main_ticks, before, after)
    tree = _cores(before.tree_ticks, after.tree_ticks, before, after)
    return main > _SPIN_CORES and tree - main < _BUSY_CORES


def _still_waiting(before: Sample, after: Sample) -> bool:
    """The process (without its children, such as the user's logger) rests, or spins for its GPU."""
    if after.state == "D" or _moved(before, after):
        return False
    own = _cores(before.own_ticks, after.own_ticks, before, after)
    return own < _BUSY_CORES or (after.gpu and _still_spinning(before, after))


def _still_held(before: Sample, after: Sample) -> bool:
    """The same idle thread holds the GIL in the same place; nothing works for it, no data moves, no disk is awaited."""
    if not before.gil_thread or before.gil_thread != after.gil_thread or before.gil_frames != after.gil_frames:
        return False
    return after.state != "D" and _still_idle(before, after)


def _where(frames: Sequence[Frame]) -> str:
    frame, _ = stacks.user_frame(frames)
    return f"{os.path.basename(frame.file)}:{frame.line}" if frame is not None else ""


def _place(sample: Sample) -> str:
    if sample.worker_frames:
        return f"waits for its DataLoader worker (pid {sample.worker_pid}) in {stacks.describe(sample.worker_frames)}"
    return stacks.describe(sample.frames)
