"""A node as the sidecar might have seen it: one busy rank with workers and a GPU, one that never armed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.record import (
    GOODPUT_BUCKETS,
    AttemptGroup,
    CheckpointState,
    Collector,
    CollectorState,
    CopyTotals,
    Finding,
    GpuHealth,
    GpuMemory,
    GpuState,
    GpuTime,
    HostState,
    LoaderState,
    LoaderWorkers,
    NodeState,
    Pauses,
    RankCollectives,
    RankPlace,
    RankProcesses,
    Role,
    RunState,
    SidecarState,
    StackState,
    SyncTotals,
    TrainingState,
    Usage,
)
from rank_records import record

MS = 1_000_000
BUCKETS = len(layout.STEP_BOUNDS_S) + 1


def idle(rank: int) -> TrainingState:
    return record(
        TrainingState,
        rank=rank,
        armed=False,
        step_bounds_s=layout.STEP_BOUNDS_S,
        step_source=None,
        last_step_monotonic_ns=None,
        loader=None,
        gpu=None,
        gpu_time=None,
        checkpoint=None,
        copies={},
        syncs={},
        sites=(),
        pauses=pauses(0),
        facts={},
        hooks_unavailable=(),
        fault="",
    )


def pauses(times: int) -> Pauses:
    return record(
        Pauses,
        gc_collections=3 * times,
        gc_ns_total=4 * MS * times,
        compiles=times,
        compile_ns_total=900 * MS * times,
        comm_calls=2 * times,
        comm_blocked_ns_total=6 * MS * times,
        ddp_comm_ns=5 * MS * times,
        ddp_overlap_ns=3 * MS * times,
    )


def collectives() -> tuple[RankCollectives, ...]:
    """Rank 0 stands in a barrier; rank 1 has only called, and its torch says nothing."""
    return (
        RankCollectives(
            rank=0,
            calls={"all_reduce": 40, "barrier": 3},
            enqueued=143,
            completed=142,
            sequence=120,
            last="barrier",
            running=True,
        ),
        RankCollectives(
            rank=1, calls={"wait": 2}, enqueued=None, completed=None, sequence=None, last="wait", running=False
        ),
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
        loader=record(
            LoaderState,
            ready=1,
            outstanding=4,
            reorder_blocked=2,
            pin_backlog=1,
            workers_configured=2,
            batches=201,
            eval_batches=1,
            batch_bytes_total=201 << 20,
            wait_ns_total=2_500 * MS,
            transfer_ns_total=500 * MS,
            blocked_ns_total=250 * MS,
            wait_counts=(200, *(0,) * (BUCKETS - 2), 1),
        ),
        gpu=record(
            GpuMemory,
            allocated_bytes=1 << 30,
            reserved_bytes=2 << 30,
            peak_allocated_bytes=3 << 29,
            peak_reserved_bytes=3 << 30,
            active_bytes=5 << 28,
            inactive_split_bytes=1 << 27,
            alloc_retries=2,
            ooms=1,
            pinned_bytes=1 << 25,
        ),
        gpu_time=record(
            GpuTime,
            steps=10,
            step_ns_total=12_000 * MS,
            forward_ns_total=4_000 * MS,
            backward_ns_total=7_000 * MS,
            optimizer_ns_total=500 * MS,
        ),
        checkpoint=record(
            CheckpointState,
            saves=3,
            failures=1,
            stall_ns_total=1500 * MS,
            bytes_total=3 << 20,
            step=90,
            captured_ns=4_500 * MS,
            resumed_step=40,
        ),
        copies={
            ("h2d", "pageable"): CopyTotals(count=100, size_bytes=100 << 20, blocked_ns=900 * MS, gpu_ns=800 * MS),
            ("d2d", ""): CopyTotals(count=1, size_bytes=1 << 20, blocked_ns=0, gpu_ns=MS),
        },
        syncs={"item": SyncTotals(calls=100, blocked_ns=1_500 * MS)},
        sites=(),
        pauses=pauses(1),
        budget_ppm=5000,
        unobserved_steps=20,
        facts={"device": {"uuid": "GPU-a"}},
        hooks_unavailable=("gpu_time",),
        fault="GPU_TIME: a test",
    )


def processes(rank: int) -> RankProcesses:
    return RankProcesses(
        rank=rank,
        usage={
            Role.TRAINER: Usage(rss_bytes=300 << 20, pss_bytes=60 << 20, cpu_user_s=12.5, cpu_system_s=0.25),
            Role.WORKERS: Usage(rss_bytes=100 << 20, pss_bytes=None, cpu_user_s=3.0, cpu_system_s=0.0),
        },
        workers_alive=2,
        runqueue_s={Role.TRAINER: 0.5, Role.WORKERS: 2.25},
        threads=2.5,
        shm_inflight_bytes={5001: 1 << 20, 5002: 2 << 20},
    )


def device() -> GpuState:
    return GpuState(
        index=0,
        uuid="GPU-a",
        parent_uuid=None,
        model="NVIDIA H200",
        utilization_ratio=0.5,
        memory_used_bytes=1 << 30,
        memory_total_bytes=8 << 30,
        sm_clock_hertz=1.98e9,
        power_watts=350.5,
        energy_joules=9000.0,
        temperature_celsius=61.0,
        throttle_seconds={"thermal": 1.5},
        pcie_bytes={"receive": 1 << 30, "transmit": 1 << 20},
        pcie_generation=4,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
        pcie_replays=0,
        nvlink_bytes={"receive": 7, "transmit": 8},
        ecc_errors={"corrected": 3, "uncorrected": 2},
        remapped_rows={"correctable": 1, "uncorrectable": 0},
        remap_pending=False,
        remap_failed=False,
        gpm_ratios={"sm_active": 0.75, "sm_occupancy": 0.5, "dram_active": 0.25, "tensor_active": 0.125},
    )


def finding(line: int, lost_s_per_hour: float) -> Finding:
    return Finding(
        rule="sync-every-step",
        file="/home/me/train.py",
        line=line,
        subject="",
        ranks=(0,),
        seconds_per_step=lost_s_per_hour / 36_000,
        seconds_per_hour=lost_s_per_hour,
        confidence=0.9,
        advice="say less often",
    )


@pytest.fixture
def node() -> NodeState:
    places = tuple(RankPlace(rank=rank, local_rank=rank, pid=4711 + rank) for rank in range(2))
    return NodeState(
        taken_monotonic_ns=6_000 * MS,
        taken_wall_ns=1_790_000_000_000 * MS,
        group=AttemptGroup(
            run_id="0123456789abcdef", name="digits_ddp", attempt=1, world_size=2, node_rank=0, ranks=places
        ),
        training=(busy(0), idle(1)),
        processes=(processes(0),),
        host=HostState(
            shm_size_bytes=64 << 20,
            shm_used_bytes=1 << 20,
            memory_total_bytes=None,
            memory_available_bytes=None,
            page_cache_bytes=None,
            swap_used_bytes=None,
            cores=8,
            cpu_quota_cores=2.5,
            cgroup_limit_bytes=4 << 30,
            cgroup_used_bytes=1 << 30,
            pressure_s={("cpu", "some"): 1.5, ("memory", "full"): 0.25},
        ),
        run=RunState(
            goodput_ns={bucket: (i + 1) * 1000 * MS for i, bucket in enumerate(GOODPUT_BUCKETS)},
            restarts={"segfault": 2, "hang": 1},
            hang_suspicions=2,
            hangs=1,
            preempted=False,
            stalled_since_ns={1: 5_000 * MS},
        ),
        gpus=(
            GpuHealth(index=0, uuid="GPU-a", xids={79: 1, 48: 2}, ecc_uncorrected=2, recovery_action="node_reboot"),
            GpuHealth(index=1, uuid="GPU-b", xids={}, ecc_uncorrected=None, recovery_action="unknown"),
        ),
        workers=(
            LoaderWorkers(
                rank=0,
                batches=200,
                samples=6400,
                wall_ns=4_000 * MS,
                cpu_ns=3_000 * MS,
                runqueue_ns=250 * MS,
                blocked_ns=750 * MS,
                collate_ns=500 * MS,
                storage_bytes=1 << 20,
                cached_bytes=3 << 20,
                alive=2,
                knows_runqueue=True,
            ),
        ),
        collectives=collectives(),
        devices=(device(),),
        stacks=StackState(source="py-spy", samples={"forward": 40, "startup": 2}, cpu_s=0.5),
        findings=tuple(finding(line, lost_s) for line, lost_s in ((41, 360.0), (50, 36.0))),
        collectors={
            Collector.RANKS: CollectorState(available=True, reason="", errors=0, spent_s=0.5),
            Collector.PROCESS: CollectorState(available=False, reason="<Permission denied>", errors=3, spent_s=0.25),
        },
        sidecar=SidecarState(cpu_s=1.5, rss_bytes=27 << 20, refreshes=60, late_refreshes=1, refresh_s=0.002),
    )


HOSTILE = {
    "of a terminal": "\x1b[31m\x1b]0;title\x07\x08\r\x9b2J\x00\u202egpj\u2028\x85",
    "of a page": "<script>alert('x')</script>&lt;\"'><img src=x onerror=y>",
    "of the format": 'a"} 1\n# EOF\ngpulaunch_steps_total{rank="7"} 1e9\n# TYPE b # {c="d"} 1',
    "backslashes": '\\n\\\\"\\\\n\\',
    "of an address": "../../metrics?job=x%2Fy%00#z;a b+c",
    "of an address, without a slash": "?run=x&y%20%41+=;,#z@base64",
    "half a character": "train\udcff",
}
"""Texts that others may choose: names of files, of hosts, what a driver or a kernel says."""


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> str:
    text: str = request.param
    return text


@pytest.fixture
def with_texts(node: NodeState) -> Callable[[str], NodeState]:
    """Gives the same node with this text wherever a text is not ours; of the GPUs, one is a part that has no name but
    its UUID."""

    def replaced(text: str) -> NodeState:
        assert node.group is not None
        assert node.stacks is not None
        busy, idle = node.training
        (card,) = node.devices
        whole = dataclasses.replace(card, uuid=text, model=text, throttled_by=(text,))
        part = dataclasses.replace(card, uuid=f"MIG-{text}", parent_uuid=text, model=text)
        return dataclasses.replace(
            node,
            group=dataclasses.replace(node.group, run_id=text, name=text),
            training=(dataclasses.replace(busy, facts={"device": {"uuid": text}}, fault=text), idle),
            gpus=tuple(dataclasses.replace(gpu, uuid=text, recovery_action=text) for gpu in node.gpus),
            devices=(whole, part),
            stacks=dataclasses.replace(node.stacks, source=text),
            findings=tuple(dataclasses.replace(found, file=text, subject=text, advice=text) for found in node.findings),
            collectors={
                collector: dataclasses.replace(condition, reason=text)
                for collector, condition in node.collectors.items()
            },
        )

    return replaced


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
