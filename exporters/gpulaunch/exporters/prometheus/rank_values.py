"""Converts the state of one rank into samples: training loop, processes, dataloader workers, probe overhead."""

from __future__ import annotations

from collections.abc import Sequence

from gpulaunch.exporters.prometheus.families import Sink
from gpulaunch.profiler.record import (
    CheckpointState,
    GpuMemory,
    LoaderState,
    LoaderWorkers,
    Pauses,
    Price,
    RankCollectives,
    RankProcesses,
    TrainingState,
)

_NS_PER_S = 1e9


def put_training(out: Sink, training: TrainingState, *, wall_minus_monotonic_ns: int) -> None:
    """Put the training loop of a rank; the difference converts monotonic time to wall time."""
    rank = str(training.rank)
    out.put("gpulaunch_probe_armed", training.armed, rank=rank)
    out.put("gpulaunch_steps_total", training.steps, rank=rank)
    out.put("gpulaunch_samples_total", training.samples, rank=rank)
    out.put("gpulaunch_microsteps_total", training.microsteps, rank=rank)
    out.put("gpulaunch_skipped_steps_total", training.skipped_steps, rank=rank)
    if training.step_source is not None:
        out.put("gpulaunch_step_source", 1, rank=rank, source=training.step_source)
    out.put_histogram(
        "gpulaunch_step_duration_seconds",
        training.step_bounds_s,
        training.step_counts,
        training.step_ns_total / _NS_PER_S,
        rank=rank,
    )
    for phase, phase_ns in training.phase_ns.items():
        out.put("gpulaunch_phase_seconds_total", phase_ns / _NS_PER_S, rank=rank, phase=phase)
    if (gpu_time := training.gpu_time) is not None:
        out.put("gpulaunch_gpu_timed_steps_total", gpu_time.steps, rank=rank)
        for phase, phase_ns in (
            ("forward", gpu_time.forward_ns_total),
            ("backward", gpu_time.backward_ns_total),
            ("optimizer", gpu_time.optimizer_ns_total),
        ):
            out.put("gpulaunch_phase_gpu_seconds_total", phase_ns / _NS_PER_S, rank=rank, phase=phase)
    if training.last_step_monotonic_ns is not None:
        wall_ns = training.last_step_monotonic_ns + wall_minus_monotonic_ns
        # The two clocks are read a moment apart at every refresh: rounded to whole ms, the time of an unchanged step
        # stays unchanged.
        out.put("gpulaunch_last_step_timestamp_seconds", round(wall_ns / _NS_PER_S, 3), rank=rank)
    if training.loader is not None:
        knows_queue = "loader_queue" not in (*training.hooks_unavailable, *training.price.hooks_shed)
        _put_loader(out, rank, training.loader, training.step_bounds_s, knows_queue=knows_queue)
    if training.gpu is not None:
        _put_gpu_memory(out, rank, training.gpu)
    if training.checkpoint is not None:
        _put_checkpoint(out, rank, training.checkpoint)
    _put_transfers(out, rank, training)
    if "nested" not in training.hooks_unavailable:
        _put_pauses(out, rank, training.pauses)
    for part in training.hooks_unavailable:
        out.put("gpulaunch_probe_part_unavailable", 1, rank=rank, part=part)
    out.put(
        "gpulaunch_profiler_overhead_seconds_total", training.probe_ns_total / _NS_PER_S, rank=rank, where="trainer"
    )
    _put_price(out, rank, training.price)


def _put_price(out: Sink, rank: str, price: Price) -> None:
    out.put("gpulaunch_unobserved_steps_total", price.unobserved_steps, rank=rank)
    out.put("gpulaunch_probe_budget_ratio", price.budget_ratio or None, rank=rank)
    for part in price.hooks_shed:
        out.put("gpulaunch_probe_part_shed", 1, rank=rank, part=part)
    out.put("gpulaunch_probe_pairs", price.pairs, rank=rank)
    if price.paired_cost_ns is not None:
        out.put("gpulaunch_probe_step_cost_seconds", price.paired_cost_ns / _NS_PER_S, rank=rank)
    if price.paired_error_ns is not None:
        out.put("gpulaunch_probe_step_cost_error_seconds", price.paired_error_ns / _NS_PER_S, rank=rank)


