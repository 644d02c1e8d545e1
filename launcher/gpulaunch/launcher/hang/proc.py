"""What /proc says of one rank and of the processes below it: states, CPU time, bytes, a debugger, a GPU.

Read by the helper process, and only while a rank is suspected. A process that goes away in the middle of the reading
counts with what it had said until then.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpulaunch.launcher.loop import linux

__all__ = ["Reading", "read"]

_MAX_PROCESSES = 256
"""A rank with more children than this is busy anyway."""
_GPU_DEVICES = (b"/dev/nvidia", b"/dev/kfd", b"/dev/dri/")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One rank, now."""

    state: str
    """State letter of the main thread; "" when the process is gone."""
    main_ticks: int = 0
    own_ticks: int = 0
    tree_ticks: int = 0
    io_bytes: int = 0
    workers: tuple[int, ...] = ()
    """Its dataloader workers."""
    gpu: bool = False
    traced: bool = False


def read(pid: int) -> Reading:
    """Look at the process tree of one rank."""
    own = _stat(f"/proc/{pid}/stat")
    if own is None:
        return Reading(state="")
    main = _stat(f"/proc/{pid}/task/{pid}/stat") or own
    below = linux.descendants_of(pid)[:_MAX_PROCESSES]
    workers = tuple(one for one in below if linux.comm_of(one) == linux.LOADER_WORKER)
    tree_ticks = sum(own[1:])
    for one in below:
        stat = _stat(f"/proc/{one}/stat")
        tree_ticks += sum(stat[1:]) if stat else 0
    io_bytes = _io_bytes(f"/proc/{pid}/task/{pid}/io") + sum(_io_bytes(f"/proc/{one}/io") for one in workers)
    return Reading(
        state=main[0],
        main_ticks=main[1],
        own_ticks=own[1],
        tree_ticks=tree_ticks,
        io_bytes=io_bytes,
        workers=workers,
        gpu=_has_gpu(pid),
        traced=_traced(pid),
    )


def _stat(path: str) -> tuple[str, int, int] | None:
    """State, CPU ticks of its own, and CPU ticks of its children that are dead and waited for; proc(5) 3, 14-17."""
    try:
        with open(path, "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    except (OSError, IndexError, ValueError):
        return None


def _io_bytes(path: str) -> int:
    """Bytes read and written by calls, and by page faults; 0 where that may not be read."""
    try:
        with open(path, "rb") as io:
            values = dict(line.split(b": ", 1) for line in io.read().splitlines())
        return sum(int(values[name]) for name in (b"rchar", b"wchar", b"read_bytes"))
    except (OSError, KeyError, ValueError):
        return 0


def _has_gpu(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return any(device in line for line in maps for device in _GPU_DEVICES)
    except OSError:
        return False


def _traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in status)
    except OSError:
        return False
