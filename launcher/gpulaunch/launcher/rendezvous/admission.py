"""Who may take part in a job: what every node must be started with, and the ranks of a fixed group. Pure."""

from __future__ import annotations

from gpulaunch.launcher.rendezvous.messages import Register
from gpulaunch.launcher.rendezvous.plan import Report, Settings


def mismatch(ours: Register, theirs: Register, *, who: str, leader: str) -> str:
    """Why a node cannot take part, as one line for both sides; "" if it can.

    Args:
        ours: of the leader.
        theirs: of the node.
        who: the node, for users.
        leader: the leader, for users.
    """
    if theirs.run_id != ours.run_id:
        return f"{who} belongs to run {theirs.run_id!r}, {leader} to {ours.run_id!r}; check --rdzv-id"
    if theirs.fixed != ours.fixed:
        how = {True: "--master-addr", False: "--rdzv-endpoint"}
        return f"{who} was started with {how[theirs.fixed]}, {leader} with {how[ours.fixed]}; use the same on all nodes"
    if theirs.replicate != ours.replicate:
        which = f"{who} was started {_with_or_without(theirs.replicate)} --replicate, {leader} "
        return f"{which}{_with_or_without(ours.replicate)} it; use the same on all nodes"
    if (theirs.min_nodes, theirs.max_nodes) != (ours.min_nodes, ours.max_nodes):
        nodes = f"--nnodes {_nnodes(theirs)}, {leader} with {_nnodes(ours)}"
        return f"{who} was started with {nodes}; use the same on all nodes"
    return ""


def _with_or_without(given: bool) -> str:
    return "with" if given else "without"


def _nnodes(register: Register) -> str:
    least, most = register.min_nodes, register.max_nodes
    return f"{least}:{most}" if least < most else f"{most}"


def misplaced(settings: Settings, report: Report, *, twin: str, is_late: bool) -> str:
    """Why a node has no place in a fixed group; "" if it has one.

    Args:
        settings: of the job.
        report: of the node.
        twin: the host of another node of the same rank that is there; "": there is none.
        is_late: the group has been formed without this node.
    """
    size = settings.max_nodes
    if report.order is None or report.order >= size:
        return f"{report.host} has no place in --nnodes {size}; --node-rank counts from 0 to {size - 1}"
    if twin:
        return f"--node-rank {report.order} given twice: on {twin} and {report.host}"
    if is_late:
        return f"{report.host} comes too late: node {report.order} of this job is another process"
    return ""
