"""A node's part in the plan: what it reports, and what it has to do. Pure functions of its report and the plan.

    state      the plan says                                   then                      for the agent
    READY      the next generation runs, with a seat for it    RUNNING                   JOINED
    RUNNING    its generation is over                          ENDING                    STOP
    SUCCEEDED  the same                                        ENDING                    STOP
               all have succeeded                              stays                     DONE
    ENDED      its generation is judged                        PREPARING                 JUDGED
    any        the job is over                                 stays                     STOP first, then JUDGED

Everything else changes nothing. The agent moves the report on in between: `ready`, `succeeded`, `ending`, `ended`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.rendezvous.codec import clean
from gpulaunch.launcher.rendezvous.plan import NodeState, Offer, Plan, Report, Stage

FENCE_S = 7.5
"""A node that has not heard the leader for so long ends its ranks: the others may go on without it 1.5 s later."""


class News(Enum):
    """What the agent has to do, as the plan says."""

    JOINED = "joined"
    """Start the ranks of the plan's generation."""
    STOP = "stop"
    """End the ranks: the generation is over."""
    JUDGED = "judged"
    """What comes after a generation whose ranks have ended here."""
    DONE = "done"
    """All ranks of all nodes have succeeded."""


def receive(report: Report, plan: Plan) -> tuple[Report, News | None]:
    """Compare what this node does with the newest plan; an older one changes nothing."""
    if plan.generation < report.newest:
        return report, None
    report = replace(report, newest=plan.generation, job=plan.job)
    if report.state in (NodeState.PREPARING, NodeState.READY):
        return _idle(report, plan)
    if report.state is NodeState.SUCCEEDED and plan.succeeded:
        return report, News.DONE
    if report.state in (NodeState.RUNNING, NodeState.SUCCEEDED):
        runs = plan.generation == report.generation and plan.stage is Stage.RUNNING
        return (report, None) if runs else (replace(report, state=NodeState.ENDING), News.STOP)
    if report.state is NodeState.ENDED and _is_judged(report.generation, plan):
        return replace(report, state=NodeState.PREPARING, cause=None, plan=None), News.JUDGED
    return report, None


def _idle(report: Report, plan: Plan) -> tuple[Report, News | None]:
    if plan.stage is Stage.OVER:
        return (report, News.DONE) if plan.succeeded else (report, News.JUDGED)
    if plan.seat is None or plan.generation <= report.generation or report.state is NodeState.PREPARING:
        return report, None
    if plan.stage is Stage.RUNNING:
        running = replace(report, state=NodeState.RUNNING, generation=plan.generation, plan=plan, offers=(), idle=False)
        return running, News.JOINED
    if plan.stage is Stage.STOPPING:  # it was over before it was known here
        return replace(report, generation=plan.generation), None
    return report, None


def _is_judged(generation: int, plan: Plan) -> bool:
    return plan.judged >= generation or plan.generation > generation or plan.stage is Stage.OVER


def ready(report: Report, offers: Sequence[Offer], store_port: int) -> Report:
    """No rank of an earlier generation is alive here; see `Report`."""
    offered = tuple(replace(offer, key=clean(offer.key)) for offer in offers)  # as the others' arrive
    return replace(report, state=NodeState.READY, cause=None, plan=None, offers=offered, store_port=store_port)


def idle(report: Report, idle: bool) -> Report:
    """The ranks here are known not to work, any of them, or not any more."""
    return replace(report, idle=idle) if report.state is NodeState.RUNNING else report


def succeeded(report: Report) -> Report:
    """All ranks here have ended successfully."""
    return replace(report, state=NodeState.SUCCEEDED) if report.state is NodeState.RUNNING else report


def ending(report: Report, cause: Cause) -> Report:
    """The ranks here are being ended, because of something on this node; one that has none takes part no more."""
    if report.state is NodeState.READY:
        return replace(report, state=NodeState.PREPARING)
    if report.state is NodeState.ENDED:
        return replace(report, cause=cause)
    if report.state in (NodeState.RUNNING, NodeState.SUCCEEDED, NodeState.ENDING):
        return replace(report, state=NodeState.ENDING, cause=cause)
    return report


def ended(report: Report, cause: Cause) -> Report:
    """None of the ranks is alive here any more; `cause`: why they ended, of tier NONE if they were told to."""
    return replace(report, state=NodeState.ENDED, cause=None if cause.tier is Tier.NONE else cause)
