"""Looks at a node that trains: what the sidecar would have read at some moment, made up from a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulaunch.profiler.analysis.window import Snapshot
from gpulaunch.profiler.channel import layout
from gpulaunch.profiler.record import (
    AttemptGroup,
    CheckpointState,
    Collector,
    CopyTotals,
    GpuMemory,
    GpuState,
    HostState,
    LoaderState,
    LoaderWorkers,
    NodeState,
    Pauses,
    RankPlace,
    RankProcesses,
    Role,
    SidecarState,
    Site,
    TrainingState,
    Usage,
)
from rank_records import record

MS = 1_000_000
S = 1_000_000_000
MIB = 1 << 20
BUCKETS = len(layout.STEP_BOUNDS_S) + 1


def workers(rank: int = 0, **changes: int) -> LoaderWorkers:
    names = ("batches", "samples", "wall_ns", "cpu_ns", "runqueue_ns", "blocked_ns", "collate_ns")
    zero = dict.fromkeys((*names, "storage_bytes", "cached_bytes"), 0)
    return LoaderWorkers(**{"rank": rank, "alive": 2, "knows_runqueue": False, **zero, **changes})


def device(**changes: Any) -> GpuState:
    return GpuState(**{"index": 0, "uuid": "GPU-0", "parent_uuid": None, "model": "a card", **changes})


@dataclass
class Rank:
    """One rank so far. `step` moves it on."""

    rank: int = 0
    steps: int = 0
    phase_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(layout.PHASES, 0))
    batches: int = 0
    wait_ns: int = 0
    workers: LoaderWorkers | None = None
    workers_configured: int = 2
    hooks_off: tuple[str, ...] = ()
    trainer_bytes: int | None = 1000 * MIB
    workers_bytes: int | None = 200 * MIB
    inflight_bytes: int = MIB
    gpu_bytes: int | None = None
    cpu_s: float = 0.0
    runqueue_s: float | None = None
    main_thread_s: float | None = None
    sites: tuple[Site, ...] = ()
    copies: Mapping[tuple[str, str], CopyTotals] = field(default_factory=dict)
    saves: int = 0
    unobserved_steps: int = 0
    gc: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def step(self, times: int = 1, **ms: float) -> None:
        self.steps += times
        self.batches += times
        self.cpu_s += 0.05 * times
        for phase, each in {"data_wait": 1.0, "forward": 40.0, "backward": 50.0, "optimizer": 9.0, **ms}.items():
            self.phase_ns[phase] += int(each * MS) * times
        self.wait_ns = self.phase_ns["data_wait"]

    def training(self) -> TrainingState:
        return TrainingState(
            rank=self.rank,
            armed=True,
            steps=self.steps,
            microsteps=self.steps,
            samples=8 * self.steps,
            skipped_steps=0,
            step_ns_total=sum(self.phase_ns.values()),
            step_bounds_s=layout.STEP_BOUNDS_S,
            step_counts=(0,) * BUCKETS,
            phase_ns=dict(self.phase_ns),
            probe_ns_total=0,
            step_source="optimizer",
            last_step_monotonic_ns=None,
            loader=record(
                LoaderState,
                ready=1,
                outstanding=4,
                workers_configured=self.workers_configured,
                batches=self.batches,
                batch_bytes_total=self.batches * MIB,
                wait_ns_total=self.wait_ns,
                wait_counts=(self.batches, *(0,) * (BUCKETS - 1)),
            ),
            gpu=None if self.gpu_bytes is None else self.gpu_memory(self.gpu_bytes),
            gpu_time=None,
            checkpoint=record(
                CheckpointState,
                saves=self.saves,
            ),
            copies=self.copies,
            syncs={},
            sites=self.sites,
            pauses=record(
                Pauses,
                gc_collections=self.gc,
                gc_ns_total=self.gc * MS,
                ddp_comm_ns=7,
                ddp_overlap_ns=5,
            ),
            budget_ppm=5000,
            unobserved_steps=self.unobserved_steps,
            facts=self.facts,
            hooks_unavailable=self.hooks_off,
            fault="",
        )

    def gpu_memory(self, allocated_bytes: int) -> GpuMemory:
        return record(
            GpuMemory,
            allocated_bytes=allocated_bytes,
            reserved_bytes=2 * allocated_bytes,
            peak_allocated_bytes=allocated_bytes,
            peak_reserved_bytes=2 * allocated_bytes,
            active_bytes=allocated_bytes,
            alloc_retries=self.steps,
        )

    def processes(self) -> RankProcesses:
        usage = {
            Role.TRAINER: Usage(
                rss_bytes=9000 * MIB,  # with the pages of files, which nothing is to be told of
                pss_bytes=None,
                cpu_user_s=self.cpu_s,
                cpu_system_s=0.0,
                anonymous_bytes=self.trainer_bytes,
            ),
            Role.WORKERS: Usage(
                rss_bytes=900 * MIB,
                pss_bytes=800 * MIB,
                cpu_user_s=self.cpu_s / 2,
                cpu_system_s=0.0,
                pss_anonymous_bytes=self.workers_bytes,
            ),
        }
        waits = {} if self.runqueue_s is None else {Role.TRAINER: self.runqueue_s}
        return RankProcesses(
            rank=self.rank,
            usage=usage,
            workers_alive=2,
            runqueue_s=waits,
            main_thread_s=self.main_thread_s,
            shm_inflight_bytes={5: self.inflight_bytes},
        )


@dataclass
class Node:
    """A node and its clock."""

    ranks: list[Rank] = field(default_factory=lambda: [Rank()])
    now_s: float = 1000.0
    attempt: int = 0
    devices: tuple[GpuState, ...] = ()
    pressure_s: float = 0.0
    quota_cores: float | None = None
    group: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def look(self) -> Snapshot:
        places = tuple(RankPlace(rank=each.rank, local_rank=each.rank, pid=100 + each.rank) for each in self.ranks)
        group = AttemptGroup(
            run_id="a-run", name="toy", attempt=self.attempt, world_size=len(places), node_rank=0, ranks=places
        )
        state = NodeState(
            taken_monotonic_ns=int(self.now_s * S),
            taken_wall_ns=int(self.now_s * S) + 10**18,
            group=group if self.group else None,
            training=tuple(each.training() for each in self.ranks),
            processes=tuple(each.processes() for each in self.ranks),
            host=HostState(
                shm_size_bytes=64000 * MIB,
                shm_used_bytes=10 * MIB,
                memory_total_bytes=64000 * MIB,
                memory_available_bytes=50000 * MIB,
                pressure_s={("cpu", "some"): self.pressure_s},
                cores=16,
                cpu_quota_cores=self.quota_cores,
            ),
            run=None,
            gpus=(),
            workers=tuple(each.workers for each in self.ranks if each.workers is not None),
            devices=self.devices,
            collectors=dict.fromkeys(Collector),  # type: ignore[arg-type]  # nobody asks
            sidecar=SidecarState(cpu_s=0.0, rss_bytes=None, refreshes=0, late_refreshes=0, refresh_s=0.0),
        )
        return Snapshot(state=state, **self.extra)

    def train(self, seconds: float = 1.0, **ms: float) -> Snapshot:
        """Go on for so long, ten steps a second, and look."""
        for each in self.ranks:
            each.step(round(10 * seconds), **ms)
        self.now_s += seconds
        return self.look()
