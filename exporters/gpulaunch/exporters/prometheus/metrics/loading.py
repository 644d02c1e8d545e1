"""Metrics of the dataloader of each rank, and of its workers."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.metrics.metric import RANK, Kind, Metric, one_of

LOADING: tuple[Metric, ...] = (
    Metric(
        name="gpulaunch_dataloader_batches_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Batches handed to the training loop.",
    ),
    Metric(
        name="gpulaunch_dataloader_eval_batches_total",
        kind=Kind.COUNTER,
        labels=(RANK,),
        help="Batches handed out while gradients were off: validation.",
    ),
    Metric(
        name="gpulaunch_dataloader_batch_bytes_total",
        kind=Kind.COUNTER,
        unit="bytes",
        labels=(RANK,),
        help="Bytes of the tensors in the batches handed out.",
    ),
    Metric(
        name="gpulaunch_dataloader_wait_seconds",
        kind=Kind.HISTOGRAM,
        unit="seconds",
        labels=(RANK,),
        help="How long the training loop waited for a batch.",
    ),
    Metric(
        name="gpulaunch_dataloader_transfer_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Waits for a batch that was ready: to unpickle, to map, to pin it.",
    ),
    Metric(
        name="gpulaunch_dataloader_reorder_blocked_seconds_total",
        kind=Kind.COUNTER,
        unit="seconds",
        labels=(RANK,),
        help="Waits for a batch while later ones were ready.",
    ),
    Metric(
        name="gpulaunch_dataloader_ready_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Batches ready when the training loop last asked for one; mostly 0: the loader is too slow.",
    ),
    Metric(
        name="gpulaunch_dataloader_outstanding_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Batches asked of the workers and not yet handed out.",
    ),
    Metric(
        name="gpulaunch_dataloader_reorder_blocked_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Finished batches that had to wait for an earlier one (see in_order of torch's DataLoader).",
    ),
    Metric(
        name="gpulaunch_dataloader_pin_backlog_batches",
        kind=Kind.GAUGE,
        labels=(RANK,),
        help="Batches delivered by workers and not yet by the thread that pins them.",
    ),
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
