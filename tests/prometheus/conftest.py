"""A node as the sidecar might have seen it: one busy rank with workers and a GPU, one that never armed."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.record import (
    GOODPUT_BUCKETS,
    CheckpointState,
    Collector,
    CollectorState,
    GpuHealth,
    GpuMemory,
    Group,
    HostState,
    LoaderState,
    NodeState,
    RankPlace,
    RankProcesses,
    Role,
    RunState,
    SidecarState,
    TrainingState,
    Usage,
)

MS = 1_000_000
BUCKETS = len(layout.STEP_BOUNDS_S) + 1


def idle(rank: int) -> TrainingState:
    return TrainingState(
        rank=rank,
        armed=False,
        steps=0,
        microsteps=0,
        samples=0,
        skipped_steps=0,
        step_ns_total=0,
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_counts=(0,) * BUCKETS,
        phase_ns=dict.fromkeys(layout.PHASES, 0),
        probe_ns_total=0,
        step_source=None,
        last_step_monotonic_ns=None,
        loader=None,
        gpu=None,
        checkpoint=None,
    )


def busy(rank: int) -> TrainingState:
    counts = [0] * BUCKETS
    counts[5], counts[6], counts[-1] = 90, 9, 1
    return TrainingState(
        rank=rank,
        armed=True,
        steps=100,
        microsteps=200,
        samples=6400,
        skipped_steps=1,
        step_ns_total=130_000 * MS,
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_counts=tuple(counts),
        phase_ns={phase: (i + 1) * 1000 * MS for i, phase in enumerate(layout.PHASES)},
        probe_ns_total=2 * MS,
        step_source="optimizer",
        last_step_monotonic_ns=5_000 * MS,
        loader=LoaderState(ready=1, outstanding=4, reorder_blocked=2, workers_configured=2, batches=201),
        gpu=GpuMemory(allocated_bytes=1 << 30, reserved_bytes=2 << 30, peak_allocated_bytes=3 << 29),
        checkpoint=CheckpointState(
            saves=3,
            failures=1,
            stall_ns_total=1500 * MS,
            bytes_total=3 << 20,
            newest_step=90,
            captured_monotonic_ns=4_500 * MS,
            resumed_step=40,
        ),
    )


def processes(rank: int) -> RankProcesses:
    return RankProcesses(
        rank=rank,
        usage={
            Role.TRAINER: Usage(rss_bytes=300 << 20, pss_bytes=60 << 20, cpu_user_s=12.5, cpu_system_s=0.25),
            Role.WORKERS: Usage(rss_bytes=100 << 20, pss_bytes=None, cpu_user_s=3.0, cpu_system_s=0.0),
        },
        workers_alive=2,
    )


@pytest.fixture
def node() -> NodeState:
    places = tuple(RankPlace(rank=rank, local_rank=rank, pid=4711 + rank) for rank in range(2))
    return NodeState(
        taken_monotonic_ns=6_000 * MS,
        taken_wall_ns=1_790_000_000_000 * MS,
        group=Group(run_id="0123456789abcdef", name="digits_ddp", attempt=1, world_size=2, node_rank=0, ranks=places),
        training=(busy(0), idle(1)),
        processes=(processes(0),),
        host=HostState(
            shm_size_bytes=64 << 20, shm_used_bytes=1 << 20, memory_total_bytes=None, memory_available_bytes=None
        ),
        run=RunState(
            goodput_ns={bucket: (i + 1) * 1000 * MS for i, bucket in enumerate(GOODPUT_BUCKETS)},
            restarts={"segfault": 2, "hang": 1},
            hang_suspicions=2,
            hangs=1,
            preempted=False,
        ),
        gpus=(
            GpuHealth(index=0, uuid="GPU-a", xids={79: 1, 48: 2}, ecc_uncorrected=2, recovery_action="node_reboot"),
            GpuHealth(index=1, uuid="GPU-b", xids={}, ecc_uncorrected=None, recovery_action="unknown"),
        ),
        collectors={
            Collector.RANKS: CollectorState(available=True, reason="", errors=0, spent_s=0.5),
            Collector.PROCESS: CollectorState(available=False, reason="<Permission denied>", errors=3, spent_s=0.25),
        },
        sidecar=SidecarState(cpu_s=1.5, rss_bytes=27 << 20, refreshes=60, late_refreshes=1, refresh_s=0.002),
    )


@pytest.fixture
def empty_node() -> NodeState:
    """Before the agent has started anything."""
    return NodeState(
        taken_monotonic_ns=0,
        taken_wall_ns=0,
        group=None,
        training=(),
        processes=(),
        host=None,
        run=None,
        gpus=(),
        collectors={},
        sidecar=SidecarState(cpu_s=0.1, rss_bytes=None, refreshes=0, late_refreshes=0, refresh_s=0.0),
    )
