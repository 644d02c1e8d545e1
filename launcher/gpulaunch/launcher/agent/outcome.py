"""How a job or an attempt ended: who is to blame, the exit code, and what is said of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulaunch.launcher.agent.events import Outcome
from gpulaunch.launcher.checkpoint.find import Checkpoint
from gpulaunch.launcher.failure import blame as blames
from gpulaunch.launcher.failure.blame import Blame
from gpulaunch.launcher.failure.classify import Kind
from gpulaunch.launcher.failure.ends import RankEnd, signal_name
from gpulaunch.launcher.failure.report import headline
from gpulaunch.launcher.policy.restart import REQUEUE, Decision


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """Everything that the exit code depends on."""

    outcome: Outcome
    signum: int = 0
    """The first signal that the launcher was sent, 0 for none."""
    preempted: bool = False
    """That signal means: save, and end to be run again."""
    resumable: bool = False
    """There is a checkpoint, or a rank has said by its exit code that it has saved."""
    node_lost: bool = False
    decision: Decision | None = None
    """Of the restart policy, about the last failure."""
    blame: Blame | None = None

    @property
    def exit_code(self) -> int:
        """The launcher's exit code; docs/exit-codes.md lists them."""
        told_to_end = REQUEUE if self.resumable and self.preempted else 128 + self.signum
        if self.outcome is Outcome.SUCCESS:
            return 0
        if self.outcome is Outcome.SIGNAL:
            return told_to_end
        if self.preempted and self.decision is not None and self.decision.again:
            return told_to_end  # a failure that would have been restarted
        if self.decision is not None and self.decision.code is not None:
            return self.decision.code
        if self.node_lost and (self.blame is None or self.blame.kind is Kind.PEER):
            return REQUEUE
        return blames.exit_code(self.blame.first) if self.blame is not None else 1

    @property
    def stopped_by(self) -> str:
        """The name of the signal that ended the job, or ""; a rank that had failed before it has the last word."""
        stopped = self.outcome is Outcome.SIGNAL or (self.preempted and self.exit_code in (REQUEUE, 128 + self.signum))
        return signal_name(self.signum) if stopped else ""


def blame_of(ends: Sequence[RankEnd]) -> Blame | None:
    """Name the first cause of an attempt; None if every rank ended because it was told to: nothing failed here."""
    failed = [end for end in ends if end.code != 0]
    return blames.blame(ends) if any(not end.stopped for end in failed) else None


def failed_elsewhere(outcome: Outcome, blame: Blame | None, *, nnodes: int) -> bool:
    """Whether the cause is another node's: it said so, or the ranks here only lost a peer. It is charged there."""
    only_echoes = blame is not None and blame.kind is Kind.PEER and nnodes > 1
    return only_echoes or outcome is Outcome.PEER_FAILURE


def reason_for_peers(*, signum: int, ends: Sequence[RankEnd], hang: str, decision: Decision | None, error: str) -> str:
    """Say in one line, for the other nodes, what ended the attempt here.

    Args:
        signum: the signal that the launcher was sent, 0 for none.
        ends: of the ranks that have ended so far.
        hang: why ranks are judged to hang, or "".
        decision: of the restart policy, if it was asked.
        error: what went wrong outside of the ranks, or "".
    """
    if signum:
        return f"told to end by {signal_name(signum)}"
    not_again = f"; not restarted: {decision.why}" if decision is not None and decision.why else ""
    if hang:
        return f"the ranks hang: {hang}{not_again}"
    if any(end.code != 0 for end in ends):
        return headline(blames.blame(ends)) + not_again
    return error


def preempted_line(newest: Checkpoint | None, code: int) -> str:
    """Say what the exit code of a preempted job means."""
    if code != REQUEUE:
        return f"exit code {code}: no checkpoint to go on from was seen; --checkpoint-dir says where they are"
    where = f" from {newest.path}" if newest is not None else ""
    return f"exit code {code}: run the same command again, and it goes on{where}"
