"""Metrics of the processes of each rank, as reported by the kernel."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of

PROCESSES: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_host_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK, one_of("role", "trainer", "workers"), one_of("kind", "rss", "pss")),
        help="Host memory of a rank's process and of all processes below it: resident (shared pages counted in each)"
        " and proportional (shared pages divided, so that it may be added up).",
    ),
    Metric(
        name="gpulaunch_process_cpu_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK, one_of("role", "trainer", "workers"), one_of("mode", "user", "system")),
        help="CPU time of a rank's process and of all processes below it, those that have ended included.",
    ),
    Metric(
        name="gpulaunch_process_runqueue_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            one_of("role", "trainer", "workers"),
        ),
        help="Time that threads were ready to run and had no core.",
    ),
    Metric(
        name="gpulaunch_process_busy_threads",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Threads of a rank, workers included, that ran or waited for a core, on average over the last second."
        " Over all ranks more than the cores: oversubscribed.",
    ),
    Metric(
        name="gpulaunch_shm_inflight_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK,),
        help="Shared memory that carries batches to this rank now.",
    ),
)
