"""What the machine itself was busy with; only the standard library, as ranks use it too."""

from __future__ import annotations

import os

__all__ = ["STOLEN_CORES", "processor_s"]

STOLEN_CORES = 0.05
"""A pair of runs in one of which the host took away more than that is left out: it shows what the host does."""


def processor_s() -> tuple[float, float]:
    """CPU seconds of this machine since it booted: spent, and kept from it by its host."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _waits, irq, softirq, stolen = map(int, stat.readline().split()[1:9])
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, stolen / ticks
