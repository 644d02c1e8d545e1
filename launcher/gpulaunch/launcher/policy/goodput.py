"""Where the time of a run went: every second in exactly one bucket. Pure: told facts with their times, it keeps a
ledger; the buckets are computed anew each time somebody asks.

    startup           from the start of the run to the first step of its first attempt
    productive        steps that nobody had to do again
    checkpoint_stall  the training thread stood still to save, whoever saves: gpulaunch.checkpoint or the program itself
    detection         from the first cause of a failure (the exception, the death, the last progress before a hang) to
                      the moment in which the agent knew of it
    teardown          from there until nothing of the attempt was left; also from the request to end, or from the end
                      of the last rank, to the end of the run
    restart           from there to the first step of the next attempt, pauses included
    lost_work         steps after the capture of the state that a later attempt went on from: they are done again

Some facts come late. Until it is known that steps were lost, they count as productive, and so does a save of the
program's own until the step that it lies in has ended (one after the last step is never known); until the first step is
known, time counts as start-up or restart. So `productive`, `startup` and `restart` can shrink when something becomes
known, the other buckets never do, and while nothing new is known none does.

Where nobody looks for steps, the time from when ranks run to when they end may have been anything: `productive` and
`checkpoint_stall` are not known, and `startup` and `restart` end when the ranks run. So it is in a run that was never
seen to make a step, if it ended well, or no probe was in a rank.

After a run that failed or was preempted, what came after the newest checkpoint is lost if there is a checkpoint: then
somebody will go on from it. Without one it stays productive: nobody is known to do it again.

Where an attempt went on from is not always seen: a program may save and resume by itself, in a place that nobody has
named. Then `lost_work` is not known, and `productive` is the most that it can be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BUCKETS: tuple[str, ...] = (
    "productive",
    "checkpoint_stall",
    "detection",
    "teardown",
    "restart",
    "lost_work",
    "startup",
)


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
    """What it did after this was lost."""
    unseen: bool = False
    """What the one after it went on from is not known, and so not what of it was lost."""


class GoodputLedger:
    """The facts of one run, told in the order in which they happen (but for `first_step`, which may be known late)."""

    def __init__(self, *, steps_are_seen: bool = True) -> None:
        """`steps_are_seen`: False where no probe looks at the ranks."""
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
        """Its processes are asked for."""
        self._attempts.append(_Attempt(begun_s=at_s, started_s=at_s))

    def attempt_started(self, at_s: float) -> None:
        """Its ranks run. Of use for ranks that are never seen to step."""
        self._attempts[-1].started_s = at_s

    def armed(self) -> None:
        """A probe is in a rank: steps would be seen."""
        self._armed = True

    def first_step(self, at_s: float) -> None:
        """Its first step began, on the rank on which it began last."""
        self._attempts[-1].first_step_s = at_s

    def stalled(self, total_s: float) -> None:
        """So long has its training thread stood still for checkpoints, in all, on the rank that stood longest."""
        self._attempts[-1].stall_s = total_s

    def failed(self, cause_s: float, seen_s: float) -> None:
        """The first cause happened, and the agent knew it."""
        self._attempts[-1].cause_s, self._attempts[-1].seen_s = cause_s, seen_s

    def stopped(self, at_s: float) -> None:
        """Nothing failed: the job was asked to end, or its last rank ended well."""
        self.failed(at_s, at_s)

    def cleared(self, at_s: float) -> None:
        """Nothing of the attempt is left."""
        self._attempts[-1].cleared_s = at_s

    def resumed(self, saved_s: float | None) -> None:
        """The next attempt goes on from a state captured then, which may be before this run; None: from none."""
        kept_until_s = -math.inf if saved_s is None else saved_s
        for attempt in self._attempts:
            if attempt.cause_s is not None:  # one that is over
                attempt.kept_until_s = min(attempt.kept_until_s, kept_until_s)
                attempt.unseen = attempt.unseen and attempt.kept_until_s > attempt.cause_s

    def resumed_unseen(self) -> None:
        """The next attempt goes on from what is not seen here, or from nothing."""
        for attempt in self._attempts:
            attempt.unseen = attempt.unseen or attempt.cause_s is not None

    def ended(self, at_s: float, *, ok: bool, saved_s: float | None = None) -> None:
        """The run is over; `saved_s`: when the state of the newest checkpoint was captured, None without one."""
        self._ended_s, self._ok = at_s, ok
        if self._attempts and self._attempts[-1].cause_s is None:
            self.stopped(at_s)
        if not ok and saved_s is not None:
            self.resumed(saved_s)

    # -- what came of it

    def seconds(self, now_s: float) -> dict[str, float | None]:
        """Seconds in each bucket, as `counted` has them; None: not known. What the others lack is theirs together."""
        told: dict[str, float | None] = dict(self.counted(now_s))
        plain = self._plain
        if plain and told["productive"]:
            told["productive"] = told["checkpoint_stall"] = None
        if any(attempt.unseen and (plain or attempt.first_step_s is not None) for attempt in self._attempts):
            told["lost_work"] = None
        return told

    def counted(self, now_s: float) -> dict[str, float]:
        """Seconds in each bucket, all of `BUCKETS`, up to now or to the end of the run; their sum is what elapsed.

        What is not known to be lost is productive.
        """
        buckets: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
        until_s = now_s if self._ended_s is None else min(now_s, self._ended_s)
        cursor_s = self._began_s

        def upto(when_s: float) -> float:
            """Advance to a boundary. Facts out of order give nothing, never less than nothing."""
            nonlocal cursor_s
            before_s, cursor_s = cursor_s, max(cursor_s, min(when_s, until_s))
            return cursor_s - before_s

        plain = self._plain
        waiting = "startup"
        # A boundary that is not known lies ahead, at the latest where the next attempt begins.
        following_s = [*(attempt.begun_s for attempt in self._attempts[1:]), until_s]
        for attempt, ahead_s in zip(self._attempts, following_s, strict=False):
            over_s = ahead_s if attempt.cause_s is None else attempt.cause_s
            begins_s = attempt.started_s if plain else attempt.first_step_s
            buckets[waiting] += upto(over_s if begins_s is None else min(begins_s, over_s))
            _divide(attempt, cursor_s, upto(over_s), buckets)
            buckets["detection"] += upto(ahead_s if attempt.seen_s is None else attempt.seen_s)
            buckets["teardown"] += upto(ahead_s if attempt.cleared_s is None else attempt.cleared_s)
            waiting = "restart"
        # After the last attempt: the next one is waited for, or the launcher puts its things away.
        buckets["teardown" if self._ended_s is not None and self._attempts else waiting] += upto(until_s)
        return buckets

    @property
    def _plain(self) -> bool:
        """Steps are not seen, or there were none: the time that ranks run is not divided."""
        stepped = any(attempt.first_step_s is not None for attempt in self._attempts)
        ended_unseen = self._ended_s is not None and not stepped and (self._ok or not self._armed)
        return not self._steps_are_seen or ended_unseen


def _divide(attempt: _Attempt, began_s: float, work_s: float, buckets: dict[str, float]) -> None:
    """Divide an attempt's time at work. Stalls are taken from what was kept first: they belong to checkpoints."""
    kept_s = min(max(attempt.kept_until_s - began_s, 0.0), work_s)
    stall_s = min(attempt.stall_s, work_s)
    stall_in_kept_s = min(stall_s, kept_s)
    buckets["checkpoint_stall"] += stall_s
    buckets["productive"] += kept_s - stall_in_kept_s
    buckets["lost_work"] += (work_s - kept_s) - (stall_s - stall_in_kept_s)


