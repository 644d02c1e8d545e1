"""Turns stacks and CPU time into a verdict: what to report, and whether to act. Pure.

Each rank gets the first category that fits:

    gone      its process has ended                                          ignored from then on
    traced    a debugger is attached, or it is at a prompt (pdb, IPython)    no report and no action meanwhile
    stopped   state T for stopped_s                                          proof
    held      the GIL is held in one place by a thread that sleeps or        proof, unless another rank is alive
              waits for another thread (not for a file, pipe or socket),
              and process and children rest and move no data, for held_s
    alive     it passed an edge within the floor
    waiting   in a collective, in DDP's backward, or for its GPU; same stack, and its process is idle or, with a GPU,
              spins in the main thread alone
    alive     CPU time of its process tree advances, data is read or written, or its stack changes
    resting   none of these: sleep, socket, poll, lock, file; or no stack was available, and its CPU time stands still

and the job the first verdict:

    traced    any rank is traced                                                            nothing
    stopped   any rank is stopped                                                           acts: that rank
    held      any rank holds the GIL so, and none works (`teardown`: it had destroyed       acts: that rank
              its process group)
    deadlock  every rank of the job waits in collectives that can never match (below)       acts: the ranks that differ
    timeout   no rank works, and none has for settle_s; and one has stood still for         acts: that rank
              timeout_s (first_step_s before the end of its first step)
    late      a resting or alive rank is beyond its allowance; or all wait, and one is      reports: that rank
    none of these                                                                           nothing

(held and deadlock take twice as long before the end of the first step.)

Allowances are for reporting only: learnt, 30 to 60 s as long as nothing took longer; 120 s for functions named
validate, save, compile ..., for ranks that work, in a save, and before the end of the first step. They never change
actions. A rank that works is never acted on, and neither is any other while it works: a program may validate,
tokenize or download on one rank for hours, and the others may poll for its result, so that they take `settle_s` to see
it. (If the others wait for it in a collective, that has a timeout of its own.)
Before the first edge time means nothing: it may not be a training program. If a rank waits in a collective then, it is
reported, not acted on: an idle inference server looks the same. The same holds for a rank that waits for its GPU alone,
which may compute for as long, unless another waits in a collective; if the line has other calls, too, it counts as
work. The time counts from when a rank was last seen to move or to work; if no look was possible, nothing is known and
there is no action.

When can collectives never match? All ranks of the job are on this machine, each is in a collective, idle in one place
for deadlock_s, and no other thread of the program or its packages could be what they wait for. If they were in the
same collective, it would have completed: there is no network between them. But a program may have made a group with
processes outside of the job. So none of them may have a TCP connection to any process but the other ranks and their
store (`sockets`; gloo connects the members of a group when it is made), and one of these must hold:

    the flight recorders differ: one has begun fewer collectives of a group, or another one under the same number; or
    there is no such record, and the ranks are in different calls or on different lines; or
    all of them only receive: none sends.

Two operations under one number are proof whatever they are connected to.

Ranks that reach the same collective from different lines match, continue, and do not appear here; if they do, and the
recorders show the same collective, it is slow. With a GPU, the call returns before the work is done and
ranks may wait for long computation, so only recorders that show two operations under one number are proof.

On several nodes an agent sees only its own ranks; whether any works on another node, the nodes tell each other. There
is no proof from collectives, and ranks that wait are not acted on however long: the node of the rank that they wait for
judges it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulaunch.launcher.hang.activity import Activity, activity_of
from gpulaunch.launcher.hang.values import (
    Category,
    Limits,
    RankCluster,
    RankProgress,
    Recorders,
    Sample,
    Verdict,
    spans,
)
from gpulaunch.profiler.channel.layout import Region

_MIN_SAMPLES = 3
_RECEIVING = frozenset({"recv", "recv_object_list"})
_PLURAL = {"waits": "wait", "is": "are", "holds": "hold", "runs": "run", "has": "have"}
_NONE = Recorders()


def judge(
    standings: Sequence[RankProgress],
    samples: Mapping[int, Sequence[Sample]],
    limits: Limits,
    *,
    whole: bool,
    idle_s: float | None = math.inf,
    closed: bool = False,
    recorders: Recorders = _NONE,
) -> Verdict:
    """Return the verdict over all live ranks of this node.

    Args:
        standings: one for each live rank.
        samples: by rank, oldest first; a rank without any is judged by its standing alone.
        limits: the numbers of the table above.
        whole: these are all ranks of the job.
        idle_s: how long no rank of the job has been found at work, up to now; None: one of another node works.
        closed: they are connected only to each other and to their store.
        recorders: the data of torch's flight recorders on all ranks.
    """
    found = [activity_of(standing, samples.get(standing.rank, ()), limits) for standing in standings]
    live = [one for one in found if one.category is not Category.GONE]

    def of(category: Category) -> list[Activity]:
        return [one for one in live if one.category is category]

    if of(Category.TRACED):
        return replace(_verdict(found, "traced", (), limits), works=True)
    if of(Category.STOPPED):
        return _verdict(found, "stopped", of(Category.STOPPED), limits, acts=True)
    works_here = bool(of(Category.ALIVE)) or any(one.may_work for one in live)
    at_work = works_here or idle_s is None
    held = of(Category.HELD)
    if held and not at_work:
        finished = all(one.progress.left_group for one in held)
        return _verdict(found, "teardown" if finished else "held", held, limits, acts=True)
    waiting = of(Category.WAITING)
    odd = _out_of_line(waiting, recorders)
    if whole and len(waiting) == len(live) and _never_match(waiting, samples, closed, recorders):
        return _verdict(found, "deadlock", odd, limits, acts=True)
    judged = [one for one in live if _is_judged(one, anybody_waits=bool(waiting))]
    late = [one for one in judged if one.progress.quiet_s >= one.report_after_s]
    told = [one for one in late if one.category is not Category.WAITING]
    if late and len(waiting) == len(live) and all(_sure(one, samples) for one in waiting):
        told = odd or waiting if whole else waiting
    due = [] if at_work else _due(live, judged, whole=whole)
    due_in_s = min((_left_s(one, limits) for one in due), default=None)
    if due_in_s is not None and idle_s is not None:
        due_in_s = max(due_in_s, limits.settle_s - idle_s)
    if due_in_s is not None and due_in_s <= 0:
        over = [one for one in due if one.category is Category.RESTING and _left_s(one, limits) <= 0]
        return _verdict(found, "timeout", over or odd, limits, acts=True)
    first_step = not any(one.progress.begun for one in due)
    due_by = "" if due_in_s is None else "--first-step-timeout" if first_step else "--hang-timeout"
    proof_in_s = min((one.proof_in_s for one in live), default=math.inf)
    if not at_work and proof_in_s < (math.inf if due_in_s is None else due_in_s):
        due_in_s, due_by = proof_in_s, ""
    verdict = _verdict(found, "late" if told else "none", told, limits, due_in_s=due_in_s)
    elsewhere = ", for a rank of another node" if told is waiting and not whole else ""
    return replace(verdict, due_by=due_by, sentence=f"{verdict.sentence}{elsewhere}", works=works_here)


def _is_judged(one: Activity, *, anybody_waits: bool) -> bool:
    """Whether its quiet time means anything."""
    return one.progress.armed and (one.progress.region is not Region.NONE or anybody_waits)


def _due(live: Sequence[Activity], judged: Sequence[Activity], *, whole: bool) -> list[Activity]:
    """The ranks whose time runs, if none works. Waiting ranks count only if all of the job wait: else they wait for
    another, which may work.

    A rank that has left its process group after training may serve the model, or wait for an evaluation, forever.
    """
    all_wait = (
        whole and all(one.category is Category.WAITING for one in live) and not all(one.only_device for one in live)
    )
    training = [
        one
        for one in judged
        if one.progress.region is not Region.NONE and not one.leaving and not one.progress.left_group
    ]
    return [one for one in training if all_wait or one.category is Category.RESTING]


def _left_s(one: Activity, limits: Limits) -> float:
    """How much longer it may stand still."""
    return (limits.timeout_s if one.progress.begun else limits.first_step_s) - one.stalled_s


def _never_match(
    waiting: Sequence[Activity],
    samples: Mapping[int, Sequence[Sample]],
    closed: bool,
    recorders: Recorders,
) -> bool:
    """Whether ranks that all wait will wait forever; see above."""
    last = [samples[one.rank][-1] for one in waiting if samples.get(one.rank)]
    if len(last) < len(waiting) or any(sample.assisted for sample in last):
        return False
    if not waiting or not all(one.call and _sure(one, samples) for one in waiting):
        return False
    if recorders.clashing or not closed or any(sample.gpu for sample in last):
        return bool(recorders.clashing)
    if recorders.behind:
        return True
    if all(one.call in _RECEIVING for one in waiting):
        return True
    return not recorders.agree and len({(one.call, one.where) for one in waiting}) > 1


def _sure(one: Activity, samples: Mapping[int, Sequence[Sample]]) -> bool:
    return one.for_s >= one.enough_s and len(samples[one.rank]) >= _MIN_SAMPLES


def _out_of_line(waiting: Sequence[Activity], recorders: Recorders) -> list[Activity]:
    """If all ranks wait: those behind the others, else those outside the largest group."""
    late = [one for one in waiting if one.rank in (recorders.behind or recorders.clashing)]
    if late and len(late) < len(waiting):
        return late
    groups: dict[tuple[str, str], list[Activity]] = {}
    for one in waiting:
        groups.setdefault((one.what, one.where), []).append(one)
    sizes = sorted((len(group) for group in groups.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return []
    return [one for group in groups.values() if len(group) < sizes[0] for one in group]


# -- messages


def _verdict(
    found: Sequence[Activity],
    rule: str,
    told: Sequence[Activity],
    limits: Limits,
    *,
    acts: bool = False,
    due_in_s: float | None = None,
) -> Verdict:
    """Build the verdict with its messages; `told`: the reported ranks, none: no report."""
    all_wait = all(one.category is Category.WAITING for one in found)
    odd = frozenset[int]() if all_wait and len(told) == len(found) else frozenset(one.rank for one in told)
    deadlock = all_wait or rule == "deadlock"
    groups = _groups(found, odd, with_places=deadlock)
    awaited = "" if deadlock or not odd else "for it " if len(odd) == 1 else "for them "
    return Verdict(
        tells=acts or bool(told),
        acts=acts,
        rule=rule,
        sentence=", ".join(_phrase(group, awaited) for group in groups),
        odd=tuple(sorted(odd)),
        groups=groups,
        quiet_s=max((max(one.progress.quiet_s, one.progress.stopped_s) for one in told or found), default=0.0),
        due_in_s=0.0 if acts else due_in_s,
        again_s=_again_s(found, limits, due_in_s),
    )


def _again_s(found: Sequence[Activity], limits: Limits, due_in_s: float | None) -> float:
    """When to look again: soon if there is something to confirm, else when a report or action may be due."""
    quiet_s = max((one.progress.quiet_s for one in found), default=0.0)
    candidate = any(one.candidate for one in found)
    until_s = [limits.again_s if candidate else min(limits.rest_s, max(limits.floor_s, quiet_s / 2))]
    until_s += [one.report_after_s - one.progress.quiet_s for one in found if one.progress.armed]
    until_s += [due_in_s] if due_in_s is not None else []
    return min(each for each in until_s if each > 0)


def _groups(found: Sequence[Activity], odd: frozenset[int], *, with_places: bool) -> tuple[RankCluster, ...]:
    """Group ranks that do the same in the same place: first those that the others wait for, then those that wait."""
    members: dict[tuple[bool, Category, str], list[Activity]] = {}
    for one in sorted(found, key=lambda one: one.rank):
        what = f"{one.what} ({one.where})" if with_places and one.where else one.what
        members.setdefault((one.rank in odd, one.category, what), []).append(one)
    order = sorted(members, key=lambda key: (not key[0], key[1] is Category.WAITING, members[key][0].rank))
    return tuple(
        RankCluster(
            ranks=tuple(one.rank for one in members[key]),
            category=key[1],
            what=key[2],
            frames=members[key][0].frames,
        )
        for key in order
    )


def _phrase(group: RankCluster, awaited: str) -> str:
    """`awaited`: "for it " if it is known which rank the waiting ones wait for."""
    verb, _, rest = group.what.partition(" ")
    if group.category is Category.WAITING:
        rest = f"{awaited}{rest}"
    if len(group.ranks) == 1:
        return f"rank {group.ranks[0]} {verb} {rest}".rstrip()
    return f"ranks {spans(group.ranks)} {_PLURAL.get(verb, verb)} {rest}".rstrip()
