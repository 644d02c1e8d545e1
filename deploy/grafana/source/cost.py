"""What does measuring cost, and does it work?"""

from __future__ import annotations

from source.board import dashboard, row
from source.expr import highest, mean, number, spread, top, total
from source.overview import STEP, stepping_s
from source.parts import BAD, WARN, Json, figure, lines, table
from source.promql import gauge, histogram_mean, info, rate

__all__ = ["cost"]


def cost() -> Json:
    """Make the dashboard."""
    overhead = "gpulaunch_profiler_overhead_seconds_total"
    inside = total(rate(overhead, where="trainer"), "rank") / stepping_s("rank")
    longer = highest(gauge("gpulaunch_probe_step_cost_seconds"), "rank")
    off = highest(gauge("gpulaunch_probe_step_cost_error_seconds"), "rank")
    budget = highest(gauge("gpulaunch_probe_budget_ratio"), "rank")
    return dashboard(
        "cost",
        "The profiler's own cost",
        "What does measuring cost the job, and does it work?",
        row(
            "What does it cost training?",
            figure(
                "Inside of the ranks",
                "Time inside the probe, of the time of steps: the rank with most of it.",
                (highest(inside), "of a step"),
                limits=((0.005, WARN), (0.01, BAD)),
            ),
            figure(
                "Longer steps",
                "By how much a step with the probe is longer than one without, as a share of it: the median rank. Below"
                " zero: it cannot be told from chance.",
                (mean(longer) / histogram_mean(STEP), "of a step"),
                limits=((0.005, WARN), (0.01, BAD)),
            ),
            figure(
                "Cores of the sidecars",
                "CPU time of all sidecars, by second.",
                (total(rate(overhead, where="sidecar")), "cores"),
            ),
            figure(
                "Memory of the sidecars",
                "Resident memory, all of them.",
                (total(gauge("gpulaunch_sidecar_memory_bytes")), "resident"),
            ),
            figure(
                "Parts switched off",
                "Parts of the probe that were switched off for their price, in any rank.",
                (number(gauge("gpulaunch_probe_part_shed")).or_zero(), "parts"),
                limits=((1, WARN),),
            ),
            figure(
                "Collectors out of service",
                "Parts of the sidecars that do not deliver. Those for GPUs count where there is no GPU.",
                (number(gauge("gpulaunch_collector_available") <= 0).or_zero(), "collectors"),
            ),
            lines(
                "Time inside the probe",
                "Share of the time of steps, by rank, and the budget: past it, parts of the probe are switched off.",
                *spread(inside),
                (highest(budget), "budget"),
            ),
            lines(
                "By how much steps are longer",
                "Seconds, measured against steps without the probe: the median of the comparisons, and its standard"
                " error. The five ranks with most of it.",
                (top(5, longer), "rank {{rank}}"),
                (highest(off), "error at most"),
                signed=True,
            ),
            lines(
                "Steps without the probe",
                "Share of the steps that were made without it, to compare the others with.",
                (
                    total(rate("gpulaunch_unobserved_steps_total")) / total(rate("gpulaunch_steps_total")),
                    "without",
                ),
            ),
            lines(
                "Comparisons",
                "That the figures above are of, in the running attempt.",
                *spread(highest(gauge("gpulaunch_probe_pairs"), "rank")),
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
            ),
            table(
                "Parts of the probe out of service",
                "They do not fit this torch, or met a fault. Empty: none.",
                highest(gauge("gpulaunch_probe_part_unavailable"), "rank", "part"),
                {"rank": "rank", "part": "part"},
                width=8,
            ),
            table(
                "Parts switched off for their price",
                "Empty: none.",
                highest(gauge("gpulaunch_probe_part_shed"), "rank", "part"),
                {"rank": "rank", "part": "part"},
                width=8,
            ),
            lines(
                "Time of collecting",
                "Seconds by second, of all sidecars, by collector.",
                (total(rate("gpulaunch_collector_seconds_total"), "collector"), "{{collector}}"),
                stacked=True,
            ),
            lines(
                "Errors of collectors",
                "Readings, or parts of readings, that failed, by second.",
                (total(rate("gpulaunch_collector_errors_total"), "collector"), "{{collector}}"),
            ),
            lines(
                "Refreshes",
                "Times that all collectors were read, and those that came a whole interval too late; of all sidecars.",
                (total(rate("gpulaunch_sidecar_refreshes_total")), "refreshes"),
                (total(rate("gpulaunch_sidecar_late_refreshes_total")), "too late"),
                (total(rate("gpulaunch_sidecar_scrapes_total")), "scrapes"),
            ),
            lines(
                "Time of a refresh",
                "How long the last refresh took, and writing the page of metrics; the slowest sidecar.",
                (highest(gauge("gpulaunch_sidecar_refresh_duration_seconds")), "refresh"),
                (highest(gauge("gpulaunch_sidecar_render_duration_seconds")), "page"),
            ),
            lines(
                "Stacks sampled",
                "Stacks of main threads of ranks, by phase: what flame graphs are made of.",
                (total(rate("gpulaunch_stack_samples_total"), "phase"), "{{phase}}"),
            ),
            table(
                "Versions",
                "Of gpulaunch, and of the Python that its sidecars run on.",
                highest(info("gpulaunch_build_info"), "instance", "version", "python"),
                {"instance": "node", "version": "gpulaunch", "python": "Python"},
            ),
        ),
    )
