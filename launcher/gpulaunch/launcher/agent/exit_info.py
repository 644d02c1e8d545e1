"""Collects how one rank ended: what the kernel reports, what the rank left behind, and what is visible from outside."""

from __future__ import annotations

import os
import signal
import time

from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.failure.ends import RankEnd
from gpulaunch.launcher.failure.evidence import RankEvidence, read_rank_evidence, shm_evidence
from gpulaunch.launcher.failure.kernel_log import xid_evidence, xids
from gpulaunch.launcher.gpus import health
from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.loop.loop import Exit


def rank_end_of(
    context: RunContext,
    exit_: Exit,
    *,
    rank: int,
    local_rank: int,
    directory: str,
    stopped: bool,
    deaf: bool,
    hang: str,
    hung_s: float | None,
) -> RankEnd:
    """Gather everything about a rank that has just been reaped.

    `directory`: its own files; `stopped`: the attempt was being ended; `deaf`: it had no handler for the signal that
    asked it to end; `hang`, `hung_s`: why it was considered hung, and since when; or "" and any value.
    """
    ok = exit_.code == 0
    words = RankEvidence(error=None, fault=None, evidence=()) if ok else read_rank_evidence(directory)
    if deaf and exit_.code and words.error is None:
        stopped = False  # a signal without a handler cannot cause an exit code: the rank exited by itself
    outside = () if stopped or ok else _evidence_from_outside(context, local_rank, exit_)
    return RankEnd(
        rank=rank,
        local_rank=local_rank,
        pid=exit_.pid,
        host=os.uname().nodename,
        code=exit_.code,
        signal=exit_.signal,
        at_s=exit_.at_s,
        wall_time_s=time.time(),
        stopped=stopped and not hang,
        error=words.error,
        tail=tuple(context.hub.tail(rank, Std.ERR) or context.hub.tail(rank, Std.OUT)),
        fault=words.fault,
        evidence=(*words.evidence, *outside),
        hang=hang,
        hung_s=hung_s if hang else None,
    )


def _evidence_from_outside(context: RunContext, local_rank: int, exit_: Exit) -> tuple[str, ...]:
    # The kernel may have killed a dataloader worker: its rank then ends with an exception.
    facts = (
        context.oom.evidence(exit_.pid),
        shm_evidence() if exit_.signal == signal.SIGBUS else None,
        xid_evidence(xids(context.oom.log.text())),
        _card_fault(context, local_rank),
    )
    return tuple(fact for fact in facts if fact)


def _card_fault(context: RunContext, local_rank: int) -> str:
    """The sidecar's report on this rank's GPU."""
    cards, segments = context.spec.cards, context.segments
    if local_rank >= len(cards) or segments is None:
        return ""
    index = cards[local_rank].index
    return next((health.fault(card) for card in health.read(segments.directory) if card.index == index), "")
