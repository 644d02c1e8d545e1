"""How a job or an attempt ended: which rank is to blame, the exit code, and the messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulaunch.launcher.agent.events import Outcome
from gpulaunch.launcher.checkpoint.find import Checkpoint
from gpulaunch.launcher.failure import blame as blames
from gpulaunch.launcher.failure.blame import Blame
from gpulaunch.launcher.failure.causes import Tier
from gpulaunch.launcher.failure.classify import Kind, mentions_peer, raised_before
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
    """That signal means: save and end, the job will be run again."""
    resumable: bool = False
    """There is a checkpoint, or a rank has reported by its exit code that it has saved."""
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
        """The name of the signal that ended the job, or ""; the failure of a rank before it takes precedence."""
        stopped = self.outcome is Outcome.SIGNAL or (self.preempted and self.exit_code in (REQUEUE, 128 + self.signum))
        return signal_name(self.signum) if stopped else ""


def blame_of(ends: Sequence[RankEnd], told_s: float | None = None) -> Blame | None:
    """Name the first cause of an attempt; None if every rank ended on request: nothing failed here.

    `told_s`: when the ranks were asked to end because of another node, None if they were not.
    """
    failed = [end for end in ends if end.code != 0]
    by_itself = any(not end.stopped or raised_before(end, told_s) for end in failed)
    return blames.blame(ends, told_s) if by_itself else None


def tier_of(blame: Blame | None) -> Tier:
    """How much of the failure it explains."""
    if blame is None:
        return Tier.NONE
    if blame.kind is Kind.PEER:
        return Tier.ECHO
    if blame.kind is Kind.EARLY_EXIT_0:
        return Tier.LEFT
    return Tier.DOUBTFUL if mentions_peer(blame.first) else Tier.OWN


def reason_for_peers(*, signum: int, blame: Blame | None, hang: str, decision: Decision | None, error: str) -> str:
    """Say in one line, for the other nodes, what ended the attempt here.

    Args:
        signum: the signal that the launcher was sent, 0 for none.
        blame: of the ranks that have ended so far.
        hang: why ranks are judged to hang, or "".
        decision: of the restart policy, if it was asked.
        error: what went wrong outside of the ranks, or "".
    """
    if signum:
        return f"asked to end by {signal_name(signum)}"
    not_again = f"; not restarted: {decision.why}" if decision is not None and decision.why else ""
    if hang:
        return f"the ranks hang: {hang}{not_again}"
    if blame is not None:
        return headline(blame) + not_again
    return error


def preempted_line(newest: Checkpoint | None, code: int) -> str:
    """Say what the exit code of a preempted job means."""
    if code != REQUEUE:
        return f"exit code {code}: no checkpoint to resume from was found; specify its directory with --checkpoint-dir"
    where = f" from {newest.path}" if newest is not None else ""
    return f"exit code {code}: run the same command again to resume{where}"
