"""From stacks and CPU time to one verdict. Pure.

Each rank gets the first category that fits:

    gone      its process has ended                                          counts no more
    traced    a debugger is attached                                         nobody is judged meanwhile
    stopped   state T for stopped_s                                          definite
    held      the GIL is held by a thread that uses no CPU, for idle_s       definite, unless it waits for a disk (D)
    alive     it passed an edge within the floor
    unknown   no stack could be had, and its CPU time stands still
    waiting   in a collective, in DDP's backward, or for its GPU between two edges; same stack, and its process is idle
              or, with a GPU, spins in the main thread alone
    alive     CPU time of its process tree advances, data is read or written, or its stack changes
    paused    state D; before the end of the first step; in a save; in OTHER, for no longer than pauses were (pause_s
              at least); its stack goes through something called validate, save, compile ...; or the program has
              ended and waits for its threads
    stuck     beyond its allowance, same stack and idle for idle_s
    idle      the same, not yet for that long; or not armed

(held and deadlock take twice as long before the end of the first step.)

and the job the first verdict:

    traced    any rank is traced                                                              not hung
    stopped   any rank is stopped                                                             hung: that rank
    held      any rank is held                                                                hung: that rank
    stuck     any rank is stuck, and no other one is alive, paused, or idle for a short time  hung: that rank
              (another one that is steps ahead of it does not wait for it, and is no excuse)
    deadlock  every rank of the job is waiting, for deadlock_s                                hung: the odd ones out
    cap       a rank has not moved for cap_s (first_step_s before the end of its first step)  hung: that rank
              (waiting is no fault while another rank is alive; without any edge, and nobody waiting in a collective,
              time means nothing: it may be no training program)
    none of these                                                                             not hung

So one rank that validates, saves or compiles, alone or while the others wait for it, is never hung before the cap. On
several nodes an agent sees its own ranks only: then waiting is for a rank elsewhere, and that node's agent names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpulaunch.launcher.hang.find import Finding, find
from gpulaunch.launcher.hang.values import Category, Group, Limits, Sample, Standing, Verdict
from gpulaunch.profiler.channel.layout import Region

__all__ = ["judge"]

_MIN_SAMPLES = 3
_AHEAD_STEPS = 3
_PLURAL = {"waits": "wait", "is": "are", "holds": "hold", "runs": "run", "has": "have"}


def judge(
    standings: Sequence[Standing],
    samples: Mapping[int, Sequence[Sample]],
    limits: Limits,
    *,
    whole: bool,
    behind: Sequence[int] = (),
) -> Verdict:
    """Give the verdict over all live ranks of this node.

    Args:
        standings: one for each live rank.
        samples: by rank, oldest first; a rank without any is judged by its standing alone.
        limits: the numbers of the table above.
        whole: these are all ranks of the job.
        behind: ranks that torch's flight recorder shows behind the others.
    """
    found = [find(standing, samples.get(standing.rank, ()), limits) for standing in standings]
    live = [one for one in found if one.category is not Category.GONE]

    def of(category: Category) -> list[Finding]:
        return [one for one in live if one.category is category]

    if of(Category.TRACED):
        return _not_hung(found, "traced", limits)
    for category in (Category.STOPPED, Category.HELD):
        if of(category):
            return _hung(found, category.value, of(category))
    stuck = of(Category.STUCK)
    if stuck and not any(_excuses(one, stuck) for one in live):
        return _hung(found, "stuck", stuck)
    waiting = of(Category.WAITING)
    if whole and waiting and len(waiting) == len(live) and all(_sure(one, samples) for one in waiting):
        return _hung(found, "deadlock", _out_of_line(waiting, behind))
    overdue = [one for one in live if _overdue(one, limits, anybody_waits=bool(waiting))]
    blamed = [one for one in overdue if one.category is not Category.WAITING]
    if not blamed and not any(one.category in (Category.ALIVE, Category.PAUSED, Category.IDLE) for one in live):
        blamed = overdue
    if blamed:
        return _hung(found, "cap", blamed)
    return _not_hung(found, "none", limits)


def _excuses(other: Finding, stuck: Sequence[Finding]) -> bool:
    """Whether the stuck ranks may be waiting for this one, in a way that no name tells."""
    undecided = other.category is Category.IDLE and (other.for_s < other.enough_s or not other.standing.armed)
    if not undecided and other.category not in (Category.ALIVE, Category.PAUSED):
        return False
    return other.standing.steps < min(one.standing.steps for one in stuck) + _AHEAD_STEPS


def _sure(one: Finding, samples: Mapping[int, Sequence[Sample]]) -> bool:
    return one.for_s >= one.enough_s and len(samples[one.rank]) >= _MIN_SAMPLES


def _overdue(one: Finding, limits: Limits, *, anybody_waits: bool) -> bool:
    standing = one.standing
    if not standing.armed or one.leaving:
        return False
    if standing.region is Region.NONE and not anybody_waits:
        return False
    return standing.quiet_s >= _cap_s(standing, limits)


def _cap_s(standing: Standing, limits: Limits) -> float:
    return limits.cap_s if standing.begun else limits.first_step_s


def _out_of_line(waiting: Sequence[Finding], behind: Sequence[int]) -> list[Finding]:
    """Of ranks that all wait, those that are behind the others; else those in a smaller group than the largest."""
    late = [one for one in waiting if one.rank in behind]
    if late and len(late) < len(waiting):
        return late
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in waiting:
        groups.setdefault((one.what, one.where), []).append(one)
    sizes = sorted((len(group) for group in groups.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return []
    return [one for group in groups.values() if len(group) < sizes[0] for one in group]


# -- words


def _hung(found: Sequence[Finding], rule: str, odd: Sequence[Finding]) -> Verdict:
    blamed = frozenset(one.rank for one in odd)
    groups = _groups(found, blamed, with_places=rule == "deadlock")
    sentence = ", ".join(_phrase(group) for group in groups)
    if rule == "cap":
        quiet_s = max(one.standing.quiet_s for one in odd)
        sentence += f"; not moved for {quiet_s:.0f} s, longer than is allowed"
    return Verdict(hung=True, rule=rule, sentence=sentence, odd=tuple(sorted(blamed)), groups=groups)


def _not_hung(found: Sequence[Finding], rule: str, limits: Limits) -> Verdict:
    groups = _groups(found, frozenset(), with_places=False)
    quiet_s = max((one.standing.quiet_s for one in found), default=0.0)
    left_s = (_cap_s(one.standing, limits) - one.standing.quiet_s for one in found if one.standing.armed)
    again_s = min((limits.rest_s, max(limits.floor_s, quiet_s / 2), *(each for each in left_s if each > 0)))
    if any(one.candidate for one in found):
        again_s = min(again_s, limits.again_s)
    sentence = ", ".join(map(_phrase, groups))
    return Verdict(hung=False, rule=rule, sentence=sentence, groups=groups, again_s=again_s)


def _groups(found: Sequence[Finding], odd: frozenset[int], *, with_places: bool) -> tuple[Group, ...]:
    """Ranks that do the same in the same place; those to blame last."""
    members: dict[tuple[bool, Category, str], list[Finding]] = {}
    for one in sorted(found, key=lambda one: one.rank):
        what = f"{one.what} ({one.where})" if with_places and one.where else one.what
        members.setdefault((one.rank in odd, one.category, what), []).append(one)
    order = sorted(members, key=lambda key: (key[0], key[1] is not Category.WAITING, members[key][0].rank))
    return tuple(
        Group(
            ranks=tuple(one.rank for one in members[key]),
            category=key[1],
            what=key[2],
            frames=members[key][0].frames,
        )
        for key in order
    )


def _phrase(group: Group) -> str:
    if len(group.ranks) == 1:
        return f"rank {group.ranks[0]} {group.what}"
    verb, _, rest = group.what.partition(" ")
    return f"ranks {_spans(group.ranks)} {_PLURAL.get(verb, verb)} {rest}".rstrip()


def _spans(ranks: Sequence[int]) -> str:
    """`0-2,4-7` for sorted ranks."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
