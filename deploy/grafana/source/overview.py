"""Is the job healthy, how fast is it, and what holds it back?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import Expr, highest, lowest, mean, number, since, total
from source.parts import Json, bars, figure, lines, table
from source.promql import gauge, histogram_mean, increase, info, quantile, rate, seconds_counted

__all__ = ["overview", "since_last_step", "stepping_s"]

STEP = "gpulaunch_step_duration_seconds"


def stepping_s(*by: str) -> Expr:
    """The time that ranks spend in steps: what shares of a step are shares of. Without steps there are none."""
    return seconds_counted(STEP, *by) > 0


def since_last_step() -> Expr:
    """By rank."""
    return since(highest(gauge("gpulaunch_last_step_timestamp_seconds"), "rank"))


def overview() -> Json:
    """Make the dashboard."""
    phases = total(rate("gpulaunch_phase_seconds_total"), "phase")
    goodput = "gpulaunch_goodput_seconds_total"
    return dashboard(
        "overview",
        "Overview",
        "Is the job healthy, how fast is it, and what holds it back? Start here.",
        row(
            "Is it healthy?",
            figure(
                "Ranks observed",
                "Ranks in which the probe measures. Fewer than the run has: a rank has not imported torch, or a node is"
                " not scraped.",
                (number(highest(gauge("gpulaunch_probe_armed"), "rank") > 0), "ranks"),
                limit=limits.COUNT,
            ),
            figure(
                "Longest since a step",
                "How long ago the rank that is furthest behind ended its last step. It grows without end: a hang.",
                (highest(since_last_step()), "seconds"),
                limit=limits.NO_STEP,
            ),
            figure(
                "Restarts",
                "How often the ranks were started again in this run, whatever the cause. Several nodes all count the"
                " same restarts: it is the highest of theirs.",
                (total(highest(gauge("gpulaunch_restarts_total"), "kind")).or_zero(), "restarts"),
                limit=limits.RESTARTS,
            ),
            figure(
                "Hangs",
                "How often the ranks were found to hang in this run.",
                (highest(gauge("gpulaunch_hangs_total")), "hangs"),
                limit=limits.FAULT,
            ),
            figure(
                "Goodput",
                "Share of the time looked at that went into steps which counted; the rest is start-up, lost work,"
                " restarts, waiting for checkpoints.",
                (total(increase(goodput, bucket="productive")) / total(increase(goodput)), "productive"),
                limit=limits.GOODPUT,
            ),
            figure(
                "Asked to end",
                "1 from the moment that the run was asked to save and to end: a preemption, a time limit.",
                (highest(gauge("gpulaunch_preempted")), "preempted"),
                limit=limits.ONCE,
            ),
        ),
        row(
            "How fast is it?",
            lines(
                "Steps per second",
                "Optimizer steps of the slowest and the fastest rank. Where ranks train together the two are the same.",
                (lowest(rate("gpulaunch_steps_total")), "slowest rank"),
                (highest(rate("gpulaunch_steps_total")), "fastest rank"),
                width=8,
                limit=limits.PACE,
            ),
            lines(
                "Samples per second",
                "Samples that all ranks together took from their dataloaders, where the batch size is known.",
                (total(rate("gpulaunch_samples_total")), "samples"),
                width=8,
                limit=limits.PACE,
            ),
            lines(
                "Step time",
                "Of all ranks together. The 95th and 99th percentile come from the buckets of a histogram: they are as"
                " exact as those are fine.",
                (histogram_mean(STEP), "mean"),
                (quantile(0.5, STEP), "50 %"),
                (quantile(0.95, STEP), "95 %"),
                (quantile(0.99, STEP), "99 %"),
                width=8,
                limit=limits.PACE,
            ),
            lines(
                "Steps that did not count",
                "Share of the steps whose optimizer was not called, as a gradient scaler does after an overflow.",
                (total(rate("gpulaunch_skipped_steps_total")) / total(rate("gpulaunch_steps_total")), "skipped"),
                width=8,
                limit=limits.PAUSES,
            ),
            lines(
                "Backward passes in a step",
                "More than 1 where gradients are accumulated.",
                (total(rate("gpulaunch_microsteps_total")).each(total(rate("gpulaunch_steps_total"))), "passes"),
                width=8,
                limit=limits.COUNT,
            ),
            table(
                "What a step is counted by",
                "The signal that ends a step in each rank: mostly the optimizer.",
                highest(gauge("gpulaunch_step_source"), "rank", "source"),
                {"rank": "rank", "source": "signal"},
                width=8,
                limit=limits.LISTED,
            ),
        ),
        row(
            "What holds it back?",
            lines(
                "Where the time of a step goes",
                "Phases by the host's clock, as shares of all steps of all ranks. data_wait: the dataloader is too"
                " slow. comm: ranks wait for each other. sync: the program waits for the GPU.",
                (phases.over(stepping_s()), "{{phase}}"),
                stacked=True,
                most=1,
                limit=limits.PARTS,
            ),
            bars(
                "What was found, and what it costs",
                "Share of training time that each finding costs, the largest of each rule. None: nothing is found. The"
                " run's report has the lines of the program.",
                (highest(gauge("gpulaunch_finding_lost_ratio"), "rule"), "{{rule}}"),
                limit=limits.LOST,
            ),
            lines(
                "Waiting for data",
                "Share of the steps' time that the training loop waited for a batch: the rank with most of it, and all"
                " ranks.",
                (
                    highest(
                        total(rate("gpulaunch_phase_seconds_total", phase="data_wait"), "rank") / stepping_s("rank")
                    ),
                    "worst rank",
                ),
                (total(rate("gpulaunch_phase_seconds_total", phase="data_wait")) / stepping_s(), "all ranks"),
                width=8,
                limit=limits.DATA,
            ),
            lines(
                "Pauses",
                "Share of the time that all ranks stood still for Python's garbage collection and for compilations.",
                (mean(rate("gpulaunch_gc_seconds_total")), "garbage collection"),
                (mean(rate("gpulaunch_compile_seconds_total")), "compilation"),
                width=8,
                limit=limits.PAUSES,
            ),
            lines(
                "How often",
                "Runs of Python's garbage collector, and compilations by torch.compile: those that never stop are"
                " recompilations.",
                (total(rate("gpulaunch_gc_collections_total")), "garbage collections"),
                (total(rate("gpulaunch_compiles_total")), "compilations"),
                width=8,
                limit=limits.PACE,
            ),
            table(
                "Found now",
                "Rules that find something now; docs/findings.md has a page for each.",
                highest(gauge("gpulaunch_finding_active"), "rule", "instance"),
                {"rule": "rule", "instance": "node"},
                limit=limits.FAULTS,
            ),
            table(
                "The run",
                "Name, size and nodes of the run that is looked at, and its version of gpulaunch.",
                highest(info("gpulaunch_run_info"), "name", "run", "world_size", "node_rank", "instance"),
                {"name": "name", "run": "run", "world_size": "ranks", "node_rank": "node", "instance": "address"},
                limit=limits.LISTED,
            ),
        ),
        row(
            "GPUs",
            lines(
                "GPU use",
                "Multiprocessors that had work (Hopper and newer), beside the driver's utilization, which is 1 as soon"
                " as any kernel runs, however small.",
                (mean(gauge("gpulaunch_gpu_sm_active_ratio")), "multiprocessors"),
                (mean(gauge("gpulaunch_gpu_utilization_ratio")), "utilization"),
                most=1,
                limit=limits.IDLE,
            ),
            lines(
                "Waiting for the GPU",
                "Share of the time that programs stood still for copies and for syncs, the rank with most of it.",
                (highest(total(rate("gpulaunch_copy_blocked_seconds_total"), "rank")), "copies"),
                (highest(total(rate("gpulaunch_sync_blocked_seconds_total"), "rank")), "syncs"),
                limit=limits.STANDING,
            ),
            gpu=True,
        ),
    )
