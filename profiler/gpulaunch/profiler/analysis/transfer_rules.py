"""Rules about copies between CPU and GPU, and waits for the GPU.

A program that waits for its GPU loses nothing while the GPU works: the loss is at most the time that the GPU was idle.
If the device sampler knows that time, it is the bound; otherwise the whole wait is, with a lower confidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.analysis.facts import loader_of, loader_place, text
from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED, Loss, place_of
from gpulaunch.profiler.analysis.gpu_idle import bounded, gpu_idle_s
from gpulaunch.profiler.analysis.stats import median
from gpulaunch.profiler.analysis.thresholds import (
    EVERY_STEP,
    LOST_MEASURED,
    PINNED_GAIN,
    SMALL_LOSS,
)
from gpulaunch.profiler.analysis.window import RankWindow, Window
from gpulaunch.profiler.record import Site

_SYNCS: Final = frozenset({"item", "tolist", "numpy", "cpu", "bool", "nonzero", "synchronize"})


def unpinned_copies(window: Window) -> Iterator[Loss]:
    """Copies to the GPU from pageable memory: the driver stages them, and the host is blocked meanwhile."""
    for rank, site in _sites(window, "h2d"):
        if site.pinned * 2 >= site.count:
            continue
        blocked_s = rank.per_step_s(site.blocked_ns)
        idle_s = gpu_idle_s(window, rank)
        # Without the GPU's idle time: only what pinned memory is known to save of such a copy.
        seconds = PINNED_GAIN.value * blocked_s if idle_s is None else min(blocked_s, idle_s)
        if seconds < LOST_MEASURED.value * rank.step_s:
            continue
        advice = "Copy from pinned memory with non_blocking=True"
        if loader_of(rank).get("pin_memory") is False:
            advice += f": set pin_memory=True on the DataLoader ({loader_place(rank)})"
        yield _loss(
            rank,
            seconds,
            site,
            confidence=ESTIMATED if idle_s is None else DERIVED,
            advice=f"{advice}. Copies from pageable memory block the training thread. Do not call pin_memory() in the "
            "training loop: it copies, too.",
            idle_s=idle_s,
        )


def blocking_copies(window: Window) -> Iterator[Loss]:
    """Copies to the GPU from pinned memory that block unnecessarily."""
    for rank, site in _sites(window, "h2d"):
        if site.pinned * 2 < site.count or site.non_blocking * 2 >= site.count:
            continue
        seconds, confidence, idle_s = bounded(window, rank, rank.per_step_s(site.blocked_ns))
        if seconds >= LOST_MEASURED.value * rank.step_s:
            yield _loss(
                rank,
                seconds,
                site,
                confidence=confidence,
                advice="Pass non_blocking=True: the memory is pinned, so the copy can overlap with computation.",
                idle_s=idle_s,
            )


def sync_every_step(window: Window) -> Iterator[Loss]:
    """Lines that synchronize with the GPU at every step."""
    for rank, site in _sites(window, *_SYNCS, "d2h"):
        if site.count < EVERY_STEP.value * rank.steps:
            continue
        if 2 * min(site.pinned, site.non_blocking) > site.count:  # asynchronous copies to the CPU
            continue
        seconds, confidence, idle_s = bounded(window, rank, rank.per_step_s(site.blocked_ns))
        if seconds >= LOST_MEASURED.value * rank.step_s:
            yield _loss(
                rank,
                seconds,
                site,
                confidence=confidence,
                advice="Keep the value on the GPU (accumulate with +=, detach()) and read it only every N steps: each "
                "read waits until the GPU has finished its queued work.",
                idle_s=idle_s,
                calls_per_step=site.count / rank.steps,
            )


def tensor_built_on_cpu(window: Window) -> Iterator[Loss]:
    """Tensors that are created on the CPU and moved to the GPU at the same line."""
    for rank, site in _sites(window, "built_on_cpu"):
        if site.count < EVERY_STEP.value * rank.steps:
            continue
        seconds = rank.per_step_s(site.blocked_ns)
        if seconds >= SMALL_LOSS.value * rank.step_s:
            yield _loss(
                rank,
                seconds,
                site,
                confidence=DERIVED,
                advice="Pass device=... when creating the tensor, so that it is not copied from the CPU.",
                copies_per_step=site.count / rank.steps,
                where=site.text,
            )


def dataparallel(window: Window) -> Iterator[Loss]:
    """One process that drives several GPUs by copying the model to each of them at every step."""
    used = [gpu.state.memory_used_bytes for gpu in window.gpus if gpu.state.memory_used_bytes]
    for rank in window.ranks:
        site = text(rank.facts, "dataparallel")
        if not site or len(window.gpus) < 2:
            continue
        between = [copies for (direction, _), copies in rank.copies.items() if direction == "d2d"]
        evidence: dict[str, float | str] = {
            "step_seconds": rank.step_s,
            "gpus": len(window.gpus),
            "device_copy_bytes_per_step": sum(copies.size_bytes for copies in between) / rank.steps,
        }
        if used:
            evidence["fullest_gpu_to_median_memory_ratio"] = max(used) / median(used)
        yield Loss(
            rank=rank.rank,
            seconds_per_step=rank.per_step_s(sum(max(copies.gpu_ns, copies.blocked_ns) for copies in between)),
            step_s=rank.step_s,
            confidence=ESTIMATED,
            evidence=evidence,
            advice="Use DistributedDataParallel with one process per GPU (gpulaunch --nproc auto): DataParallel copies "
            "the model to each GPU at every step, and a single Python process drives all GPUs.",
            place=place_of(site),
        )


def _sites(window: Window, *kinds: str) -> Iterator[tuple[RankWindow, Site]]:
    for rank in window.ranks:
        for site in rank.sites:
            if site.kind in kinds and site.text and rank.steps:
                yield rank, site


def _loss(
    rank: RankWindow,
    seconds: float,
    site: Site,
    *,
    confidence: float,
    advice: str,
    idle_s: float | None = None,
    **more: float | str,
) -> Loss:
    evidence: dict[str, float | str] = {
        "step_seconds": rank.step_s,
        "blocked_seconds_per_step": rank.per_step_s(site.blocked_ns),
        "bytes_per_step": site.size_bytes / rank.steps,
        "kind": site.kind,
    }
    if site.gpu_ns:
        evidence["copied_bytes_per_second"] = site.size_bytes / (site.gpu_ns / 1e9)
    if idle_s is not None:
        evidence["gpu_idle_seconds_per_step"] = idle_s
    return Loss(
        rank=rank.rank,
        seconds_per_step=seconds,
        step_s=rank.step_s,
        confidence=confidence,
        evidence={**evidence, **more},
        advice=advice,
        place=place_of(site.text),
    )
