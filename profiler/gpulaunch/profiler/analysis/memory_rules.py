"""Rules about memory that grows, is fragmented or nearly full. These problems cost no time until the job fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gpulaunch.profiler.analysis.facts import loader_of, loader_place, number
from gpulaunch.profiler.analysis.finding import DERIVED, MEASURED, Loss
from gpulaunch.profiler.analysis.thresholds import (
    FITS,
    FRAGMENTED,
    GROWN_BYTES,
    GROWN_POINTS,
    MOST_TO_FULL_S,
    SHM_FULL,
    URGENT_GROWN,
    URGENT_POINTS,
    URGENT_S,
)
from gpulaunch.profiler.analysis.trend import growth_of
from gpulaunch.profiler.analysis.window import MemoryPoint, RankWindow, Window
from gpulaunch.profiler.record import HostState, ends_job_soon

_GRAPHS: Final = (
    "torch.compile recompiles, and keeps every compiled graph: keep shapes and Python values constant across steps, or "
    "compile with dynamic=True."
)


def host_memory_growth(window: Window) -> Iterator[Loss]:
    """The memory of a rank or its workers grows with every step, and not only until the first epoch is over."""
    room = host_room(window.host)
    if room is not None:  # ranks behave alike, so each has its share of the rest
        room //= max(1, len(window.ranks))
    for rank in window.ranks:
        points, ends_in_s = _since_first_epoch(rank)
        trainer = [(point.at_s, float(point.trainer_bytes)) for point in points if point.trainer_bytes is not None]
        advice = "Look for objects kept from every step: a list of losses without .item(), or an unbounded cache."
        advice = _GRAPHS if rank.pauses.compiles else advice
        if not _only_fills(points):
            yield from _growing(rank, "trainer", trainer, room, advice, ends_in_s)
        allocated, theirs = _of_workers(points)
        advice = (
            "Look for what the dataset keeps of every sample: an unbounded cache, which each worker fills by itself."
        )
        growing = list(_growing(rank, "workers", allocated, room, advice, ends_in_s))
        if not growing:
            advice = "Store the samples in arrays, not objects: a worker copies every page of objects that it reads."
            growing = list(_growing(rank, "workers", theirs, room, advice, ends_in_s))
        yield from growing


def gpu_memory_growth(window: Window) -> Iterator[Loss]:
    """The minimum of allocated GPU memory grows with every step."""
    for rank in window.ranks:
        room = _gpu_room(window, rank)
        points = [(point.at_s, float(point.gpu_bytes)) for point in rank.memory if point.gpu_bytes is not None]
        advice = "Look for tensors kept from every step: a kept loss keeps its graph. Use detach() or .item()."
        advice = _GRAPHS if rank.pauses.compiles else advice
        yield from _growing(rank, "GPU", points, room, advice)


def gpu_memory_fragmented(window: Window) -> Iterator[Loss]:
    """Reserved memory is free but too fragmented for requests: allocations have to be retried."""
    for rank in window.over.ranks:
        gpu = rank.gpu
        if gpu is None or not gpu.alloc_retries or gpu.reserved_bytes <= 0:
            continue
        unusable = gpu.inactive_split_bytes / gpu.reserved_bytes
        if unusable < FRAGMENTED.value:
            continue
        yield Loss(
            rank=rank.rank,
            seconds_per_step=0.0,
            step_s=rank.step_s,
            confidence=MEASURED,
            evidence={
                "unusable_ratio": unusable,
                "reserved_bytes": float(gpu.reserved_bytes),
                "allocated_bytes": float(gpu.allocated_bytes),
                "retries_per_step": gpu.alloc_retries / rank.steps,
            },
            advice="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or use batches of one shape: free memory is "
            "split into small blocks, and each retried allocation synchronizes with the GPU.",
        )


def shm_nearly_full(window: Window) -> Iterator[Loss]:
    """Batches on their way from workers to ranks nearly fill the shared memory of the node."""
    host = window.host
    if host is None or not host.shm_size_bytes or host.shm_used_bytes is None:
        return
    used = host.shm_used_bytes / host.shm_size_bytes
    if used < SHM_FULL.value:
        return
    for rank in window.ranks:
        in_flight = {} if rank.shm_inflight_bytes is None else _in_flight(rank.shm_inflight_bytes)
        if rank.shm_inflight_bytes or rank.workers_alive:
            yield Loss(
                rank=rank.rank,
                seconds_per_step=0.0,
                step_s=rank.step_s,
                confidence=MEASURED,
                evidence={
                    "used_ratio": used,
                    "size_bytes": float(host.shm_size_bytes),
                    **in_flight,
                    "workers": float(rank.workers_alive),
                },
                advice="Enlarge /dev/shm (64 MiB by default in a container), or lower num_workers or prefetch_factor: "
                "when it is full, a rank is killed by SIGBUS.",
                place=loader_place(rank),
            )


def _in_flight(size_bytes: Mapping[int, int]) -> dict[str, float]:
    """Bytes in flight of all workers of a rank, and of the worker with the most."""
    return {
        "in_flight_bytes": float(sum(size_bytes.values())),
        "most_of_a_worker_bytes": float(max(size_bytes.values(), default=0)),
    }


def _growing(
    rank: RankWindow,
    subject: str,
    points: Sequence[tuple[float, float]],
    room_bytes: int | None,
    advice: str,
    ends_in_s: float | None = None,
) -> Iterator[Loss]:
    """Report memory that grows steadily, by points (seconds, bytes), and would soon fill the rest; not if it may be
    that the growth ends before, in so many seconds."""
    if len(points) < URGENT_POINTS.value or points[-1][1] - points[0][1] < GROWN_BYTES.value:
        return
    growth = growth_of(points)
    if growth is None or growth.total < GROWN_BYTES.value:
        return
    full_s = None if room_bytes is None else room_bytes / growth.per_x
    if ends_in_s is not None and full_s is not None and ends_in_s < FITS.value * full_s:
        return
    is_urgent = full_s is not None and full_s < URGENT_S.value
    is_clear = is_urgent and room_bytes is not None and growth.total >= URGENT_GROWN.value * room_bytes
    if len(points) < (URGENT_POINTS if is_clear else GROWN_POINTS).value:
        return
    evidence: dict[str, float | str] = {
        "grown_bytes": growth.total,
        "bytes_per_step": growth.per_x * rank.step_s,
        "bytes_per_hour": 3600 * growth.per_x,
    }
    if full_s is not None:
        if full_s > MOST_TO_FULL_S.value:
            return
        evidence["hours_to_full"] = full_s / 3600
        if ends_job_soon(evidence):
            advice = f"At this rate the memory is full in {_shortly(full_s)}. {advice}"
    yield Loss(
        rank=rank.rank,
        seconds_per_step=0.0,
        step_s=rank.step_s,
        confidence=DERIVED,
        evidence=evidence,
        advice=advice,
        subject=subject,
    )


def _since_first_epoch(rank: RankWindow) -> tuple[Sequence[MemoryPoint], float | None]:
    """The points after the first epoch, in which a cache of the dataset may have been filled; or, as long as it lasts,
    all points, and the seconds until it is over."""
    batches = number(loader_of(rank), "epoch_batches")
    if batches is None or not rank.memory:
        return rank.memory, None
    steps = batches * rank.steps / max(1, rank.steps, rank.microsteps)
    later = [point for point in rank.memory if point.steps > steps]
    return (later, None) if later else (rank.memory, (steps - rank.memory[-1].steps) * rank.step_s)


def _shortly(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} seconds"


def _only_fills(points: Sequence[MemoryPoint]) -> bool:
    """Whether a rank writes for the first time to what it had allocated before, such as the buffer of a replay memory.

    Such growth has an end, and most of it did not come with new address space.
    """
    known = [
        (point.trainer_bytes, point.trainer_virtual_bytes)
        for point in points
        if point.trainer_bytes is not None and point.trainer_virtual_bytes is not None
    ]
    if not known:
        return False
    (bytes_at_first, virtual_at_first), (bytes_now, virtual_now) = known[0], known[-1]
    return virtual_now - virtual_at_first < (bytes_now - bytes_at_first) / 2


def _of_workers(points: Sequence[MemoryPoint]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """What they have allocated, and what is theirs alone. Only points with as many workers as now: more workers are not
    growth."""
    now = points[-1].workers_alive if points else 0
    alike = [point for point in points if now and point.workers_alive == now]
    # Workers of each epoch start with all that the rank has by then, and so count what it keeps.
    allocated = [
        (at.at_s, float(at.workers_allocated_bytes - at.workers_alive * at.trainer_bytes))
        for at in alike
        if at.workers_allocated_bytes is not None and at.trainer_bytes is not None
    ]
    return allocated, [(at.at_s, float(at.workers_bytes)) for at in alike if at.workers_bytes is not None]


def _gpu_room(window: Window, rank: RankWindow) -> int | None:
    """The bytes a rank can still allocate: its share of the GPU's free memory, and its allocator's cache.

    The GPU may be shared with other ranks of this job, which grow alike, and with other processes.
    """
    gpu, own = window.gpu_of(rank), rank.gpu
    if gpu is None or own is None or gpu.state.memory_total_bytes is None:
        return None
    if gpu.state.memory_used_bytes is None:
        return max(0, gpu.state.memory_total_bytes - own.allocated_bytes)
    free = max(0, gpu.state.memory_total_bytes - gpu.state.memory_used_bytes)
    sharing = sum(window.gpu_of(each) is gpu for each in window.ranks)
    return free // max(1, sharing) + max(0, own.reserved_bytes - own.allocated_bytes)


def host_room(host: HostState | None) -> int | None:
    """The bytes the ranks can still allocate, by the node or by their control group."""
    if host is None:
        return None
    rooms = [] if host.memory_available_bytes is None else [host.memory_available_bytes]
    if host.cgroup_limit_bytes is not None and host.cgroup_used_bytes is not None:
        rooms.append(max(0, host.cgroup_limit_bytes - host.cgroup_used_bytes))
    return min(rooms, default=None)
