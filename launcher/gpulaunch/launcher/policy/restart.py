"""Restart policy: one pure function, called after every failed attempt, `decide(limits, history, failure)`.

Three limits apply at once. Only first causes on this node are charged to the first two:

    lifetime     at most --max-restarts restarts, as with torchrun; 0 means never
    rate         at most N restarts within any window (--restart-rate 5/10m), so that a month-long run may have many
                 faults and a crash loop few
    no progress  a program that made steps and then fails repeatedly without progress is stopped early:
                   the same exception of the user's own code at the same step, the second time: one
                   restart distinguishes a passing error from one that repeats;
                   any other failure of the program or its environment, after 3 in a row.
                 Before the first step the budget is the user's: a mount or a license server may be slow to come back.
                 --no-progress-limit N is N failures in a row, at any step

Progress is a step that no earlier attempt had reached, or a newer checkpoint to resume from. A program that resumes by
itself, or is never seen to step, cannot show it; there a long run time counts. What is done to the job from outside (a
signal, a lost node) is no evidence that the program is broken: it is restarted at once, within the first two limits.

The first restart is immediate: recovery takes a fraction of a second. The pause grows, 1, 2, 4 ... s,
only over failures in a row without progress, and is reset by progress.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from gpulaunch.launcher.failure.blame import Blame
from gpulaunch.launcher.failure.causes import Cause
from gpulaunch.launcher.failure.classify import Kind
from gpulaunch.launcher.failure.ends import signal_name

REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: the same job may succeed elsewhere, or later."""
IN_USE = 69
"""EX_UNAVAILABLE: the same job may succeed when another one has ended."""
NO_REQUEUE = 93
"""The code by which NVIDIA's ft_launcher asks not to be requeued; it means the same here."""

LONG_LIFE_S = 600.0
"""How long ranks must have run to count as progress, if steps cannot be seen; Kubernetes resets its crash-loop
back-off after the same time."""

_NO_PROGRESS = 3
"""Failures in a row without progress, the last one after a step, where --no-progress-limit is not given."""
_SAME_STEP = 1
"""Ranks of one attempt may be a step apart, and either may be read: steps that differ by one count as the same."""
_AS_SET = 1 << 30
"""A breaker for which only --no-progress-limit applies."""
_REMEMBERED = 8
"""Number of failures without progress to compare with."""


class Action(Enum):
    """The response to a kind of failure, within the limits."""

    RESTART = "restart"
    REPLACE = "replace"
    """Restart with another machine in the place of one that is lost."""
    GIVE_UP = "give up"
    """Another attempt would fail the same way."""
    END = "end"
    """The program did not fail: the job was asked to end, or the time was not right."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one kind of failure is treated."""

    action: Action = Action.RESTART
    transient: bool = True
    """Whether a restart alone often helps; else the same exception at the same step stops the run the second time."""
    breaker: int | None = _AS_SET
    """Failures in a row without progress after which the run is given up, --no-progress-limit if that is less; None for
    never: the failure is no evidence against the program."""
    pauses: bool = True
    """Whether there is a pause after failures in a row without progress."""
    stop_code: int | None = NO_REQUEUE
    """The exit code when it is given up. 75 also applies when the restarts are used up: another node would help."""

    @property
    def charged(self) -> bool:
        """Whether it uses up the user's budget."""
        return self.action in (Action.RESTART, Action.GIVE_UP)


_PROGRAM = Row(transient=False)
_CIRCUMSTANCE = Row()
_OUTSIDE = Row(breaker=None, pauses=False)

