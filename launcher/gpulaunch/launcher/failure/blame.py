"""Finds the rank that failed first: of many deaths within milliseconds, one is the cause and the rest are echoes.

The order of deaths alone is not enough: a rank that raises needs longer to exit than its peers need to notice, and it
may hang in its cleanup until the launcher stops it. So the kind of exit decides first, and time only between equals:

    its own failure, or a hang               by the time of its exception, of the verdict "hung", or of its death
    preempted: it has saved and exited       then no rank failed, and ranks that lost it as a peer are echoes
    its own failure, then a lost peer        only if there is none of the kinds above
    an early exit with success               only before the first echo
    a lost peer (echo)                       then the origin is outside this node, or left no trace
    stopped by the launcher                  never, while there is another
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpulaunch.launcher.failure.classify import Kind, classify, mentions_peer, raised_before
from gpulaunch.launcher.failure.ends import RankEnd

_LEAVING_S = 0.5
_TIMED_OUT = 124
_OWN, _PREEMPTED, _DOUBTFUL, _LEFT, _ECHO, _STOPPED, _FINISHED = range(7)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """The verdict on one attempt on one node."""

    first: RankEnd
    kind: Kind
    why: str
    """One sentence: why this rank and not another."""
    echoes: tuple[RankEnd, ...]
    """Ranks that only lost a peer."""
    also: tuple[RankEnd, ...]
    """Ranks that failed later, for another reason."""
    ends: tuple[RankEnd, ...]
    """All ends, by rank, the first cause included."""


def blame(ends: Sequence[RankEnd], told_s: float | None = None) -> Blame:
    """Name the first cause among the ends of one attempt; the order of `ends` does not matter.

    All ends are of one host: the times compared are its monotonic clock.

    Args:
        ends: of all ranks of this node.
        told_s: when the launcher ended the ranks because of another node; None: it did not.

    Raises:
        ValueError: `ends` is empty.
    """
    if not ends:
        raise ValueError("blame needs the end of at least one rank")
    first, *others = sorted(
        _judge(_failed_before_the_stop(ends, told_s)), key=lambda row: (row.tier, row.at_s, row.end.rank)
    )
    echo_tiers = {_ECHO} if first.tier == _DOUBTFUL else {_ECHO, _DOUBTFUL}
    echoes = [row.end for row in others if row.tier in echo_tiers]
    also = [row.end for row in others if row.tier in {_OWN, _DOUBTFUL} - echo_tiers]
    return Blame(
        first=first.end,
        kind=first.kind,
        why=_why(first, echoes, also, among=ends),
        echoes=_by_rank(echoes),
        also=_by_rank(also),
        ends=_by_rank([first.end, *(row.end for row in others)]),
    )


def exit_code(first: RankEnd) -> int:
    """Return the launcher's exit code: the first cause's own, 128+n for a signal, and never 0.

    A rank that had raised but was stopped by the launcher before it could exit would have exited with 1. A hung rank
    has no exit code, since the signal was the launcher's: use the code of timeout(1).
    """
    if first.hang:
        return 1 if raised_before(first, first.hung_s) else _TIMED_OUT
    if first.signal is not None:
        raised = first.error is not None and first.signal in (signal.SIGTERM, signal.SIGKILL)
        return 1 if raised else 128 + first.signal
    return first.code or 1


def torch_exit_code(end: RankEnd) -> int:
    """Return the exit code of a rank as torch has it: that of a signal is negative.

    A rank that had raised but was stopped before it could exit has 1, as in `exit_code`.
    """
    if end.signal is not None:
        return 1 if exit_code(end) == 1 else -end.signal
    return end.code or 0


def failed_at_s(end: RankEnd) -> float:
    """Return the time of the failure: of the exception or the verdict "hung" if known, else of the death."""
    known_s = [end.at_s, end.hung_s, end.error.at_monotonic_s if end.error else None]
    return min(when_s for when_s in known_s if when_s is not None)


def _failed_before_the_stop(ends: Sequence[RankEnd], told_s: float | None) -> list[RankEnd]:
    """Undo "stopped" for a rank whose exception is older than every death.

    The launcher stops ranks only after a death or a hang, here or on another node. A rank that had raised by then, and
    was stopped while it waited for its threads or for its process group, failed by itself: its sockets may have closed
    seconds before, and the ranks of the other nodes have died of that.
    """
    since_s = [end.hung_s if end.hang else end.at_s for end in ends if not end.stopped and (end.hang or end.code != 0)]
    known_s = [when_s for when_s in (*since_s, told_s) if when_s is not None]
    if not known_s:  # no rank died: a person stopped the job
        return list(ends)
    return [replace(end, stopped=False) if end.stopped and raised_before(end, min(known_s)) else end for end in ends]


@dataclass(frozen=True, kw_only=True)
class _Judged:
    tier: int
    at_s: float
    end: RankEnd
    kind: Kind


def _judge(ends: Sequence[RankEnd]) -> list[_Judged]:
    """Assign every end to its tier."""
    kinds = [classify(end) for end in ends]
    if all(end.stopped or end.code == 0 for end in ends):  # their errors are due to the request to end
        kinds = [Kind.STOPPED if kind is Kind.PEER else kind for kind in kinds]
    echoes_s = [failed_at_s(end) for end, kind in zip(ends, kinds, strict=True) if kind is Kind.PEER]
    judged: list[_Judged] = []
    for end, kind in zip(ends, kinds, strict=True):
        at_s = failed_at_s(end)
        if kind is Kind.STOPPED:
            tier = _STOPPED
        elif kind is Kind.PREEMPTED:
            tier = _PREEMPTED
        elif kind is Kind.PEER:
            tier = _ECHO
        elif kind is Kind.EARLY_EXIT_0:
            # Its sockets close before its exit is seen: the first echo may be slightly older than its cause.
            tier = _FINISHED if echoes_s and at_s > min(echoes_s) + _LEAVING_S else _LEFT
        else:
            tier = _DOUBTFUL if mentions_peer(end) else _OWN
        judged.append(_Judged(tier=tier, at_s=at_s, end=end, kind=kind))
    return judged


def _by_rank(ends: list[RankEnd]) -> tuple[RankEnd, ...]:
    return tuple(sorted(ends, key=lambda end: end.rank))


def _why(first: _Judged, echoes: list[RankEnd], also: list[RankEnd], *, among: Sequence[RankEnd]) -> str:
    if first.tier == _STOPPED:
        return "no rank failed by itself: the launcher stopped them all"
    if first.tier == _PREEMPTED:
        return "no rank failed: the job was asked to end"
    if first.kind is Kind.HANG:
        if all(end.hang for end in among):
            return "it made no progress" + (", and no other rank did" if len(among) > 1 else "")
        return "it made no progress, and the others waited for it"
    if first.tier == _ECHO:
        return "every failed rank only lost a peer: the origin is outside this node, or left no trace"
    if first.tier == _LEFT:
        return "it exited before the others had finished" if echoes else "no rank failed"
    if not also:
        return "the other failed ranks only lost a peer" if echoes else "no other rank failed"
    later_s = min(failed_at_s(end) for end in also) - first.at_s
    ranks = "another rank" if len(also) == 1 else f"{len(also)} other ranks"
    return f"it failed {later_s * 1e3:.0f} ms before {ranks} that failed too"
