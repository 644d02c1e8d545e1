"""A node that trains well, as rules see it: each test changes one thing about it.

Four ranks could share it: 16 cores, nobody waits. A rank makes 100 steps of 100 ms in 10 s from a dataloader with two
workers, on a GPU that is busy nine tenths of the time, with everything as the book says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulaunch.profiler.analysis.advisor import advise
from gpulaunch.profiler.analysis.stall import verdict
from gpulaunch.profiler.analysis.window import GpuWindow, MemoryPoint, RankWindow, Window
from gpulaunch.profiler.record import (
    CopyTotals,
    GpuMemory,
    GpuState,
    HostState,
    LoaderState,
    LoaderWorkers,
    Pauses,
    Site,
)
from rank_records import record

MS = 1_000_000
MIB = 1 << 20
STEPS = 100
HEALTHY_MS = {
    "data_wait": 2.0,
    "h2d": 1.0,
    "forward": 30.0,
    "backward": 54.0,
    "comm": 0.0,
    "optimizer": 8.0,
    "sync": 1.0,
    "checkpoint": 0.0,
    "compile": 0.0,
    "gc": 0.0,
    "validation": 0.0,
    "other": 4.0,
}
OWN_MS = sum(HEALTHY_MS.values()) - HEALTHY_MS["data_wait"]
NO_PAUSES = record(
    Pauses,
)


def facts(**changes: Any) -> dict[str, Any]:
    loader = {
        "site": "train.py:41 main",
        "split": "train",
        "num_workers": 2,
        "prefetch_factor": 2,
        "pin_memory": True,
        "persistent_workers": True,
        "in_order": True,
        "batch_size": 32,
        "kind": "map",
        "start_method": "fork",
    }
    return {
        "version": 1,
        "omp_threads": 4,
        "torch_threads": 4,
        "device": {"type": "cuda", "index": 0, "uuid": "GPU-0", "name": "a card", "capability": [9, 0]},
        "loaders": [{**loader, **changes.pop("loader", {})}],
        "precision": {"parameters": "float32", "autocast": "bfloat16", "matmul": "high"},
        "dataparallel": None,
        "ddp": None,
        **changes,
    }


def loader(
    *,
    workers: int = 2,
    wait_ms: float = 2.0,
    transfer_ms: float = 0.0,
    blocked_ms: float = 0.0,
    batches: int = STEPS,
    epochs: int = 0,
    first_wait_ms: float = 0.0,
    restarts: int = 0,
    shared_ms: float = 0.0,
    shared_faults: int = 0,
) -> LoaderState:
    """Times are per step; the wait for the first batch is per epoch, what is shared per restart."""
    return record(
        LoaderState,
        ready=2,
        outstanding=4,
        workers_configured=workers,
        batches=batches,
        batch_bytes_total=batches * MIB,
        wait_ns_total=int(wait_ms * STEPS * MS),
        transfer_ns_total=int(transfer_ms * STEPS * MS),
        blocked_ns_total=int(blocked_ms * STEPS * MS),
        epochs=epochs,
        first_wait_ns_total=int(first_wait_ms * epochs * MS),
        restarts=restarts,
        shared_ns_total=int(shared_ms * restarts * MS),
        shared_faults=shared_faults * restarts,
        wait_counts=(),
    )


def fetching(
    fetch_ms: float = 80.0,
    *,
    cpu: float = 0.9,
    runqueue: float = 0.0,
    storage_bytes: int = 0,
    cached_bytes: int = 100 * MIB,
    batches: int = STEPS,
    collate: float = 0.1,
    knows_runqueue: bool = True,
) -> LoaderWorkers:
    """What workers did: milliseconds per batch, and the shares of it."""
    wall_ns = int(fetch_ms * MS * batches)
    cpu_ns, runqueue_ns = int(cpu * wall_ns), int(runqueue * wall_ns)
    return LoaderWorkers(
        rank=0,
        batches=batches,
        samples=8 * batches,
        alive=2,
        wall_ns=wall_ns,
        cpu_ns=cpu_ns,
        runqueue_ns=runqueue_ns,
        knows_runqueue=knows_runqueue,
        blocked_ns=wall_ns - cpu_ns - runqueue_ns,
        collate_ns=int(collate * wall_ns),
        storage_bytes=storage_bytes,
        cached_bytes=cached_bytes,
    )


def site(kind: str, text: str = "train.py:88 step", *, count: int = STEPS, **more: int) -> Site:
    """Times and bytes are of all steps."""
    zero = {"size_bytes": 0, "blocked_ns": 0, "gpu_ns": 0, "pinned": 0, "non_blocking": 0}
    return Site(kind=kind, text=text, count=count, **{**zero, **more})


def gpu_memory(**changes: int) -> GpuMemory:
    figures = {
        "allocated_bytes": 8000 * MIB,
        "reserved_bytes": 10000 * MIB,
        "peak_allocated_bytes": 9000 * MIB,
        "peak_reserved_bytes": 10000 * MIB,
        "active_bytes": 8500 * MIB,
        "inactive_split_bytes": 500 * MIB,
        "alloc_retries": 0,
        "ooms": 0,
        "pinned_bytes": 64 * MIB,
    }
    return record(GpuMemory, **{**figures, **changes})


def memory(
    *,
    points: int = 8,
    trainer_mib: float = 0.0,
    workers_mib: float = 0.0,
    allocated_mib: float = 0.0,
    gpu_mib: float = 0.0,
) -> tuple[MemoryPoint, ...]:
    """A point every ten seconds; each is so much more than the one before."""
    return tuple(
        MemoryPoint(
            at_s=10.0 * at,
            steps=STEPS * at,
            trainer_bytes=int((2000 + trainer_mib * at) * MIB),
            workers_bytes=int((500 + workers_mib * at) * MIB),
            workers_allocated_bytes=int((1500 + allocated_mib * at) * MIB),
            workers_alive=2,
            gpu_bytes=int((8000 + gpu_mib * at) * MIB),
        )
        for at in range(points)
    )


def rank(number: int = 0, *, phases_ms: Mapping[str, float] | None = None, **changes: Any) -> RankWindow:
    """A rank that is well, but for the changes."""
    ms = {**HEALTHY_MS, **(phases_ms or {})}
    seen: dict[str, Any] = {
        "rank": number,
        "steps": STEPS,
        "step_ns": int(sum(ms.values()) * STEPS * MS),
        "phase_ns": {phase: int(each * STEPS * MS) for phase, each in ms.items()},
        "loader": loader(wait_ms=ms["data_wait"]),
        "workers": fetching(),
        "workers_alive": 2,
        "copies": {("h2d", "pinned"): CopyTotals(count=STEPS, size_bytes=STEPS * MIB, blocked_ns=0, gpu_ns=5 * MS)},
        "sites": (),
        "saves": 0,
        "pauses": NO_PAUSES,
        "gpu": gpu_memory(),
        "trainer_cpu_s": 9.0,
        "workers_cpu_s": 7.2,
        "trainer_runqueue_s": 0.05,
        "shm_inflight_bytes": {5001: 3 * MIB, 5002: 5 * MIB},
        "facts": facts(),
        "samples": 40,
        "logged": {},
        "calling": {},
        "fetches": 0,
        "fetching": {},
        "calls": {},
        "memory": memory(),
        "cpu_nodes": frozenset({0}),
        **changes,
    }
    used: LoaderState = seen["loader"]
    done: LoaderWorkers = seen["workers"]
    stall = verdict(
        step_ns=seen["step_ns"],
        data_wait_ns=seen["phase_ns"]["data_wait"],
        loader_wait_ns=used.wait_ns_total,
        transfer_ns=used.transfer_ns_total,
        reorder_ns=used.blocked_ns_total,
        workers=used.workers_configured,
        cpu_ns=done.cpu_ns,
        runqueue_ns=done.runqueue_ns,
        blocked_ns=done.blocked_ns,
    )
    return RankWindow(**{"stall": stall, **seen})


def gpu(
    index: int = 0,
    *,
    throttle_s: Mapping[str, float] | None = None,
    ratios: Mapping[str, float] | None = None,
    **changes: Any,
) -> GpuWindow:
    state: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index}",
        "parent_uuid": None,
        "model": "a card",
        "utilization_ratio": 0.9,
        "sm_clock_hertz": 1.9e9,
        "memory_used_bytes": 11000 * MIB,
        "memory_total_bytes": 80000 * MIB,
        "numa_node": 0,
    }
    ratios = {"sm_active": 0.8, "tensor_active": 0.4, "fp32_active": 0.1} if ratios is None else ratios
    return GpuWindow(
        state=GpuState(**{**state, "gpm_ratios": ratios, **changes}),
        throttle_s=throttle_s or {"power_cap": 5.0, "thermal": 0.0},
    )


def host(**changes: Any) -> HostState:
    figures: dict[str, Any] = {
        "shm_size_bytes": 64000 * MIB,
        "shm_used_bytes": 100 * MIB,
        "memory_total_bytes": 500000 * MIB,
        "memory_available_bytes": 400000 * MIB,
        "cores": 16,
    }
    return HostState(**{**figures, **changes})


def window(*ranks: RankWindow, **changes: Any) -> Window:
    """A window of 10 s over these ranks, or over one that is well."""
    seen: dict[str, Any] = {
        "seconds": 10.0,
        "ranks": ranks or (rank(),),
        "gpus": (gpu(0), gpu(1)),
        "host": host(),
        "pressure_s": {("cpu", "some"): 0.5, ("io", "some"): 0.1},
        "cores": 16.0,
        **changes,
    }
    return Window(**seen)


def rules(seen: Window) -> list[str]:
    """The ids of the findings of a window."""
    return [found.rule for found in advise(seen)]


def starved(**changes) -> Window:
    """One worker computes without a pause, and training waits for it."""
    fetch = {"fetch_ms": OWN_MS + 60.0, "cpu": 0.875, **changes.pop("fetch", {})}
    waiting = rank(
        phases_ms={"data_wait": 60.0},
        loader=loader(workers=1, wait_ms=60.0),
        workers=fetching(**fetch),
        workers_cpu_s=changes.pop("workers_cpu_s", 14.0),
    )
    return window(waiting, **changes)
