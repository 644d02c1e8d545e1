"""What is known of the nodes of a job where its plan is kept: who is alive, who is ready, who is forgotten. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from gpulaunch.launcher.rendezvous.plan import Member, NodeState, Plan, Report, Seat, Settings

Members = Mapping[str, Member]
"""By the identity of the node."""

FORGET_S = 60.0
"""How long a lost node without a seat is remembered."""


def heard(known: Member | None, report: Report, now_s: float, *, gone: bool = False) -> Member:
    """A node after its newest report; `known`: as it was before, None for a node that reports for the first time."""
    is_in_state = known is not None and known.report.state is report.state
    failed_s = known.failed_s if known is not None else math.inf
    return Member(
        report=report,
        heard_s=now_s,
        state_s=known.state_s if known is not None and is_in_state else now_s,
        failed_s=now_s - report.cause.age_s if report.cause is not None else failed_s,
        gone=gone,
    )


def unheard(seat: Seat, plan: Plan, now_s: float) -> Member:
    """A node that has not reported to the present decider yet, and may: it may train."""
    report = Report(node=seat.node, host=seat.host, nproc=0, state=NodeState.RUNNING, generation=plan.generation)
    return Member(report=report, heard_s=now_s, state_s=now_s)


def lost_at_s(settings: Settings, member: Member) -> float:
    """When a node is lost if it is not heard until then."""
    return -math.inf if member.gone else member.heard_s + settings.silent_s


def alive(settings: Settings, members: Members, now_s: float) -> list[Member]:
    """The nodes that are not lost."""
    return [member for member in members.values() if lost_at_s(settings, member) > now_s]


def ready(settings: Settings, members: Members, now_s: float) -> list[Member]:
    """Those of them that can start a generation."""
    return [member for member in alive(settings, members, now_s) if member.report.state is NodeState.READY]


def remembered(plan: Plan, members: Members, now_s: float) -> dict[str, Member]:
    """The nodes without those that are lost for long and have no seat."""
    seated = {seat.node for seat in plan.seats}
    return {
        node: member
        for node, member in members.items()
        if node in seated or (not member.gone and now_s - member.heard_s < FORGET_S)
    }


def missing_text(settings: Settings, there: Collection[Member]) -> str:
    """Which nodes are missing: `nodes 1, 2 of 3`; where they have no numbers, how many: `2 to 4 nodes: 1 is there`."""
    if settings.fixed:
        missing = sorted({*range(settings.max_nodes)} - {member.report.order for member in there})
        numbers = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"node{'s' if len(missing) > 1 else ''} {numbers} of {settings.max_nodes}"
    most = f" to {settings.max_nodes}" if settings.elastic else ""
    return f"{settings.min_nodes}{most} nodes: {len(there)} {'is' if len(there) == 1 else 'are'} there"
