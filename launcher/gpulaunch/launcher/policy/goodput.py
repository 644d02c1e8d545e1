"""Goodput accounting: every second of a run is in exactly one bucket. Pure: it records facts with their times in a
ledger; the buckets are recomputed on each request.

    startup           from the start of the run to the first step of its first attempt
    productive        steps that were not repeated
    checkpoint_stall  the training thread was blocked by a save, by gpulaunch.checkpoint or by the program itself
    detection         from the first cause of a failure (the exception, the death, the last progress before a hang) to
                      the moment when the agent knew of it
    teardown          from there until nothing of the attempt was left; also from the request to end, or from the end
                      of the last rank, to the end of the run
    restart           from there to the first step of the next attempt, pauses included
    lost_work         steps after the capture of the state that a later attempt resumed from: they are repeated

Some facts arrive late. Until lost steps are known, they count as productive, and so does a save of the program's own
until the step that contains it has ended (one after the last step is never known); until the first step is known, time
counts as startup or restart. So `productive`, `startup` and `restart` can shrink when a fact arrives, the other
buckets never do, and without new facts none does.

If steps are not observed, the time while ranks run may have been anything: `productive` and `checkpoint_stall` are
unknown, and `startup` and `restart` end when the ranks run. The same holds for a run that was never seen to make a
step, if it ended successfully, or no probe was in a rank.

After a run that failed or was preempted, work after the newest checkpoint counts as lost if there is a checkpoint:
the run will be resumed from it. Without one it stays productive: no repetition is known.

What an attempt resumed from is not always visible: a program may save and resume by itself, in an unnamed place.
Then `lost_work` is unknown, and `productive` is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gpulaunch.profiler.record import GOODPUT_BUCKETS


@dataclass(kw_only=True)
class _Attempt:
    """What is known of one attempt; all times on one monotonic clock."""

    begun_s: float
    started_s: float
    first_step_s: float | None = None
    cause_s: float | None = None
    seen_s: float | None = None
    cleared_s: float | None = None
    stall_s: float = 0.0
    kept_until_s: float = math.inf
    """The attempt's work after this time was lost."""
    unseen: bool = False
    """What the next attempt resumed from is unknown, and so is the lost part of this one."""


