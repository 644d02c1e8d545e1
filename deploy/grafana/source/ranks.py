"""Which rank do the others wait for, and why?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import Expr, highest, lowest, median, number, spread, top, total
from source.overview import STEP, since_last_step
from source.parts import Json, figure, heat, lines, table
from source.promql import gauge, histogram_mean, info, rate

__all__ = ["ranks"]

OWN = ("data_wait", "h2d", "forward", "optimizer", "gc", "other")
"""Phases that a rank works in for itself, as the rule `straggler` has them; in the others it may wait for ranks."""
MEETING = ("backward", "comm", "sync")


def _in_a_step(*phases: str) -> Expr:
    """Seconds of a step that each rank spends in phases; nothing for one that makes no steps."""
    spent = total(rate("gpulaunch_phase_seconds_total", phase=phases), "rank")
    return spent.each(total(rate("gpulaunch_steps_total"), "rank") > 0)


def ranks() -> Json:
    """Make the dashboard."""
    own = _in_a_step(*OWN)
    behind = highest(gauge("gpulaunch_steps_total"), "rank")
    sequence = highest(gauge("gpulaunch_collective_sequence"), "rank")
    calls = "gpulaunch_collective_calls_total"
    return dashboard(
        "ranks",
        "Ranks",
        "Which rank do the others wait for, and why? Ranks that train together end every step together: the late one is"
        " the one that works longest by itself and waits least.",
        row(
            "Stragglers",
            figure(
                "Ranks with steps",
                "Ranks that have made a step lately.",
                (number(total(rate("gpulaunch_steps_total"), "rank") > 0), "ranks"),
                limit=limits.COUNT,
            ),
            figure(
                "Longest own work",
                "Seconds of a step that the rank with most of it works by itself, above the median rank.",
                (highest(own) - median(own), "above the median"),
                width=5,
                limit=limits.STRAGGLES,
            ),
            figure(
                "Of a step",
                "The same as a share of a step: what the job would gain if that rank were like the others.",
                ((highest(own) - median(own)) / histogram_mean(STEP), "of a step"),
                width=5,
                limit=limits.STRAGGLES_SHARE,
            ),
            figure(
                "Steps apart",
                "Steps between the first and the last rank. More than 1 where ranks train together: one is left.",
                (highest(behind) - lowest(behind), "steps"),
                width=5,
                limit=limits.APART,
            ),
            figure(
                "Inside of a collective",
                "Ranks whose training thread is inside of a collective call now. All but one, for long: look at that"
                " one.",
                (number(highest(gauge("gpulaunch_last_collective", state="running"), "rank")).or_zero(), "ranks"),
                width=5,
                limit=limits.COUNT,
            ),
            heat(
                "Own work in a step, by rank",
                "Seconds of a step in data_wait, h2d, forward, optimizer, gc and other: a warm row is the rank that the"
                " others wait for.",
                (own, "{{rank}}"),
                limit=limits.COMPARED,
            ),
            heat(
                "Where ranks meet: time in a step, by rank",
                "Seconds of a step in backward, comm and sync, which is work and waiting for other ranks: the straggler"
                " is the cold row.",
                (_in_a_step(*MEETING), "{{rank}}"),
                limit=limits.COMPARED,
            ),
            heat(
                "Step time by rank",
                "Mean time of a step. Ranks that train together all show the slowest one's; they differ where they do"
                " not wait for each other.",
                (histogram_mean(STEP, "rank"), "{{rank}}"),
                limit=limits.COMPARED,
            ),
            lines(
                "The five with most work of their own",
                "Seconds of a step above the median rank.",
                (top(5, own.above(median(own))), "rank {{rank}}"),
                signed=True,
                limit=limits.STRAGGLES,
            ),
            lines(
                "Why: the rank with most of each phase, above the median rank",
                "Seconds of a step. data_wait: its input; forward: its work or its GPU; gc: Python; other: what only it"
                " does between steps.",
                *(
                    (highest(_in_a_step(phase)) - median(_in_a_step(phase)), phase)
                    for phase in ("data_wait", "forward", "optimizer", "gc", "other")
                ),
                limit=limits.STRAGGLES,
            ),
        ),
        row(
            "Progress",
            lines(
                "Since the last step",
                "How long ago the last step of a rank ended: the five that are furthest behind; and how long a rank has"
                " not moved at all, where that is told.",
                (top(5, since_last_step()), "rank {{rank}}"),
                (top(5, highest(gauge("gpulaunch_rank_stalled_seconds"), "rank")), "rank {{rank}}, told"),
                limit=limits.NO_STEP,
            ),
            lines(
                "Steps behind",
                "Steps that a rank has made less than the first one: the five that are furthest behind.",
                (top(5, behind.below(highest(behind))), "rank {{rank}}"),
                limit=limits.APART,
            ),
            lines(
                "Collectives behind",
                "How far a rank's numbered collectives are behind the first rank's. It is told once a second, so ranks"
                " differ by a second's worth; one that stays behind is waited for.",
                (top(5, sequence.below(highest(sequence))), "rank {{rank}}"),
                limit=limits.COMPARED,
            ),
            lines(
                "Collectives not completed",
                "Collectives that a rank has begun and not completed: it grows where one hangs.",
                (
                    top(
                        5,
                        highest(gauge("gpulaunch_collectives_enqueued_total"), "rank")
                        - highest(gauge("gpulaunch_collectives_completed_total"), "rank"),
                    ),
                    "rank {{rank}}",
                ),
                limit=limits.COMPARED,
            ),
        ),
        row(
            "Waiting for each other",
            lines(
                "In collective calls",
                "Share of the time that the training thread stood in collective calls that it made itself.",
                *spread(total(rate("gpulaunch_comm_blocked_seconds_total"), "rank")),
                width=8,
                limit=limits.COMPARED,
            ),
            lines(
                "Collective calls",
                "Calls of the training threads of all ranks, by kind. DistributedDataParallel makes its own in C++:"
                " those are not here.",
                (total(rate(calls), "kind"), "{{kind}}"),
                (total(rate("gpulaunch_comm_calls_total")), "waited in"),
                width=8,
                limit=limits.PACE,
            ),
            lines(
                "Communication of DistributedDataParallel",
                "Seconds of one step, as it logged them last: all of it, and what backward did not hide. The highest of"
                " all ranks.",
                (highest(gauge("gpulaunch_ddp_comm_seconds")), "all"),
                (
                    highest(
                        highest(gauge("gpulaunch_ddp_comm_seconds"), "rank")
                        - highest(gauge("gpulaunch_ddp_overlap_seconds"), "rank")
                    ),
                    "exposed",
                ),
                width=8,
                limit=limits.PACE,
            ),
            table(
                "The last collective of each rank",
                "What the training thread called last, and whether it is inside of it still.",
                highest(gauge("gpulaunch_last_collective"), "rank", "kind", "state"),
                {"rank": "rank", "kind": "call", "state": "state"},
                limit=limits.LISTED,
            ),
            table(
                "Processes",
                "The process of each rank.",
                highest(info("gpulaunch_rank_info"), "rank", "local_rank", "pid", "instance"),
                {"rank": "rank", "local_rank": "on its node", "pid": "pid", "instance": "node"},
                limit=limits.LISTED,
            ),
        ),
        row(
            "Cores",
            lines(
                "Cores used",
                "CPU time of a rank's process and of all below it, dataloader workers included.",
                *spread(total(rate("gpulaunch_process_cpu_seconds_total"), "rank")),
                width=8,
                limit=limits.SIZE_CORES,
            ),
            lines(
                "Waiting for a core",
                "Time that threads of a rank were ready to run and had no core, by second: 2 are two threads that"
                " always wait.",
                *spread(total(rate("gpulaunch_process_runqueue_seconds_total"), "rank")),
                width=8,
                limit=limits.CORES,
            ),
            lines(
                "Threads and cores",
                "Threads of all ranks that ran or waited for a core, and the cores that they may use: more threads than"
                " cores is too many of them.",
                (total(gauge("gpulaunch_process_busy_threads")), "busy threads"),
                (total(gauge("gpulaunch_cpu_cores", state="allowed")), "cores"),
                (total(gauge("gpulaunch_cpu_cores", state="quota")), "quota"),
                width=8,
                limit=limits.DRAWN,
            ),
        ),
    )
