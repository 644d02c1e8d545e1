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
        help="Overhead of the profiler: time that the probe adds to each rank, and CPU time of the sidecar (empty"
        " rank).",
    ),
    Metric(
        name="gpulaunch_probe_part_unavailable",
        kind=Kind.GAUGE,
        labels=(RANK, _PART),
        help="1 if a part of the probe is unavailable: it is incompatible with this torch, or has failed.",
    ),
    Metric(
        name="gpulaunch_stack_samples_total",
        kind=Kind.COUNTER,
        labels=(one_of("phase", "startup", *PHASES, "unsettled"),),
        help="Sampled stacks of the ranks' main threads, by phase.",
    ),
    Metric(
        name="gpulaunch_finding_active",
        kind=Kind.GAUGE,
        labels=(_RULE,),
        help="1 if a rule has an active finding; docs/findings.md describes the rules, and the report has the line.",
    ),
    Metric(
        name="gpulaunch_finding_lost_ratio",
        kind=Kind.GAUGE,
        unit="ratio",
        labels=(_RULE,),
        help="Share of training time lost to the rule's largest finding.",
    ),
    Metric(
        name="gpulaunch_collector_available",
        kind=Kind.GAUGE,
        labels=(_COLLECTOR,),
        help="1 if this collector of the sidecar works, 0 if not; the sidecar's page shows the reason.",
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
        help="Refreshes of all collectors.",
    ),
    Metric(
        name="gpulaunch_sidecar_late_refreshes_total",
        kind=Kind.COUNTER,
        help="Refreshes that were late by at least one interval.",
    ),
    Metric(
        name="gpulaunch_sidecar_refresh_duration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Duration of the last complete refresh.",
    ),
    Metric(
        name="gpulaunch_sidecar_scrapes_total",
        kind=Kind.COUNTER,
        help="Scrapes of this endpoint.",
    ),
    Metric(
        name="gpulaunch_sidecar_render_duration_seconds",
        kind=Kind.GAUGE,
        unit="seconds",
        help="Duration of the last rendering of this page, which is rendered at most once per refresh.",
    ),
)
