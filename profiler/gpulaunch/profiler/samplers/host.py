"""Samples what all ranks of a node share: memory, cores and their speed, and how long tasks stalled for lack of
them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulaunch.profiler.cgroup import Cgroups
from gpulaunch.profiler.record import HostState, Reading
from gpulaunch.profiler.samplers.pace import Pace

PRESSURES: Final = (("cpu", "some"), ("io", "some"), ("io", "full"), ("memory", "some"), ("memory", "full"))
"""Resource and severity of every meaningful figure of /proc/pressure. The cpu file also has a line `full`, for the sake
of old programs: it is always zero (Documentation/accounting/psi.rst)."""


class HostSampler:
    """Reads /dev/shm, a few files of /proc, and the limits of our control group."""

    def __init__(self, *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._shm = root / "dev/shm"
        self._meminfo = root / "proc/meminfo"
        self._pressure = root / "proc/pressure"
        self._cgroups = Cgroups(root)
        self._clock = clock
        self._told: set[str] = set()
        self._pace = Pace()

    def read(self, now: float) -> Reading[HostState]:
        """Return the node's shared figures; a part that cannot be read is None and named in the errors."""
        errors: list[str] = []
        size = used = None
        try:
            stat = os.statvfs(self._shm)
            size, used = stat.f_blocks * stat.f_frsize, (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        except OSError as error:
            errors.append(f"shared memory: {error.strerror}")
        memory: dict[str, int] = {}
        try:
            memory = parse_meminfo(self._meminfo.read_bytes())
        except OSError as error:
            errors.append(f"node memory: {error.strerror}")
        limit = self._cgroups.memory()
        state = HostState(
            shm_size_bytes=size,
            shm_used_bytes=used,
            memory_total_bytes=memory.get("MemTotal"),
            memory_available_bytes=memory.get("MemAvailable"),
            page_cache_bytes=page_cache_bytes(memory),
            swap_used_bytes=swap_used_bytes(memory),
            pressure_s=self._read_pressure(errors),
            cgroup_limit_bytes=limit.limit_bytes if limit else None,
            cgroup_used_bytes=limit.used_bytes if limit else None,
            cpu_quota_cores=self._cgroups.cpu_quota_cores(),
            cores=len(os.sched_getaffinity(0)),
            loop_ns=self._pace.measure(),
        )
        return Reading(values=state, errors=tuple(errors), late_s=self._clock() - now)

    def _read_pressure(self, errors: list[str]) -> dict[tuple[str, str], float]:
        """Return what can be read. A kernel that does not count it never will, so the reason is reported once."""
        found: dict[tuple[str, str], float] = {}
        for resource in dict(PRESSURES):
            try:
                seconds = parse_pressure((self._pressure / resource).read_bytes())
            except OSError as error:
                if resource not in self._told:
                    self._told.add(resource)
                    errors.append(f"{resource} pressure: {error.strerror}")
                continue
            found.update({(resource, severity): total_s for severity, total_s in seconds.items()})
        return {pressure: found[pressure] for pressure in PRESSURES if pressure in found}


def parse_meminfo(text: bytes) -> dict[str, int]:
    """Return the sizes of /proc/meminfo in bytes; lines of another form are left out."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(b":")
        words = rest.split()
        if len(words) == 2 and words[1] == b"kB" and words[0].isdigit():
            sizes[name.decode("ascii", "replace")] = int(words[0]) * 1024
    return sizes


def page_cache_bytes(memory: dict[str, int]) -> int | None:
    """Return the cache of files on disk: the kernel's `Cached` includes shared memory, which cannot be reclaimed."""
    if "Cached" not in memory:
        return None
    return max(0, memory["Cached"] + memory.get("Buffers", 0) - memory.get("Shmem", 0))


def swap_used_bytes(memory: dict[str, int]) -> int | None:
    """Return the used swap; 0 on a node without swap."""
    if "SwapTotal" not in memory or "SwapFree" not in memory:
        return None
    return max(0, memory["SwapTotal"] - memory["SwapFree"])


def parse_pressure(text: bytes) -> dict[str, float]:
    """Return the seconds by severity of a file of /proc/pressure: `some avg10=.. avg60=.. avg300=.. total=<us>`."""
    seconds: dict[str, float] = {}
    for line in text.splitlines():
        severity, *figures = line.split()[:5] or [b""]
        for figure in figures:
            name, _, microseconds = figure.partition(b"=")
            if name == b"total" and microseconds.isdigit():
                seconds[severity.decode("ascii", "replace")] = int(microseconds) / 1e6
    return seconds