def share(seconds: Mapping[str, float | None], elapsed_s: float) -> float | None:
    """The productive share of the time, from 0 to 1; None where it is not known."""
    productive_s = seconds["productive"]
    if productive_s is None:
        return None
    return productive_s / elapsed_s if elapsed_s > 0 else 0.0


def line(
    seconds: Mapping[str, float | None], elapsed_s: float, *, advice: str = "", why_unknown: str = "no step was seen"
) -> str:
    """One line for the end of a run; buckets that would be shown as 0.0 s are left out.

    Args:
        seconds: as `Ledger.seconds` gives them.
        elapsed_s: all of the time.
        advice: what to do where lost work is not known.
        why_unknown: why it is not known what was productive, where it is not.
    """
    spent = [(bucket, spent_s) for bucket in BUCKETS if (spent_s := seconds[bucket]) is not None and spent_s >= 0.05]
    shown = [f"{bucket.replace('_', ' ')} {duration(spent_s)}" for bucket, spent_s in spent]
    productive = share(seconds, elapsed_s)
    most = "at most " if seconds["lost_work"] is None else ""
    ratio = f"not known, {why_unknown}" if productive is None else f"{most}{productive:.1%}".replace("%", " %")
    told = f"goodput {ratio}" + (f": {', '.join(shown)}" if shown else "")
    if seconds["lost_work"] is not None:
        return told
    return f"{told}; lost work is not known{advice}"


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `41.2 s`, `2 min 06 s`, `3 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
