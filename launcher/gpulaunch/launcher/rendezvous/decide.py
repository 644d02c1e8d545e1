"""The decisions where the plan is kept: one pure function, `decide(settings, plan, members, now_s) -> plan`.

    stage      goes on when                                                    to
    FORMING    max_nodes are ready; or min_nodes are, and no other comes      RUNNING, the next generation
               min_nodes are not there within join_timeout_s                   OVER
               a node of a fixed group that has been formed is lost            OVER
    RUNNING    a seated node fails, is lost, or is asked to save and end       STOPPING
               there are seats for nodes that wait                             STOPPING
               all seated nodes have succeeded                                 OVER
    STOPPING   no rank of the generation is alive                              FORMING, or OVER: the restart policy

Call it after every change, and at `next_s`: it gives the same plan again where nothing is to be done.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.failure.classify import ADVICE, Kind
from gpulaunch.launcher.policy import restart
from gpulaunch.launcher.policy.restart import REQUEUE, Decision
from gpulaunch.launcher.rendezvous import membership
from gpulaunch.launcher.rendezvous.membership import Members
from gpulaunch.launcher.rendezvous.plan import (
    Member,
    NodeState,
    Plan,
    Report,
    Seat,
    Settings,
    Stage,
)

_LOST = Cause(text="is lost", tier=Tier.NODE_LOST, kind=Kind.NODE_LOSS, exit_code=REQUEUE)
_FREE = Decision(again=True, wait_s=0.0, charged=False, why="", code=None)


def decide(settings: Settings, plan: Plan, members: Members, now_s: float) -> Plan:
    """The plan that follows from what is known now."""
    plan = _adopted(settings, plan, members, now_s)
    while True:
        following = _STEPS[plan.stage](settings, plan, members, now_s)
        if following is plan:
            return plan
        plan = following


def next_s(settings: Settings, plan: Plan, members: Members, now_s: float) -> float:
    """When to decide again if nothing happens until then; infinite: never."""
    due_s = [membership.lost_at_s(settings, member) for member in members.values()]
    if plan.stage is Stage.FORMING:
        ready = membership.ready(settings, members, now_s)
        due_s += [plan.since_s + settings.join_timeout_s, plan.not_before_s, _last_call_s(settings, plan, ready)]
    if plan.stage in (Stage.RUNNING, Stage.STOPPING):
        due_s.append(plan.since_s + settings.silent_s)  # of seats that a new leader has not heard of
        due_s.append(plan.since_s + settings.last_call_s)  # for a larger group
    return min((each_s for each_s in due_s if each_s > now_s), default=math.inf)


def shifted(plan: Plan, by_s: float) -> Plan:
    """The plan of another decider, with its times on a clock that is ahead by so much."""
    recent_s = tuple(each_s + by_s for each_s in plan.history.recent_s)
    history = replace(plan.history, recent_s=recent_s)
    return replace(plan, since_s=plan.since_s + by_s, not_before_s=plan.not_before_s + by_s, history=history)


# -- the stages


def _forming(settings: Settings, plan: Plan, members: Members, now_s: float) -> Plan:
    alive = membership.alive(settings, members, now_s)
    ready = [member for member in alive if member.report.state is NodeState.READY]
    if len(ready) >= settings.min_nodes:
        last_call_s = _last_call_s(settings, plan, ready)
        if plan.seats:  # all of the last generation that live keep their seats, however long they look for checkpoints
            before = {seat.node for seat in plan.seats}
            is_complete = before & {member.report.node for member in alive} <= {member.report.node for member in ready}
        else:
            is_complete = len(ready) >= settings.max_nodes
        if now_s >= plan.not_before_s and (is_complete or now_s >= last_call_s):
            return _formed(settings, plan, ready, now_s)
    elif settings.fixed and plan.seats:
        lost = [each for each in _seated(settings, plan, members, now_s) if each.lost]
        if lost:
            found = _Found(cause=_LOST, seat=lost[0].seat, at_s=now_s)
            return replace(
                plan,
                stage=Stage.OVER,
                since_s=now_s,
                decision=None,
                why=_sentence(found),
                blamed=found.seat.node,
                exit_code=REQUEUE,
                lost=True,
            )
    elif now_s >= plan.since_s + settings.join_timeout_s and len(alive) < settings.min_nodes:
        why = f"waited {settings.join_timeout_s:g} s for {membership.missing_text(settings, alive)}"
        return replace(plan, stage=Stage.OVER, since_s=now_s, why=why, exit_code=1 if settings.fixed else REQUEUE)
    return plan


def _running(settings: Settings, plan: Plan, members: Members, now_s: float) -> Plan:
    seated = _seated(settings, plan, members, now_s)
    if all(_has_succeeded(each.member, plan) for each in seated):
        return replace(plan, stage=Stage.OVER, since_s=now_s, why="", succeeded=True)
    causes = [*_causes(plan, seated), *_unexplained(plan, seated)]
    ready = membership.ready(settings, members, now_s)
    if causes:
        first = _first_cause(causes)
        saves = any(found.cause.preempted for found in causes)
        return replace(
            plan,
            stage=Stage.STOPPING,
            since_s=now_s,
            why=_sentence(first),
            blamed=first.seat.node,
            saves=saves,
            preempted=saves and _ends(settings, causes, seated, ready),
            lost=_has_lost(causes),
        )
    nodes = {seat.node for seat in plan.seats}
    waiting = [member.report.host for member in ready if member.report.node not in nodes]
    is_settled = now_s >= plan.since_s + settings.last_call_s  # one that comes and goes is not taken in each time
    if waiting and is_settled and len(plan.seats) < settings.max_nodes:
        why = f"{', '.join(sorted(waiting)[:8])} can take part in a larger group"
        return replace(plan, stage=Stage.STOPPING, since_s=now_s, why=why, blamed="", saves=True)
    idle = all(_is_idle(each.member, plan) for each in seated)
    return plan if idle is plan.idle else replace(plan, idle=idle)


def _stopping(settings: Settings, plan: Plan, members: Members, now_s: float) -> Plan:
    seated = _seated(settings, plan, members, now_s)
    if not all(each.lost or _is_over(each.member, plan) for each in seated):
        return plan
    causes = _causes(plan, seated)
    judged = replace(plan, judged=plan.generation, since_s=now_s, saves=False, preempted=False, lost=False)
    if not causes:
        return replace(judged, stage=Stage.FORMING, attempt=plan.attempt + 1, decision=_FREE)
    first = _first_cause(causes)
    history, decision = _judge(settings, plan, first.cause, now_s)
    if _ends(settings, causes, seated, membership.ready(settings, members, now_s)):
        decision = replace(decision, again=False)
    judged = replace(judged, history=history, decision=decision, why=_sentence(first), blamed=first.seat.node)
    if decision.again:
        return replace(judged, stage=Stage.FORMING, attempt=plan.attempt + 1, since_s=now_s + decision.wait_s)
    preempted = any(found.cause.preempted for found in causes)
    code = first.cause.exit_code if decision.code is None else decision.code
    code = REQUEUE if preempted else code
    return replace(judged, stage=Stage.OVER, exit_code=code, preempted=preempted, lost=_has_lost(causes))


def _over(settings: Settings, plan: Plan, members: Members, now_s: float) -> Plan:  # noqa: ARG001  # a row of the table
    return plan


_STEPS = {Stage.FORMING: _forming, Stage.RUNNING: _running, Stage.STOPPING: _stopping, Stage.OVER: _over}


# -- who is there


def _adopted(settings: Settings, plan: Plan, members: Members, now_s: float) -> Plan:
    """Never older than what a node knows: a leader that has started anew continues with what the nodes run."""
    newest, job = max(((report.newest, report.job) for report in _reports(members)), default=(0, ""))
    known = [report.plan for report in _reports(members) if report.plan is not None]
    running = [each for each in known if each.generation == max(newest, plan.generation)]
    if newest > plan.generation:
        if not running:  # nodes that have not been heard yet may have ranks for as long
            anew = replace(plan, job=job, generation=newest, judged=newest, decision=_FREE)
            return replace(anew, since_s=now_s, not_before_s=now_s + settings.silent_s)
        history = replace(running[0].history, recent_s=())  # times by another clock
        plan = replace(running[0], stage=Stage.RUNNING, seats=_unheard_seats(running[0]), history=history)
        plan = replace(plan, since_s=now_s, saves=False, preempted=False, lost=False, why="")
    if all(seat.node for seat in plan.seats):
        return plan
    heard = {seat.node_rank: seat for each in running for seat in each.seats}
    keepers = {each.keeper.seat for each in running if each.keeper is not None and each.keeper.seat.node in members}
    heard.update({seat.node_rank: seat for seat in keepers})  # it has been looked for
    return replace(plan, seats=tuple(seat if seat.node else heard.get(seat.node_rank, seat) for seat in plan.seats))


def _unheard_seats(plan: Plan) -> tuple[Seat, ...]:
    missing = Seat(node="", host="a node that has not come back", node_rank=0, nproc=0, first_rank=0)
    return tuple(replace(missing, node_rank=rank) for rank in range(plan.nnodes))


def _reports(members: Members) -> list[Report]:
    return [member.report for member in members.values()]


def _last_call_s(settings: Settings, plan: Plan, ready: list[Member]) -> float:
    """Until when to wait for more nodes: it counts from when there were enough."""
    if len(ready) < settings.min_nodes:
        return math.inf
    enough_s = sorted(member.state_s for member in ready)[settings.min_nodes - 1]
    return max(plan.since_s, enough_s) + settings.last_call_s


@dataclass(frozen=True, kw_only=True)
class _Seated:
    """A seat, and its node as far as it is known."""

    seat: Seat
    member: Member | None
    lost: bool


def _seated(settings: Settings, plan: Plan, members: Members, now_s: float) -> list[_Seated]:
    seated: list[_Seated] = []
    for seat in plan.seats:
        member = members.get(seat.node)
        if member is None and not seat.node and now_s < plan.since_s + settings.silent_s:
            member = membership.unheard(seat, plan, now_s)
        lost = member is None or membership.lost_at_s(settings, member) <= now_s
        seated.append(_Seated(seat=seat, member=member, lost=lost))
    return seated


def _is_of(member: Member | None, plan: Plan) -> bool:
    return member is not None and member.report.generation == plan.generation


def _has_succeeded(member: Member | None, plan: Plan) -> bool:
    """Also a node that has left since, or does not answer any more."""
    return member is not None and _is_of(member, plan) and member.report.state is NodeState.SUCCEEDED


def _is_idle(member: Member | None, plan: Plan) -> bool:
    """Whether none of its ranks works, as far as it knows."""
    return _has_succeeded(member, plan) or (member is not None and _is_of(member, plan) and member.report.idle)


def _is_over(member: Member | None, plan: Plan) -> bool:
    """Whether no rank of the generation is alive there."""
    if member is None:
        return True
    over = (NodeState.ENDED, NodeState.PREPARING, NodeState.READY)
    return member.report.state in over and member.report.generation >= plan.generation


# -- forming


def _formed(settings: Settings, plan: Plan, ready: list[Member], now_s: float) -> Plan:
    seats = _seats(settings, plan, ready)
    reports = {member.report.node: member.report for member in ready}
    first = reports[seats[0].node]
    return replace(
        plan,
        stage=Stage.RUNNING,
        generation=plan.generation + 1,
        since_s=now_s,
        seats=seats,
        nnodes=len(seats),
        world_size=sum(seat.nproc for seat in seats),
        store_addr=first.address,
        store_port=first.store_port,
        resume=_agreed(settings, [reports[seat.node] for seat in seats]),
        idle=False,
        why="",
    )


def _seats(settings: Settings, plan: Plan, ready: list[Member]) -> tuple[Seat, ...]:
    """Nodes of the last generation keep their seats, and if they can their rank; others fill in, in their order."""
    before = {seat.node: seat.node_rank for seat in plan.seats}
    chosen = sorted(ready, key=lambda member: (member.report.node not in before, _order(member)))[: settings.max_nodes]
    chosen.sort(key=_order)
    ranks: dict[int, Report] = {}
    for member in chosen:
        rank = before.get(member.report.node)
        if rank is not None and rank < len(chosen):
            ranks[rank] = member.report
    seated = {report.node for report in ranks.values()}
    others = iter([member.report for member in chosen if member.report.node not in seated])
    seats: list[Seat] = []
    first_rank = 0
    for rank in range(len(chosen)):
        report = ranks[rank] if rank in ranks else next(others)
        seats.append(
            Seat(node=report.node, host=report.host, node_rank=rank, nproc=report.nproc, first_rank=first_rank)
        )
        first_rank += report.nproc
    return tuple(seats)


def _order(member: Member) -> tuple[float, list[tuple[int, int | str]], str]:
    """By the given number, else by the host's name as people sort it: host2 before host10."""
    report = member.report
    parts = re.split(r"(\d+)", report.host)
    natural: list[tuple[int, int | str]] = [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]
    return (math.inf if report.order is None else report.order, natural, report.node)


