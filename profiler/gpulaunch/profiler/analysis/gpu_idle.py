"""The idle time of a rank's GPU: the most that a wait of its training thread can cost."""

from __future__ import annotations

from gpulaunch.profiler.analysis.finding import DERIVED, ESTIMATED
from gpulaunch.profiler.analysis.window import RankWindow, Window


def gpu_idle_s(window: Window, rank: RankWindow) -> float | None:
    """How long the rank's GPU was idle per step; None if that is not known."""
    gpu = window.gpu_of(rank)
    if gpu is None or gpu.state.utilization_ratio is None:
        return None
    return max(0.0, 1.0 - gpu.state.utilization_ratio) * rank.step_s


def bounded(window: Window, rank: RankWindow, blocked_s: float) -> tuple[float, float, float | None]:
    """Return the possible loss of a wait, its confidence, and the idle time that bounds it."""
    idle_s = gpu_idle_s(window, rank)
    return (blocked_s, ESTIMATED, None) if idle_s is None else (min(blocked_s, idle_s), DERIVED, idle_s)