def _put_loader(out: Sink, rank: str, loader: LoaderState, bounds_s: Sequence[float], *, knows_queue: bool) -> None:
    out.put("gpulaunch_dataloader_batches_total", loader.batches, rank=rank)
    out.put("gpulaunch_dataloader_eval_batches_total", loader.eval_batches, rank=rank)
    out.put("gpulaunch_dataloader_batch_bytes_total", loader.batch_bytes_total, rank=rank)
    if knows_queue:
        out.put("gpulaunch_dataloader_ready_batches", loader.ready, rank=rank)
        out.put("gpulaunch_dataloader_outstanding_batches", loader.outstanding, rank=rank)
        out.put("gpulaunch_dataloader_reorder_blocked_batches", loader.reorder_blocked, rank=rank)
        out.put("gpulaunch_dataloader_pin_backlog_batches", loader.pin_backlog, rank=rank)
        out.put("gpulaunch_dataloader_workers", loader.workers_configured, rank=rank, state="configured")
    wait_s = loader.wait_ns_total / _NS_PER_S
    out.put_histogram("gpulaunch_dataloader_wait_seconds", bounds_s, loader.wait_counts, wait_s, rank=rank)
    out.put("gpulaunch_dataloader_transfer_seconds_total", loader.transfer_ns_total / _NS_PER_S, rank=rank)
    out.put("gpulaunch_dataloader_reorder_blocked_seconds_total", loader.blocked_ns_total / _NS_PER_S, rank=rank)


def _put_gpu_memory(out: Sink, rank: str, gpu: GpuMemory) -> None:
    for state, size_bytes in (
        ("allocated", gpu.allocated_bytes),
        ("reserved", gpu.reserved_bytes),
        ("peak_allocated", gpu.peak_allocated_bytes),
        ("peak_reserved", gpu.peak_reserved_bytes),
        ("active", gpu.active_bytes),
        ("inactive_split", gpu.inactive_split_bytes),
    ):
        out.put("gpulaunch_gpu_memory_bytes", size_bytes, rank=rank, state=state)
    out.put("gpulaunch_gpu_alloc_retries_total", gpu.alloc_retries, rank=rank)
    out.put("gpulaunch_gpu_ooms_total", gpu.ooms, rank=rank)
    out.put("gpulaunch_pinned_memory_bytes", gpu.pinned_bytes, rank=rank)


def _put_transfers(out: Sink, rank: str, training: TrainingState) -> None:
    for (direction, host_memory), copies in training.copies.items():
        labels = {"rank": rank, "direction": direction, "host_memory": host_memory}
        out.put("gpulaunch_copies_total", copies.count, **labels)
        out.put("gpulaunch_copy_bytes_total", copies.size_bytes, **labels)
        out.put("gpulaunch_copy_blocked_seconds_total", copies.blocked_ns / _NS_PER_S, **labels)
        out.put("gpulaunch_copy_gpu_seconds_total", copies.gpu_ns / _NS_PER_S, **labels)
    for kind, syncs in training.syncs.items():
        out.put("gpulaunch_sync_calls_total", syncs.calls, rank=rank, kind=kind)
        out.put("gpulaunch_sync_blocked_seconds_total", syncs.blocked_ns / _NS_PER_S, rank=rank, kind=kind)


def _put_pauses(out: Sink, rank: str, pauses: Pauses) -> None:
    out.put("gpulaunch_gc_collections_total", pauses.gc_collections, rank=rank)
    out.put("gpulaunch_gc_seconds_total", pauses.gc_ns_total / _NS_PER_S, rank=rank)
    out.put("gpulaunch_compiles_total", pauses.compiles, rank=rank)
    out.put("gpulaunch_compile_seconds_total", pauses.compile_ns_total / _NS_PER_S, rank=rank)
    out.put("gpulaunch_comm_calls_total", pauses.comm_calls, rank=rank)
    out.put("gpulaunch_comm_blocked_seconds_total", pauses.comm_blocked_ns_total / _NS_PER_S, rank=rank)
    if pauses.ddp_comm_ns:
        out.put("gpulaunch_ddp_comm_seconds", pauses.ddp_comm_ns / _NS_PER_S, rank=rank)
        out.put("gpulaunch_ddp_overlap_seconds", pauses.ddp_overlap_ns / _NS_PER_S, rank=rank)


def _put_checkpoint(out: Sink, rank: str, checkpoint: CheckpointState) -> None:
    out.put("gpulaunch_checkpoint_saves_total", checkpoint.saves, rank=rank)
    out.put("gpulaunch_checkpoint_failures_total", checkpoint.failures, rank=rank)
    out.put("gpulaunch_checkpoint_stall_seconds_total", checkpoint.stall_ns_total / _NS_PER_S, rank=rank)
    out.put("gpulaunch_checkpoint_bytes_total", checkpoint.bytes_total, rank=rank)
    out.put("gpulaunch_checkpoint_step", checkpoint.newest_step, rank=rank)
    out.put("gpulaunch_resumed_step", checkpoint.resumed_step, rank=rank)


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
