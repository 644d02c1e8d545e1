"""A run that is not there: states as its sidecar would publish them, second by second, on a clock of our own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.record import (
    GOODPUT_BUCKETS,
    AttemptGroup,
    Collector,
    CollectorState,
    CopyTotals,
    Finding,
    GpuMemory,
    GpuState,
    HostState,
    LoaderState,
    NodeState,
    Pauses,
    RankCollectives,
    RankPlace,
    RankProcesses,
    Role,
    RunState,
    SidecarState,
    Site,
    SyncTotals,
    TrainingState,
    Usage,
)

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where a program that is no test imports this

from rank_records import record

NS = 1_000_000_000
MIB = 1 << 20
WALL_S = 1_790_000_000.0
BUCKETS = len(layout.STEP_BOUNDS_S) + 1

SYNC = Finding(
    rule="sync-every-step",
    file="train.py",
    line=88,
    subject="",
    ranks=(0, 1),
    seconds_per_step=0.02,
    seconds_per_hour=720.0,
    confidence=0.9,
    evidence={"kind": "item"},
    advice="Say less often.",
)
GC = replace(SYNC, rule="gc-pauses", file=None, line=None, seconds_per_step=0.001, seconds_per_hour=36.0)


def state(
    at_s: float,
    *,
    ranks: Sequence[int] = (0, 1),
    run_id: str = "aaaa",
    attempt: int = 0,
    node: int = 0,
    steps_per_s: float = 10.0,
    findings: tuple[Finding, ...] = (),
    restarts: dict[str, int] | None = None,
    gpu: bool = False,
    ended: bool = False,
) -> NodeState:
    """What is seen `at_s` seconds after the ranks began: each makes ten steps a second, rank 1 waits for its data."""
    places = tuple(RankPlace(rank=rank, local_rank=rank, pid=4000 + rank) for rank in ranks)
    seen = () if ended else ranks
    return NodeState(
        taken_monotonic_ns=round((1000 + at_s) * NS),
        taken_wall_ns=round((WALL_S + at_s) * NS),
        group=None
        if ended
        else AttemptGroup(run_id=run_id, name="demo", attempt=attempt, world_size=8, node_rank=node, ranks=places),
        training=tuple(training(rank, at_s, steps_per_s, gpu=gpu) for rank in seen),
        processes=tuple(
            RankProcesses(
                rank=rank,
                usage={
                    Role.TRAINER: Usage(
                        rss_bytes=300 * MIB + round(at_s) * 4096,
                        pss_bytes=60 * MIB,
                        cpu_user_s=0.9 * at_s,
                        cpu_system_s=0.05 * at_s,
                    )
                },
                workers_alive=2,
            )
            for rank in seen
        ),
        host=HostState(
            shm_size_bytes=64 * MIB,
            shm_used_bytes=MIB,
            memory_total_bytes=1 << 34,
            memory_available_bytes=1 << 33,
            pressure_s={("cpu", "some"): 1.5},
        ),
        run=RunState(
            goodput_ns={
                **dict.fromkeys(GOODPUT_BUCKETS, 0),
                "productive": round(at_s * NS),
                "startup": 10 * NS,
            },
            restarts=restarts or {},
            hang_suspicions=0,
            hangs=0,
            preempted=False,
        ),
        gpus=(),
        devices=(device(at_s),) if gpu else (),
        collectives=tuple(
            RankCollectives(
                rank=rank,
                calls={"all_reduce": round(at_s)},
                enqueued=round(at_s),
                completed=round(at_s),
                sequence=round(at_s),
                last="all_reduce",
                running=False,
            )
            for rank in seen
        ),
        findings=findings,
        collectors={
            Collector.RANKS: CollectorState(available=True, reason="", errors=0, spent_s=0.01),
            Collector.GPU: CollectorState(available=False, reason="no NVIDIA driver", errors=0, spent_s=0.0),
        },
        sidecar=SidecarState(
            cpu_s=0.01 * at_s, rss_bytes=30 * MIB, refreshes=round(at_s), late_refreshes=0, refresh_s=0.01
        ),
    )


def training(rank: int, at_s: float, steps_per_s: float, *, gpu: bool = False) -> TrainingState:
    """Of each second, rank 0 spends three quarters in forward and a quarter in backward; of rank 1, data is late."""
    steps = round(at_s * steps_per_s)
    first = "forward" if rank == 0 else "data_wait"
    spent_ns = steps * round(NS / steps_per_s)
    counts = [0] * BUCKETS
    counts[5] = steps
    return TrainingState(
        rank=rank,
        armed=True,
        steps=steps,
        microsteps=steps,
        samples=32 * steps,
        skipped_steps=0,
        step_ns_total=spent_ns,
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_counts=tuple(counts),
        phase_ns={
            **dict.fromkeys(layout.PHASES, 0),
            first: spent_ns * 3 // 4,
            "backward": spent_ns // 4,
        },
        probe_ns_total=round(at_s * 1000),
        step_source="optimizer",
        last_step_monotonic_ns=round((1000 + at_s) * NS),
        loader=record(
            LoaderState,
            ready=2,
            outstanding=4,
            workers_configured=2,
            batches=steps,
            batch_bytes_total=steps * 1000,
            wait_ns_total=steps * 1000,
            wait_counts=tuple(counts),
        ),
        gpu=record(
            GpuMemory,
            allocated_bytes=MIB,
            reserved_bytes=2 * MIB,
            peak_allocated_bytes=3 * MIB,
            peak_reserved_bytes=4 * MIB,
            active_bytes=MIB,
        )
        if gpu
        else None,
        gpu_time=None,
        checkpoint=None,
        copies={("h2d", "pageable"): CopyTotals(count=steps, size_bytes=steps * 4096, blocked_ns=steps * 500, gpu_ns=0)}
        if gpu
        else {},
        syncs={"item": SyncTotals(calls=steps, blocked_ns=steps * 1000)},
        sites=(
            Site(
                kind="item",
                text="train.py:88 main",
                count=steps,
                size_bytes=0,
                blocked_ns=steps * 1000,
                gpu_ns=0,
                pinned=0,
                non_blocking=0,
            ),
        ),
        pauses=record(
            Pauses,
            gc_collections=1,
            gc_ns_total=10,
            comm_calls=steps,
            comm_blocked_ns_total=steps * 10,
        ),
        budget_ppm=5000,
        unobserved_steps=0,
        facts={},
        hooks_unavailable=("gpu_time",),
        fault="GPU_TIME: no GPU",
    )


def device(at_s: float) -> GpuState:
    return GpuState(
        index=0,
        uuid="GPU-a",
        parent_uuid=None,
        model="NVIDIA H200",
        utilization_ratio=0.5,
        memory_used_bytes=1 << 30,
        memory_total_bytes=8 << 30,
        power_watts=350.0,
        energy_joules=350.0 * at_s,
        pcie_bytes={"receive": round(at_s) * MIB, "transmit": 0},
    )


def announce(channel: Path, run_dir: Path) -> None:
    """What the agent tells the sidecar: which directory the run has."""
    channel.mkdir(exist_ok=True)
    run_dir.mkdir(exist_ok=True)
    (channel / "group.json").write_text(json.dumps({"version": 1, "run_dir": str(run_dir)}))


def line(what: str, at_s: float, **fields: Any) -> str:
    """A line of events.jsonl."""
    return (
        json.dumps({"version": 1, "time_s": WALL_S + at_s, "monotonic_s": 1000 + at_s, "event": what, **fields}) + "\n"
    )
