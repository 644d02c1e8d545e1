"""Metrics of the profiler: its overhead, its health and its findings."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.channel.layout import PHASES, Hook
from gpulaunch.profiler.record import Collector

_RULE = one_of("rule", *(rule.id for rule in RULES))
_COLLECTOR = one_of("collector", *(collector.value for collector in Collector))
_PART = one_of("part", *((hook.name or "").lower() for hook in Hook))

PROFILER: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_profiler_overhead_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK, one_of("where", "trainer", "sidecar")),
        help="What measuring costs: time that the probe takes of each rank, CPU time of the sidecar (its rank empty).",
    ),
    Metric(
        name="gpulaunch_probe_part_unavailable",
        kind=Kind.GAUGE,
        labels=(RANK, _PART),
        help="1 for a part of the probe that is out of service: it does not fit this torch, or met a fault.",
    ),
    Metric(
        name="gpulaunch_stack_samples_total",
        kind=Kind.COUNTER,
        labels=(one_of("phase", "startup", *PHASES, "unsettled"),),
        help="Stacks of main threads of ranks that were sampled, by phase.",
    ),
    Metric(
        name="gpulaunch_finding_active",
        kind=Kind.GAUGE,
        labels=(_RULE,),
        help="1 for a rule that finds something now; docs/findings.md has a page for each, the report has the line.",
    ),
    Metric(
        name="gpulaunch_finding_lost_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(_RULE,),
        help="Share of training time that its largest finding costs.",
    ),
    Metric(
        name="gpulaunch_collector_available",
        kind=Kind.GAUGE,
        labels=(_COLLECTOR,),
        help="1 if this part of the sidecar delivers, 0 if it cannot; the sidecar's page says why.",
    ),
    Metric(
        name="gpulaunch_collector_errors_total",
        kind=Kind.COUNTER,
        labels=(_COLLECTOR,),
        help="Readings, or parts of readings, that failed.",
    ),
    Metric(
        name="gpulaunch_collector_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(_COLLECTOR,),
        help="Time spent collecting.",
    ),
    Metric(
        name="gpulaunch_sidecar_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        help="Resident memory of the sidecar.",
    ),
    Metric(
        name="gpulaunch_sidecar_refreshes_total",
        kind=Kind.COUNTER,
        help="Times that all collectors were read.",
    ),
    Metric(
        name="gpulaunch_sidecar_late_refreshes_total",
        kind=Kind.COUNTER,
        help="Refreshes that came a whole interval too late or more.",
    ),
    Metric(
        name="gpulaunch_sidecar_refresh_duration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long the last complete refresh took.",
    ),
    Metric(
        name="gpulaunch_sidecar_scrapes_total",
        kind=Kind.COUNTER,
        help="Times that this page was asked for.",
    ),
    Metric(
        name="gpulaunch_sidecar_render_duration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="How long this page took to write the last time it was written; it is written at most once a refresh.",
    ),
)