class GoodputLedger:
    """The facts of one run, recorded in the order in which they happen (except `first_step`, which may be late)."""

    def __init__(self, *, steps_are_seen: bool = True) -> None:
        """`steps_are_seen`: False if no probe observes the ranks."""
        self._steps_are_seen = steps_are_seen
        self._armed = False
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._ok = False
        self._attempts: list[_Attempt] = []

    # -- facts

    def run_started(self, at_s: float) -> None:
        """The launcher was called."""
        self._began_s = at_s

    def attempt_began(self, at_s: float) -> None:
        """The attempt's processes are requested."""
        self._attempts.append(_Attempt(begun_s=at_s, started_s=at_s))

    def attempt_started(self, at_s: float) -> None:
        """The attempt's ranks run. Used for ranks that are never seen to step."""
        self._attempts[-1].started_s = at_s

    def armed(self) -> None:
        """A probe is in a rank: steps would be seen."""
        self._armed = True

    def first_step(self, at_s: float) -> None:
        """The attempt's first step began, on the rank on which it began last."""
        self._attempts[-1].first_step_s = at_s

    def stalled(self, total_s: float) -> None:
        """Total time that the training thread was blocked by checkpoints, on the rank with the longest."""
        self._attempts[-1].stall_s = total_s

    def failed(self, cause_s: float, seen_s: float) -> None:
        """The first cause happened, and when the agent knew it."""
        self._attempts[-1].cause_s, self._attempts[-1].seen_s = cause_s, seen_s

    def stopped(self, at_s: float) -> None:
        """Nothing failed: the job was asked to end, or its last rank ended successfully."""
        self.failed(at_s, at_s)

    def cleared(self, at_s: float) -> None:
        """All processes of the attempt have ended."""
        self._attempts[-1].cleared_s = at_s

    def resumed(self, saved_s: float | None) -> None:
        """The next attempt resumes from a state captured then, which may be before this run; None: from none."""
        kept_until_s = -math.inf if saved_s is None else saved_s
        for attempt in self._attempts:
            if attempt.cause_s is not None:  # this one is over
                attempt.kept_until_s = min(attempt.kept_until_s, kept_until_s)
                attempt.unseen = attempt.unseen and attempt.kept_until_s > attempt.cause_s

    def resumed_unseen(self) -> None:
        """The next attempt resumes from an unobserved state, or from none."""
        for attempt in self._attempts:
            attempt.unseen = attempt.unseen or attempt.cause_s is not None

    def ended(self, at_s: float, *, ok: bool, saved_s: float | None = None) -> None:
        """The run is over; `saved_s`: when the state of the newest checkpoint was captured, None without one."""
        self._ended_s, self._ok = at_s, ok
        if self._attempts and self._attempts[-1].cause_s is None:
            self.stopped(at_s)
        if not ok and saved_s is not None:
            self.resumed(saved_s)

    # -- results

    def seconds(self, now_s: float) -> dict[str, float | None]:
        """Seconds in each bucket as in `counted`; None: unknown, and the rest of the time belongs to these together."""
        told: dict[str, float | None] = dict(self.counted(now_s))
        plain = self._plain
        if plain and told["productive"]:
            told["productive"] = told["checkpoint_stall"] = None
        if any(attempt.unseen and (plain or attempt.first_step_s is not None) for attempt in self._attempts):
            told["lost_work"] = None
        return told

    def counted(self, now_s: float) -> dict[str, float]:
        """Seconds in each of `GOODPUT_BUCKETS`, up to now or to the end of the run; their sum is what elapsed.

        Time that is not known to be lost is productive.
        """
        buckets: dict[str, float] = dict.fromkeys(GOODPUT_BUCKETS, 0.0)
        until_s = now_s if self._ended_s is None else min(now_s, self._ended_s)
        cursor_s = self._began_s

        def upto(when_s: float) -> float:
            """Advance to a boundary. A fact out of order adds zero, never a negative time."""
            nonlocal cursor_s
            before_s, cursor_s = cursor_s, max(cursor_s, min(when_s, until_s))
            return cursor_s - before_s

        plain = self._plain
        waiting = "startup"
        # An unknown boundary lies ahead, at the latest where the next attempt begins.
        following_s = [*(attempt.begun_s for attempt in self._attempts[1:]), until_s]
        for attempt, ahead_s in zip(self._attempts, following_s, strict=False):
            over_s = ahead_s if attempt.cause_s is None else attempt.cause_s
            begins_s = attempt.started_s if plain else attempt.first_step_s
            buckets[waiting] += upto(over_s if begins_s is None else min(begins_s, over_s))
            _divide(attempt, cursor_s, upto(over_s), buckets)
            buckets["detection"] += upto(ahead_s if attempt.seen_s is None else attempt.seen_s)
            buckets["teardown"] += upto(ahead_s if attempt.cleared_s is None else attempt.cleared_s)
            waiting = "restart"
        # After the last attempt: waiting for the next one, or the launcher cleans up.
        buckets["teardown" if self._ended_s is not None and self._attempts else waiting] += upto(until_s)
        return buckets

    @property
    def _plain(self) -> bool:
        """Steps are not seen, or there were none: the time while ranks run is not divided."""
        stepped = any(attempt.first_step_s is not None for attempt in self._attempts)
        ended_unseen = self._ended_s is not None and not stepped and (self._ok or not self._armed)
        return not self._steps_are_seen or ended_unseen


def _divide(attempt: _Attempt, began_s: float, work_s: float, buckets: dict[str, float]) -> None:
    """Divide an attempt's working time. Stalls are taken from the kept part first: they belong to checkpoints."""
    kept_s = min(max(attempt.kept_until_s - began_s, 0.0), work_s)
    stall_s = min(attempt.stall_s, work_s)
    stall_in_kept_s = min(stall_s, kept_s)
    buckets["checkpoint_stall"] += stall_s
    buckets["productive"] += kept_s - stall_in_kept_s
    buckets["lost_work"] += (work_s - kept_s) - (stall_s - stall_in_kept_s)


def share(seconds: Mapping[str, float | None], elapsed_s: float) -> float | None:
    """The productive share of the time, from 0 to 1; None if unknown."""
    productive_s = seconds["productive"]
    if productive_s is None:
        return None
    return productive_s / elapsed_s if elapsed_s > 0 else 0.0


def line(
    seconds: Mapping[str, float | None],
    elapsed_s: float,
    *,
    advice: str = "",
    why_unknown: str = "no steps were observed",
) -> str:
    """One line for the end of a run; buckets that would be shown as 0.0 s are left out.

    Args:
        seconds: as `GoodputLedger.seconds` gives them.
        elapsed_s: all of the time.
        advice: what to do if lost work is unknown.
        why_unknown: why productive time is unknown, if it is.
    """
    spent = [
        (bucket, spent_s) for bucket in GOODPUT_BUCKETS if (spent_s := seconds[bucket]) is not None and spent_s >= 0.05
    ]
    shown = [f"{bucket.replace('_', ' ')} {duration(spent_s)}" for bucket, spent_s in spent]
    productive = share(seconds, elapsed_s)
    most = "at most " if seconds["lost_work"] is None else ""
    ratio = f"unknown, {why_unknown}" if productive is None else f"{most}{productive:.1%}".replace("%", " %")
    told = f"goodput {ratio}" + (f": {', '.join(shown)}" if shown else "")
    if seconds["lost_work"] is not None:
        return told
    return f"{told}; lost work is unknown{advice}"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `41.2 s`, `2 min 06 s`, `3 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
