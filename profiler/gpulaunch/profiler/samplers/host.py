"""What all ranks of a node share: its memory, and the shared memory that dataloader workers send batches through."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from gpulaunch.profiler.record import HostState, Reading


class HostSampler:
    """Reads /dev/shm and /proc/meminfo; a few microseconds each."""

    def __init__(self, *, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._shm = root / "dev/shm"
        self._meminfo = root / "proc/meminfo"
        self._clock = clock

    def read(self, now: float) -> Reading[HostState]:
        """Give the node's shared figures; a part that cannot be read is None and named in the errors."""
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
        state = HostState(
            shm_size_bytes=size,
            shm_used_bytes=used,
            memory_total_bytes=memory.get("MemTotal"),
            memory_available_bytes=memory.get("MemAvailable"),
        )
        return Reading(values=state, errors=tuple(errors), late_s=self._clock() - now)


def parse_meminfo(text: bytes) -> dict[str, int]:
    """Give the sizes of /proc/meminfo in bytes; lines of another form are left out."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(b":")
        words = rest.split()
        if len(words) == 2 and words[1] == b"kB" and words[0].isdigit():
            sizes[name.decode("ascii", "replace")] = int(words[0]) * 1024
    return sizes