def _agreed(settings: Settings, reports: list[Report]) -> str:
    """The checkpoint that all resume from: of those that every node can read, the best of node rank 0; with --replicate
    the newest that any can read."""
    if settings.replicate:
        best = [report.offers[0] for report in reports if report.offers]
        return max(best, key=lambda offer: (offer.generation, offer.step, offer.key)).key if best else ""
    every = set.intersection(*({offer.key for offer in report.offers} for report in reports))
    return next((offer.key for offer in reports[0].offers if offer.key in every), "")


# -- why a generation ended


@dataclass(frozen=True, kw_only=True)
class _Found:
    cause: Cause
    seat: Seat
    at_s: float


def _causes(plan: Plan, seated: list[_Seated]) -> list[_Found]:
    """What has ended the generation, as far as it is known."""
    causes: list[_Found] = []
    for each in seated:
        node = each.member if _is_of(each.member, plan) else None
        cause = node.report.cause if node is not None else None
        at_s = node.failed_s if node is not None else math.inf
        # A node that has said goodbye has said why; one that fell silent after it failed may have said too little.
        if each.lost and not (node is not None and cause is not None and (node.gone or cause.tier is Tier.OWN)):
            cause = _LOST
            at_s = math.inf
        if cause is not None:
            causes.append(_Found(cause=cause, seat=each.seat, at_s=at_s))
    return causes


