"""The sidecar's reader of NVML: the state and the health of every GPU of the node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gpulaunch.profiler.record import GpuHealth, GpuState, Sampler
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml import driver
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler
from gpulaunch.profiler.samplers.nvml.health import GpuHealthSampler
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper, TimeoutGuard


class NvmlReader:
    """Two samplers, and one helper thread for both: while a call of one is pending, the other makes none."""

    def __init__(self, channel_dir: Path, ledger: MonotonicTotals, *, root: Path, clock: Callable[[], float]) -> None:
        self._helper = Helper(clock=clock)
        health = GpuHealthSampler(channel_dir, root=root, clock=clock)
        nothing: tuple[GpuHealth, ...] = ()
        self.health: Sampler[tuple[GpuHealth, ...]] = (
            health if driver.missing(root) else TimeoutGuard(health, self._helper, what="NVML", nothing=nothing)
        )
        self.gpus: Sampler[tuple[GpuState, ...]] = GpuSampler(ledger, self._helper, root=root)

    def close(self) -> None:
        """End the helper thread, or abandon it if NVML does not answer."""
        self._helper.close()