TABLE: dict[Kind, Row] = {
    # The program's own code failed: deterministically or by chance. One restart distinguishes these.
    Kind.EXCEPTION: _PROGRAM,
    Kind.IMPORT: _PROGRAM,
    Kind.GPU_OOM: _PROGRAM,
    Kind.GPU_FAULT: _PROGRAM,
    Kind.SYNTAX: Row(action=Action.GIVE_UP),
    # The program or its environment: may pass by itself.
    Kind.LOADER_WORKER: _CIRCUMSTANCE,
    Kind.HOST_OOM: _CIRCUMSTANCE,
    Kind.SHM_FULL: _CIRCUMSTANCE,
    Kind.DISK_FULL: _CIRCUMSTANCE,
    Kind.PORT_IN_USE: _CIRCUMSTANCE,
    Kind.SEGFAULT: _CIRCUMSTANCE,
    Kind.BUS_ERROR: _CIRCUMSTANCE,
    Kind.ABORT: _CIRCUMSTANCE,
    Kind.EXIT_CODE: _CIRCUMSTANCE,
    Kind.EARLY_EXIT_0: _CIRCUMSTANCE,
    Kind.HANG: _CIRCUMSTANCE,
    Kind.PEER: _CIRCUMSTANCE,  # no other rank to blame, on any node: the network, or unknown
    # A GPU may recover after a restart (a contained ECC error does), or the rank moves to another one. Once.
    Kind.GPU_HARDWARE: Row(breaker=2, stop_code=REQUEUE),
    # From outside: no evidence against the program.
    Kind.SIGNAL: _OUTSIDE,
    Kind.INTERRUPT: _OUTSIDE,
    Kind.NODE_LOSS: Row(action=Action.REPLACE, stop_code=REQUEUE),
    # Asked to end; a rank that says "preempted" has saved, and another job can resume from there.
    Kind.PREEMPTED: Row(action=Action.END, stop_code=REQUEUE),
    Kind.STOPPED: Row(action=Action.END, stop_code=None),
    # The other run may live for days, and each attempt has waited for it.
    Kind.CHECKPOINT_IN_USE: Row(action=Action.END, stop_code=IN_USE),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user allows."""

    max_restarts: int
    """Restarts in the life of the run; 0 for never."""
    rate: tuple[int, float] | None
    """At most this many restarts within this many seconds."""
    backoff_max_s: float
    """The longest pause."""
    no_progress: int | None
    """Failures in a row without progress after which the run is given up; 0 for never, also for the same exception;
    None for 3, and never before the first step."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is known of one failed attempt."""

    kind: Kind | None
    """None: no rank is to blame, but something else on a node."""
    signature: str
    """As `signature` gives it; "" where no rank is to blame."""
    at_s: float
    """Monotonic."""
    step: int | None
    """The last step, counted from the beginning of the training; None where no rank was seen to step."""
    resumed_step: int | None
    """The step of the checkpoint that the attempt had resumed from."""
    uptime_s: float
    """From the start of its ranks to the failure."""


def failure_of(cause: Cause, *, at_s: float) -> Failure:
    """What the policy needs to know of a cause; see `Failure`."""
    return Failure(
        kind=cause.kind,
        signature=cause.signature,
        at_s=at_s,
        step=cause.step,
        resumed_step=cause.resumed_step,
        uptime_s=cause.uptime_s,
    )


@dataclass(frozen=True, kw_only=True)
class RestartHistory:
    """What must be remembered of the failures so far; `History()` at the beginning of a run."""

    restarts: int = 0
    """Charged ones."""
    recent_s: tuple[float, ...] = ()
    """When the charged restarts of the last window were, or will be after their pause."""
    furthest_step: int | None = None
    resumed_step: int | None = None
    in_a_row: int = 0
    """Failures without progress that count against the program."""
    seen: tuple[tuple[str, int | None], ...] = ()
    """Signature and step of the failures since the last progress."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do."""

    again: bool
    wait_s: float
    """Before the next attempt."""
    charged: bool
    why: str
    """One sentence for the user: why it stops, or what it waits for; "" for a plain restart or a plain end."""
    code: int | None
    """The exit code of a run that stops: 93 if a retry is pointless, 75 elsewhere or later; None: the cause's own."""


def decide(limits: Limits, history: RestartHistory, failure: Failure) -> tuple[RestartHistory, Decision]:
    """Decide whether there is another attempt, and when; pass the returned history to the next call."""
    row = _row(failure)
    known = _with_progress(history, failure)
    if not row.charged:
        again = row.action is Action.REPLACE and limits.max_restarts > 0
        code = None if again else row.stop_code
        return known, Decision(again=again, wait_s=0.0, charged=False, why="", code=code)
    repeats = _repeats(known, failure)
    if row.breaker is not None:
        seen = (*known.seen, (failure.signature, failure.step))[-_REMEMBERED:]
        known = replace(known, in_a_row=known.in_a_row + 1, seen=seen)
    wait_s = _pause_s(limits, known.in_a_row) if row.pauses else 0.0
    restart_s = failure.at_s + wait_s

    spent = _budget_spent(limits, known, restart_s)
    if spent is not None:
        return known, _stop(spent, REQUEUE if row.stop_code == REQUEUE else None)
    in_vain = _in_vain(limits, row, known, failure, repeats=repeats)
    if in_vain:
        return known, _stop(in_vain, row.stop_code)
    window_s = limits.rate[1] if limits.rate else 0.0
    recent_s = (*(when_s for when_s in known.recent_s if when_s > restart_s - window_s), restart_s)
    charged = replace(known, restarts=known.restarts + 1, recent_s=recent_s if limits.rate else ())
    why = f"no progress in {known.in_a_row} attempts: waiting {wait_s:g} s before the next one" if wait_s else ""
    return charged, Decision(again=True, wait_s=wait_s, charged=True, why=why, code=None)


class RestartPolicy:
    """The policy, with what it remembers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._history = RestartHistory()

    def decide(self, failure: Failure) -> Decision:
        """As the function of this name, about the attempt that has just ended."""
        self._history, decision = decide(self._limits, self._history, failure)
        return decision


def signature(verdict: Blame) -> str:
    """Name the first cause so that the same cause has the same name in the next attempt.

    An exception is its type, its message without words that contain digits (addresses, counts, generated file names)
    and its innermost line; a killed rank is identified by its signal, one that exits by its code.
    """
    end = verdict.first
    how = signal_name(end.signal) if end.signal is not None else f"exit code {end.code}"
    if end.error is not None and end.error.type != "SystemExit":
        lines = re.findall(r'^ +File "([^"]+)", line (\d+)', end.error.traceback, re.MULTILINE)
        place = " at {}:{}".format(*lines[-1]) if lines else ""
        how = f"{end.error.type}: {_lasting(end.error.message)}{place}"
    elif end.error is None and end.signal is None and end.tail:  # a program without our handler
        how += f": {_lasting(end.tail[-1])}"
    return f"{verdict.kind.value}: {how}"


def _lasting(text: str) -> str:
    return " ".join(word for word in text[:2_000].split() if not re.search(r"\d", word))


def _row(failure: Failure) -> Row:
    return _CIRCUMSTANCE if failure.kind is None else TABLE[failure.kind]


def _with_progress(history: RestartHistory, failure: Failure) -> RestartHistory:
    """Record how far the attempt got; progress resets the count of failures."""
    further = _greater(failure.step, history.furthest_step)
    newer = _greater(failure.resumed_step, history.resumed_step)
    unseen = failure.step is None or failure.resumed_step is None
    known = replace(
        history,
        furthest_step=failure.step if further else history.furthest_step,
        resumed_step=failure.resumed_step if newer else history.resumed_step,
    )
    if further or newer or (unseen and failure.uptime_s >= LONG_LIFE_S):
        # The last failure may have come after that progress: at the same step, it is still the same failure.
        still = [one for one in known.seen[-1:] if one[1] is not None and _same(one[1], failure.step)]
        return replace(known, in_a_row=0, seen=tuple(still))
    return known


def _greater(step: int | None, than: int | None) -> bool:
    return step is not None and (than is None or step > than)


def _repeats(known: RestartHistory, failure: Failure) -> bool:
    """Whether this failure was seen before, at this step, since the last progress, by an attempt that made steps."""
    return failure.step is not None and any(
        seen == failure.signature and _same(step, failure.step) for seen, step in known.seen
    )


def _same(one: int | None, other: int | None) -> bool:
    return one == other if one is None or other is None else abs(one - other) <= _SAME_STEP


def _pause_s(limits: Limits, in_a_row: int) -> float:
    return min(2.0 ** min(in_a_row - 2, 32), limits.backoff_max_s) if in_a_row > 1 else 0.0


def _budget_spent(limits: Limits, known: RestartHistory, restart_s: float) -> str | None:
    if known.restarts >= limits.max_restarts:
        return f"all {limits.max_restarts} restarts allowed by --max-restarts are used" if limits.max_restarts else ""
    if limits.rate is not None:
        most, window_s = limits.rate
        if sum(when_s > restart_s - window_s for when_s in known.recent_s) >= most:
            return f"--restart-rate allows {most} restarts within {window_s:g} s, and all are used"
    return None


def _in_vain(limits: Limits, row: Row, known: RestartHistory, failure: Failure, *, repeats: bool) -> str:
    """Say why another attempt would be pointless, or ""."""
    if failure.step is None:
        where = "before the first step"
    elif failure.resumed_step is None:  # if it resumes by itself, its steps are numbered differently
        where = f"after {failure.step} step{'' if failure.step == 1 else 's'}"
    else:
        where = f"at step {failure.step}"
    if row.action is Action.GIVE_UP:
        return "every attempt would fail the same way"
    if limits.no_progress == 0 or row.breaker is None:
        return ""
    if repeats and not row.transient:
        return f"the same exception {where} as before: another attempt would repeat it"
    most = limits.no_progress or (_AS_SET if failure.step is None else _NO_PROGRESS)
    if known.in_a_row >= min(row.breaker, most):
        return f"{known.in_a_row} failures in a row without progress, the last one {where} (--no-progress-limit)"
    return ""


def _stop(why: str, code: int | None) -> Decision:
    return Decision(again=False, wait_s=0.0, charged=False, why=why, code=code)
