"""What does measuring cost, and does it work?"""

from __future__ import annotations

from source import limits
from source.board import dashboard, row
from source.expr import highest, number, spread, total
from source.overview import stepping_s
from source.parts import Json, figure, lines, table
from source.promql import gauge, info, rate

from gpulaunch.profiler.record import Collector

__all__ = ["cost"]

ELSEWHERE = tuple(each.value for each in Collector if each not in (Collector.GPU, Collector.DEVICE))


def cost() -> Json:
    """Make the dashboard."""
    overhead = "gpulaunch_profiler_overhead_seconds_total"
    inside = total(rate(overhead, where="trainer"), "rank") / stepping_s("rank")
    budget = highest(gauge("gpulaunch_probe_budget_ratio"), "rank")
    return dashboard(
        "cost",
        "The profiler's own cost",
        "What does measuring cost the job, and does it work?",
        row(
            "What does it cost training?",
            figure(
                "Inside of the ranks",
                "Time that the probe takes, of the time of steps: the rank with most of it.",
                (highest(inside), "of a step"),
                limit=limits.BUDGET,
            ),
            figure(
                "Cores of the sidecars",
                "CPU time of a sidecar by second; the node where it takes most. The limit is for 8 ranks on a node: for"
                " more it may take more.",
                (highest(total(rate(overhead, where="sidecar"), "instance")), "cores"),
                limit=limits.SIDECAR_CORES,
            ),
            figure(
                "Memory of the sidecars",
                "Resident memory of a sidecar; the node where it has most. The limit is for 8 ranks on a node.",
                (highest(gauge("gpulaunch_sidecar_memory_bytes")), "resident"),
                limit=limits.SIDECAR_BYTES,
            ),
            figure(
                "Collectors out of service",
                "Parts of the sidecars that do not deliver, without those for GPUs, which a machine may well lack.",
                (number(gauge("gpulaunch_collector_available", collector=ELSEWHERE) <= 0).or_zero(), "collectors"),
                limit=limits.ONCE,
            ),
            lines(
                "Time inside the probe",
                "Share of the time of steps, by rank, and the budget: past it, not all steps are observed.",
                *spread(inside),
                (highest(budget), "budget"),
                limit=limits.BUDGET,
            ),
            lines(
                "Steps not observed",
                "Share of the steps: none, unless observing all of them would exceed the budget.",
                (
                    total(rate("gpulaunch_unobserved_steps_total")) / total(rate("gpulaunch_steps_total")),
                    "not observed",
                ),
                limit=limits.HISTORY,
            ),
        ),
        row(
            "Does it work?",
            table(
                "Collectors out of service",
                "The sidecar's own page says why. Without a GPU, gpu and device are here: that is as it should be.",
                highest(gauge("gpulaunch_collector_available"), "instance", "collector") <= 0,
                {"instance": "node", "collector": "collector"},
                width=8,
                limit=limits.FAULTS,
            ),
            table(
                "Parts of the probe out of service",
                "They do not fit this torch, or met a fault. Empty: none.",
                highest(gauge("gpulaunch_probe_part_unavailable"), "rank", "part"),
                {"rank": "rank", "part": "part"},
                width=8,
                limit=limits.FAULTS,
            ),
            lines(
                "Time of collecting",
                "Seconds by second, of all sidecars, by collector.",
                (total(rate("gpulaunch_collector_seconds_total"), "collector"), "{{collector}}"),
                stacked=True,
                limit=limits.TOTALS_COST,
            ),
            lines(
                "Errors of collectors",
                "Readings, or parts of readings, that failed, by second.",
                (total(rate("gpulaunch_collector_errors_total"), "collector"), "{{collector}}"),
                limit=limits.ERRORS,
            ),
            lines(
                "Refreshes",
                "Times that all collectors were read, and those that came a whole interval too late; of all sidecars.",
                (total(rate("gpulaunch_sidecar_refreshes_total")), "refreshes"),
                (total(rate("gpulaunch_sidecar_late_refreshes_total")), "too late"),
                (total(rate("gpulaunch_sidecar_scrapes_total")), "scrapes"),
                limit=limits.PACE_SIDECAR,
            ),
            lines(
                "Time of a refresh",
                "How long the last refresh took, and writing the page of metrics; the slowest sidecar.",
                (highest(gauge("gpulaunch_sidecar_refresh_duration_seconds")), "refresh"),
                (highest(gauge("gpulaunch_sidecar_render_duration_seconds")), "page"),
                limit=limits.REFRESH,
            ),
            lines(
                "Stacks sampled",
                "Stacks of main threads of ranks, by phase: what flame graphs are made of.",
                (total(rate("gpulaunch_stack_samples_total"), "phase"), "{{phase}}"),
                limit=limits.PACE_STACKS,
            ),
            table(
                "Versions",
                "Of gpulaunch, and of the Python that its sidecars run on.",
                highest(info("gpulaunch_build_info"), "instance", "version", "python"),
                {"instance": "node", "version": "gpulaunch", "python": "Python"},
                limit=limits.LISTED,
            ),
        ),
    )
