"""Converts the state of one rank into samples: training loop, processes, dataloader workers, probe overhead."""

from __future__ import annotations

from gpulaunch.exporters.prometheus.families import Sink
from gpulaunch.profiler.channel.declare import quantities_of
from gpulaunch.profiler.channel.layout import STEP_BOUNDS_S
from gpulaunch.profiler.record import (
    LoaderWorkers,
    RankCollectives,
    RankProcesses,
    TrainingState,
)

_NS_PER_S = 1e9


def put_training(out: Sink, training: TrainingState, *, wall_minus_monotonic_ns: int) -> None:
    """Put the training loop of a rank; the difference converts monotonic time to wall time."""
    rank = str(training.rank)
    out.put("gpulaunch_probe_armed", training.armed, rank=rank)
    put_quantities(out, training, rank=rank)
    if training.step_source is not None:
        out.put("gpulaunch_step_source", 1, rank=rank, source=training.step_source)
    if training.gpu_time is not None:
        put_quantities(out, training.gpu_time, rank=rank)
    if training.last_step_monotonic_ns is not None:
        wall_ns = training.last_step_monotonic_ns + wall_minus_monotonic_ns
        # The two clocks are read a moment apart at every refresh: rounded to whole ms, the time of an unchanged step
        # stays unchanged.
        out.put("gpulaunch_last_step_timestamp_seconds", round(wall_ns / _NS_PER_S, 3), rank=rank)
    if training.loader is not None:
        knows_queue = "loader_queue" not in training.hooks_unavailable
        put_quantities(out, training.loader, rank=rank, gauges=knows_queue)
    if training.gpu is not None:
        put_quantities(out, training.gpu, rank=rank)
    if training.checkpoint is not None:
        put_quantities(out, training.checkpoint, rank=rank)
    for (direction, host_memory), copies in training.copies.items():
        put_quantities(out, copies, rank=rank, direction=direction, host_memory=host_memory)
    for kind, syncs in training.syncs.items():
        put_quantities(out, syncs, rank=rank, kind=kind)
    if "nested" not in training.hooks_unavailable:
        put_quantities(out, training.pauses, rank=rank)
    for part in training.hooks_unavailable:
        out.put("gpulaunch_probe_part_unavailable", 1, rank=rank, part=part)


def put_quantities(out: Sink, record: object, *, gauges: bool = True, **labels: str) -> None:
    """Put the metrics of a record of quantities.

    Args:
        out: takes them.
        record: the record.
        gauges: False: only those of counters.
        labels: of all of them.
    """
    for each in quantities_of(record):
        if not each.metric or not (gauges or each.is_counter):
            continue
        if each.known_by and not getattr(record, each.known_by):
            continue
        value = getattr(record, each.name)
        if each.buckets:
            total_s = getattr(record, each.total) / _NS_PER_S
            out.put_histogram(each.metric, STEP_BOUNDS_S, value, total_s, **labels)
        elif each.keys:
            for key, part in value.items():
                out.put(each.metric, each.shown(part), **labels, **{each.key_label: key})
        else:
            out.put(each.metric, each.shown(value), **labels, **each.labels)


def put_processes(out: Sink, processes: RankProcesses) -> None:
    """Put the processes of a rank."""
    rank = str(processes.rank)
    out.put("gpulaunch_dataloader_workers", processes.workers_alive, rank=rank, state="alive")
    for role, usage in processes.usage.items():
        out.put("gpulaunch_host_memory_bytes", usage.rss_bytes, rank=rank, role=role.value, kind="rss")
        out.put("gpulaunch_host_memory_bytes", usage.pss_bytes, rank=rank, role=role.value, kind="pss")
        out.put("gpulaunch_process_cpu_seconds_total", usage.cpu_user_s, rank=rank, role=role.value, mode="user")
        out.put("gpulaunch_process_cpu_seconds_total", usage.cpu_system_s, rank=rank, role=role.value, mode="system")
    for role, waited_s in processes.runqueue_s.items():
        out.put("gpulaunch_process_runqueue_seconds_total", waited_s, rank=rank, role=role.value)
    out.put("gpulaunch_process_busy_threads", processes.threads, rank=rank)
    inflight = processes.shm_inflight_bytes
    out.put("gpulaunch_shm_inflight_bytes", None if inflight is None else sum(inflight.values()), rank=rank)


def put_workers(out: Sink, workers: LoaderWorkers) -> None:
    """Put the dataloader workers of a rank."""
    rank = str(workers.rank)
    for state, spent_ns in (
        ("prep", workers.cpu_ns),
        ("contention", workers.runqueue_ns if workers.knows_runqueue else None),
        ("blocked", workers.blocked_ns),
    ):
        spent_s = None if spent_ns is None else spent_ns / _NS_PER_S
        out.put("gpulaunch_dataloader_worker_seconds_total", spent_s, rank=rank, state=state)
    out.put("gpulaunch_dataloader_worker_collate_seconds_total", workers.collate_ns / _NS_PER_S, rank=rank)
    for source, read_bytes in (("storage", workers.storage_bytes), ("cache", workers.cached_bytes)):
        out.put("gpulaunch_dataloader_worker_read_bytes_total", read_bytes, rank=rank, source=source)


def put_collectives(out: Sink, collectives: RankCollectives) -> None:
    """Put the progress of a rank's collectives."""
    rank = str(collectives.rank)
    for kind, calls in collectives.calls.items():
        out.put("gpulaunch_collective_calls_total", calls, rank=rank, kind=kind)
    out.put("gpulaunch_collectives_enqueued_total", collectives.enqueued, rank=rank)
    out.put("gpulaunch_collectives_completed_total", collectives.completed, rank=rank)
    out.put("gpulaunch_collective_sequence", collectives.sequence, rank=rank)
    if collectives.last is not None:
        state = "running" if collectives.running else "returned"
        out.put("gpulaunch_last_collective", 1, rank=rank, kind=collectives.last, state=state)