def _unexplained(plan: Plan, seated: list[_Seated]) -> list[_Found]:
    """Nodes that end the generation without having been told to by this plan."""
    cause = Cause(text="has ended its ranks", tier=Tier.NONE)
    works = (NodeState.RUNNING, NodeState.SUCCEEDED)
    return [
        _Found(cause=cause, seat=each.seat, at_s=math.inf)
        for each in seated
        if each.member is not None
        and not each.lost
        and each.member.report.cause is None
        and each.member.report.generation >= plan.generation
        and each.member.report.state not in works
    ]


def _ends(settings: Settings, causes: list[_Found], seated: list[_Seated], ready: list[Member]) -> bool:
    """Whether a cause asks for the end of the job, and not only of a node that the others can do without."""
    if settings.fixed and _has_lost(causes):
        return True
    final = [found.cause for found in causes if found.cause.final]
    if not all(cause.leaves for cause in final) or (final and not settings.elastic):
        return True
    leaving = {found.seat.node for found in causes if found.cause.leaves or found.cause.kind is Kind.NODE_LOSS}
    there = {each.seat.node for each in seated} | {member.report.node for member in ready}
    return bool(final) and len(there - leaving) < settings.min_nodes


def _first_cause(causes: Iterable[_Found]) -> _Found:
    """The one that explains the others: by how much it says, then by time, then by rank."""
    return min(causes, key=lambda found: (found.cause.tier.value, found.at_s, found.seat.node_rank))


def _has_lost(causes: Iterable[_Found]) -> bool:
    return any(found.cause.kind is Kind.NODE_LOSS for found in causes)


def _sentence(found: _Found) -> str:
    where = f"node {found.seat.node_rank} ({found.seat.host})"
    if found.cause.kind is Kind.NODE_LOSS:
        return f"{where} is lost; {ADVICE[Kind.NODE_LOSS]}"
    return f"{where}: {found.cause.text}"


def _judge(settings: Settings, plan: Plan, cause: Cause, now_s: float) -> tuple[restart.RestartHistory, Decision]:
    """The restart policy; an elastic job goes on without a node that is lost or leaves, at no cost."""
    if settings.elastic and (cause.leaves or cause.kind is Kind.NODE_LOSS):
        return plan.history, _FREE
    return restart.decide(settings.limits, plan.history, restart.failure_of(cause, at_s=now_s))
