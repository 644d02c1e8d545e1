"""The GPU of a rank: allocator statistics, and the cap on its memory. A rank without CUDA costs nothing here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuMemory", "apply_gpu_memory_fraction", "memory_of"]


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What torch's caching allocator holds on the rank's current device."""

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int


def memory_of(cuda: Any) -> GpuMemory | None:
    """The allocator's figures through `torch.cuda`, or None while CUDA is not initialised (never initialises it)."""
    if not cuda.is_initialized():
        return None
    # One nested read gives what memory_allocated, max_memory_allocated and memory_reserved each build anew.
    stats = cuda.memory_stats_as_nested_dict()
    allocated = stats["allocated_bytes"]["all"]
    return GpuMemory(allocated["current"], allocated["peak"], stats["reserved_bytes"]["all"]["current"])


def apply_gpu_memory_fraction(cuda: Any, environ: Mapping[str, str], failed: Callable[[str], None]) -> bool:
    """Cap this rank's share of its GPU as GPULAUNCH_GPU_MEMORY_FRACTION says, from the moment that CUDA is initialised.

    Args:
        cuda: `torch.cuda`.
        environ: where the fraction and LOCAL_RANK stand.
        failed: is told, in one line, why the cap could not be set; nothing is raised, now or later.

    Returns:
        True if a cap has been queued.
    """
    text = environ.get("GPULAUNCH_GPU_MEMORY_FRACTION")
    if not text:
        return False
    try:
        fraction = float(text)
        local_rank = int(environ.get("LOCAL_RANK", "0"))
    except ValueError as error:
        failed(f"no GPU memory cap: {error}")
        return False
    owner_pid = os.getpid()

    def cap() -> None:
        if os.getpid() != owner_pid:
            return  # a dataloader worker that uses CUDA is not the rank
        try:
            _cap_own_device(cuda, fraction, local_rank)
        except Exception as error:  # an exception here would make the user's first CUDA call fail
            failed(f"no GPU memory cap: {error}")

    try:
        cuda._lazy_call(cap)
    except Exception as error:
        failed(f"no GPU memory cap: {error}")
        return False
    return True


def _cap_own_device(cuda: Any, fraction: float, local_rank: int) -> None:
    """Cap the one device that is the rank's by torchrun's convention.

    Not all visible ones: torch's allocator makes each the current device to read its size, so every rank would hold a
    CUDA context (hundreds of MB) on every GPU of the node, and would go on with the last one as its default.
    """
    visible = cuda.device_count()
    if not visible:
        return
    before = cuda.current_device()
    device = local_rank % visible
    cuda.set_per_process_memory_fraction(fraction, device)
    if device != before:
        # Unlike set_device, this does not create a context on the device that it goes back to.
        cuda._maybe_exchange_device(before)
