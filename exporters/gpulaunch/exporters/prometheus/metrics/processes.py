"""Metrics of the processes of each rank, as reported by the kernel."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of

PROCESSES: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_host_memory_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK, one_of("role", "trainer", "workers"), one_of("kind", "rss", "pss")),
        help="Host memory of a rank's process and of its descendants: resident (shared pages count in each process)"
        " and proportional (shared pages are divided, so that values can be summed).",
    ),
    Metric(
        name="gpulaunch_process_cpu_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK, one_of("role", "trainer", "workers"), one_of("mode", "user", "system")),
        help="CPU time of a rank's process and of its descendants, including those that have ended.",
    ),
    Metric(
        name="gpulaunch_process_runqueue_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            one_of("role", "trainer", "workers"),
        ),
        help="Time in which threads were runnable but waited for a core.",
    ),
    Metric(
        name="gpulaunch_process_busy_threads",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Threads of a rank, including its workers, that ran or waited for a core, averaged over the last second."
        " The node is oversubscribed if the sum over all ranks exceeds the number of cores.",
    ),
    Metric(
        name="gpulaunch_shm_inflight_bytes",
        kind=Kind.GAUGE,
        unit="bytes",
        labels=(RANK,),
        help="Shared memory of the batches that are in transit to this rank.",
    ),
)
