"""Rules about the machine: too few cores, a throttled GPU, a rank on another NUMA node than its GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.analysis.facts import number
from gpulaunch.profiler.analysis.finding import ESTIMATED, Loss
from gpulaunch.profiler.analysis.stats import median
from gpulaunch.profiler.analysis.thresholds import BUSY, CROWDED, CROWDED_NODE, THREADS, THROTTLED
from gpulaunch.profiler.analysis.window import RankWindow, Window

_FAULTS: Final = ("thermal", "hw_slowdown", "hw_thermal", "hw_power_brake", "reliability", "board_limit")
"""A power cap is not a fault: every well-used card reaches it."""
_DEPENDENCE: Final = 1.5
"""How much the threads of a rank depend on each other. Measured on 2 cores (`tests/findings/programs/omp_threads.py`):
1 where the kernel happens to run all threads of a rank at the same time, 2 where each thread has a core by chance and
waits at the barrier for one that has none. A run changes between the two, and `waiting` is the same in both."""


def throttled_share(window: Window, rank: RankWindow) -> float:
    """The share of the window in which a fault throttled the rank's GPU; several may hold at once."""
    gpu = window.card_of(rank)
    if gpu is None or window.seconds <= 0:
        return 0.0
    return min(1.0, max((gpu.throttle_s.get(reason, 0.0) for reason in _FAULTS), default=0.0) / window.seconds)


def throttled(window: Window) -> Iterator[Loss]:
    """A GPU that lowers its clocks because of heat or a lack of power."""
    clocks = [gpu.state.sm_clock_hertz for gpu in window.gpus if gpu.state.sm_clock_hertz]
    for rank in window.ranks:
        gpu, share = window.card_of(rank), throttled_share(window, rank)
        if gpu is None or share < THROTTLED.value:
            continue
        clock = gpu.state.sm_clock_hertz
        # The other cards of the node show how much slower it is; a single card shows only that it is throttled.
        slower = 1.0 - clock / median(clocks) if clock and len(clocks) > 1 else 0.0
        reasons = [reason for reason in _FAULTS if gpu.throttle_s.get(reason, 0.0) >= THROTTLED.value * window.seconds]
        evidence: dict[str, float | str] = {
            "step_seconds": rank.step_s,
            "throttled_ratio": share,
            "reasons": ", ".join(reasons),
        }
        if clock:
            evidence["sm_clock_hertz"] = clock
        yield Loss(
            rank=rank.rank,
            seconds_per_step=share * max(0.0, slower) * rank.step_s,
            step_s=rank.step_s,
            confidence=ESTIMATED,
            evidence=evidence,
            advice=f"Check the cooling and the power supply of GPU {gpu.state.index}, and the GPUs next to it: it is "
            f"throttled ({', '.join(reasons)}).",
            subject=f"GPU {gpu.state.index}",
        )


def numa_mismatch(window: Window) -> Iterator[Loss]:
    """A rank whose cores are all on another NUMA node than its GPU: every copy crosses the link between them."""
    for rank in window.ranks:
        gpu = window.gpu_of(rank)
        node = None if gpu is None else gpu.state.numa_node
        if node is None or not rank.cpu_nodes or node in rank.cpu_nodes:
            continue
        moved = [copies for (direction, _), copies in rank.copies.items() if direction in ("h2d", "d2h")]
        yield Loss(
            rank=rank.rank,
            seconds_per_step=0.0,
            step_s=rank.step_s,
            confidence=ESTIMATED,
            evidence={
                "step_seconds": rank.step_s,
                "gpu_numa_node": node,
                "cpu_numa_nodes": ", ".join(map(str, sorted(rank.cpu_nodes))),
                "copied_bytes_per_step": sum(copies.size_bytes for copies in moved) / rank.steps,
                "copy_seconds_per_step": rank.per_step_s(
                    sum(max(copies.blocked_ns, copies.gpu_ns) for copies in moved)
                ),
            },
            advice="Bind the rank to the cores of its GPU's NUMA node, so that copies do not cross the link between "
            "NUMA nodes: gpulaunch --numa-binding node.",
            subject=f"rank {rank.rank}",
        )


def omp_oversubscribed(window: Window) -> Iterator[Loss]:
    """The ranks compute on the CPU with more threads than the node has cores."""
    threads_of = {rank.rank: number(rank.facts, "torch_threads") or 1.0 for rank in window.ranks}
    threads, cores = sum(threads_of.values()), window.cores
    if not cores or threads <= THREADS.value * cores:
        return
    fitting = max(1, int(cores) // len(window.ranks))
    for rank in window.ranks:
        if threads_of[rank.rank] <= fitting:  # more ranks than cores: no number of threads helps
            continue
        waiting = _waiting_share(window, rank, 1.0 - cores / threads)
        if waiting < CROWDED.value:  # idle threads cost nothing
            continue
        computing_s = sum(rank.phase_s(phase) for phase in ("forward", "backward", "comm", "optimizer"))
        yield Loss(
            rank=rank.rank,
            seconds_per_step=computing_s * (1.0 - (1.0 - waiting) ** _DEPENDENCE),
            step_s=rank.step_s,
            confidence=ESTIMATED,
            evidence={
                "step_seconds": rank.step_s,
                "threads_of_rank": threads_of[rank.rank],
                "threads_of_node": threads,
                "cores": cores,
                "waiting_ratio": waiting,
            },
            advice=f"Use {fitting} {'thread' if fitting == 1 else 'threads'} per rank: {threads:g} threads share "
            f"{cores:g} cores. Let gpulaunch set OMP_NUM_THREADS, and remove torch.set_num_threads.",
        )


def _waiting_share(window: Window, rank: RankWindow, expected: float) -> float:
    """The share of its time that a thread of the rank is runnable but waits for a core.

    If the kernel does not count that: the expected share, if all cores are in use and some task waits.
    """
    if rank.trainer_runqueue_s is not None:
        wanted_s = rank.trainer_runqueue_s + rank.trainer_cpu_s
        return rank.trainer_runqueue_s / wanted_s if wanted_s >= BUSY.value * window.seconds else 0.0
    used_cores = sum(each.trainer_cpu_s for each in window.ranks) / max(window.seconds, 1e-9)
    is_full = used_cores >= BUSY.value * (window.cores or 0.0) and (window.pressure("cpu") or 0.0) > CROWDED_NODE.value
    return expected if is_full else 0.0
