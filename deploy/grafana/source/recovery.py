"""What did failures cost, and what would one cost now?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import highest, lowest, total
from source.overview import stepping_s
from source.parts import Json, bars, figure, lines
from source.promql import gauge, increase, rate

__all__ = ["recovery"]

GOODPUT = "gpulaunch_goodput_seconds_total"


def recovery() -> Json:
    """Make the dashboard."""
    saving = total(rate("gpulaunch_phase_seconds_total", phase="checkpoint"), "rank")
    ours = total(rate("gpulaunch_checkpoint_stall_seconds_total"), "rank")
    return dashboard(
        "recovery",
        "Recovery and goodput",
        "What did failures cost, and what would one cost now?",
        row(
            "What did they cost?",
            figure(
                "Goodput",
                "Share of the time looked at that went into steps which counted.",
                (total(increase(GOODPUT, bucket="productive")) / total(increase(GOODPUT)), "productive"),
                limit=limits.GOODPUT,
            ),
            figure(
                "Attempt",
                "The running attempt, counted from 0.",
                (highest(gauge("gpulaunch_attempt")), "attempt"),
                limit=limits.RESTARTS,
            ),
            figure(
                "Lost work",
                "Time looked at that went into steps done again, where it is seen what a program goes on from.",
                (total(increase(GOODPUT, bucket="lost_work")), "lost"),
                limit=limits.HISTORY_SHARE,
            ),
            figure(
                "Hangs",
                "Hangs in this run.",
                (highest(gauge("gpulaunch_hangs_total")), "hangs"),
                limit=limits.FAULT,
            ),
            figure(
                "A failure now would cost",
                "Since the state in the newest checkpoint was taken: all of it would have to be done again. No data: no"
                " checkpoint yet, or none that gpulaunch.checkpoint made.",
                (highest(gauge("gpulaunch_checkpoint_age_seconds")), "age"),
                limit=limits.UNSAVED,
            ),
            figure(
                "Asked to end",
                "1 from the moment that the run was asked to save and to end.",
                (highest(gauge("gpulaunch_preempted")), "preempted"),
                limit=limits.ONCE,
            ),
            lines(
                "Where the time goes",
                "Share of the agents' time by bucket. Steps that must be done again are lost work, and productive"
                " stands still until they are made up for.",
                (total(rate(GOODPUT), "bucket").over(total(rate(GOODPUT))), "{{bucket}}"),
                stacked=True,
                most=1,
                limit=limits.PARTS_GOODPUT,
            ),
            bars(
                "Where the time has gone",
                "Seconds of all agents since the run began, by bucket.",
                (total(gauge(GOODPUT), "bucket"), "{{bucket}}"),
                limit=limits.PARTS_GOODPUT,
            ),
            lines(
                "Attempts",
                "Every step up is a restart of the ranks.",
                (highest(gauge("gpulaunch_attempt")), "attempt"),
                width=8,
                limit=limits.RESTARTS,
            ),
            bars(
                "Restarts by cause",
                "What ended the attempts before. None: no restart.",
                (highest(gauge("gpulaunch_restarts_total"), "kind"), "{{kind}}"),
                width=8,
                limit=limits.RESTARTS,
            ),
            lines(
                "Hangs",
                "Times that ranks stood still for longer than is usual, and those of them that were proven to be hangs"
                " or lasted for --hang-timeout.",
                (highest(gauge("gpulaunch_hang_suspicions_total")), "told"),
                (highest(gauge("gpulaunch_hangs_total")), "hangs"),
                width=8,
                limit=limits.FAULT,
            ),
        ),
        row(
            "Checkpoints (of gpulaunch.checkpoint; of one saved by other means only the time that it took is here)",
            figure(
                "Newest",
                "Step of the newest checkpoint committed; the rank that is furthest behind.",
                (lowest(gauge("gpulaunch_checkpoint_step")), "step"),
                width=6,
                limit=limits.HISTORY,
            ),
            figure(
                "Went on from",
                "The step that the ranks went on from in the running attempt. No data: from nothing.",
                (highest(gauge("gpulaunch_resumed_step")), "step"),
                width=6,
                limit=limits.HISTORY,
            ),
            figure(
                "Failed saves",
                "Saves that came to nothing in this run; training went on.",
                (total(gauge("gpulaunch_checkpoint_failures_total")), "failures"),
                width=6,
                limit=limits.FAULT,
            ),
            figure(
                "Standing still for saves",
                "Share of the steps' time, the rank with most of it, whoever saves.",
                (highest(saving / stepping_s("rank")), "of the step"),
                width=6,
                limit=limits.SAVING,
            ),
            lines(
                "Checkpoints",
                "Committed in this run, and saves that came to nothing; the rank with most of either.",
                (highest(gauge("gpulaunch_checkpoint_saves_total")), "committed"),
                (highest(gauge("gpulaunch_checkpoint_failures_total")), "failed"),
                width=6,
                limit=limits.HISTORY_SAVES,
            ),
            lines(
                "Written",
                "Into checkpoints that were committed, by all ranks.",
                (total(rate("gpulaunch_checkpoint_bytes_total")), "written"),
                width=6,
                limit=limits.PACE,
            ),
            lines(
                "Age of the newest",
                "Since the state in it was taken; the node where it is oldest.",
                (highest(gauge("gpulaunch_checkpoint_age_seconds")), "age"),
                width=6,
                limit=limits.UNSAVED,
            ),
            lines(
                "Standing still for saves, by whose",
                "Share of the steps' time, the rank with most of it: for all saves, and for those of"
                " gpulaunch.checkpoint.",
                (highest(saving / stepping_s("rank")), "all"),
                (highest(ours / stepping_s("rank")), "gpulaunch.checkpoint"),
                width=6,
                limit=limits.SAVING,
            ),
        ),
    )
