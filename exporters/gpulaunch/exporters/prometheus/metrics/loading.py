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
        help="Dataloader workers: as the loader was told, and processes that live now.",
    ),
    Metric(
        name="gpulaunch_dataloader_worker_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(
            RANK,
            one_of("state", "prep", "contention", "blocked"),
        ),
        help="Time inside of fetches of all workers of a rank: on a core (prep), waiting for one (contention),"
        " waiting for anything else (blocked). Where the kernel does not count waiting for a core, it is in blocked.",
    ),
    Metric(
        name="gpulaunch_dataloader_worker_collate_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Of that time, making a batch of samples.",
    ),
    Metric(
        name="gpulaunch_dataloader_worker_read_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(
            RANK,
            one_of("source", "storage", "cache"),
        ),
        help="What workers read: from a device or a network file system, or from memory.",
    ),
)
