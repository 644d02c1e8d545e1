"""Metrics of the dataloader of each rank, and of its workers."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.declared import declared
from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of
from gpulaunch.profiler.channel.quantities import LoaderState

LOADING: tuple[Metric, ...] = (
    *declared(LoaderState),
    Metric(
        name="gpulaunch_dataloader_workers",
        kind=Kind.GAUGE,
        labels=(RANK, one_of("state", "configured", "alive")),
        help="DataLoader workers: configured, and processes that are alive.",
    ),
    Metric(
        name="gpulaunch_dataloader_worker_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            one_of("state", "prep", "contention", "blocked"),
        ),
        help="Time that all workers of a rank spent in fetches: on a core (prep), waiting for a core (contention), or"
        " waiting for anything else (blocked). If the kernel does not count waits for a core, they are included in"
        " blocked.",
    ),
    Metric(
        name="gpulaunch_dataloader_worker_collate_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Time that all workers of a rank spent on collating samples into batches.",
    ),
    Metric(
        name="gpulaunch_dataloader_worker_read_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            RANK,
            one_of("source", "storage", "cache"),
        ),
        help="Bytes read by workers from a device or a network file system (storage), or from memory (cache).",
    ),
)
