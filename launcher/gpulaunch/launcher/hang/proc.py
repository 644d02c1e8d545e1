"""Reads from /proc one rank and its descendants: states, CPU time, bytes, a debugger, a GPU.

Used by the helper process, and only while a rank is suspected. A process that exits during the reading counts with the
values read until then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpulaunch.launcher.hang import sockets
from gpulaunch.launcher.loop import linux

_MAX_PROCESSES = 256
"""A rank with more children than this is busy anyway."""
_GPU_DEVICES = tuple(f"/dev/{name}" for name in ("nvidia", "kfd", "dri/", "accel", "davinci", "neuron", "dxg"))
"""Device files: NVIDIA, AMD, Intel, Gaudi and TPU, Ascend, Trainium, a GPU in WSL."""

# futex, futex_wait (455 everywhere), nanosleep, clock_nanosleep, pause, rt_sigsuspend: arch/x86/entry/syscalls/
# syscall_64.tbl, include/uapi/asm-generic/unistd.h.
_WITHIN = {"x86_64": {202, 455, 35, 230, 34, 130}, "aarch64": {98, 455, 101, 115, 133}}.get(os.uname().machine, set())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The present values of one rank."""

    state: str
    """State letter of the main thread; "" when the process is gone."""
    main_ticks: int = 0
    own_ticks: int = 0
    tree_ticks: int = 0
    main_delay_s: float = 0.0
    running: tuple[int, ...] = ()
    """Its descendants that run or wait for a core."""
    wanted_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """How long the first thread of each descendant has run, or been ready to without a core."""
    io_bytes: int = 0
    workers: tuple[int, ...] = ()
    """Its dataloader workers."""
    gpu: bool = False
    traced: bool = False


def read(pid: int, socket_bytes: Mapping[str, int]) -> Reading:
    """Read the process tree of one rank.

    Args:
        pid: the rank's process.
        socket_bytes: the present result of `sockets.bytes_by_socket`.
    """
    own = _stat(f"/proc/{pid}/stat")
    if own is None:
        return Reading(state="")
    main = _stat(f"/proc/{pid}/task/{pid}/stat") or own
    below = linux.descendants_of(pid)[:_MAX_PROCESSES]
    workers = tuple(one for one in below if linux.comm_of(one) == linux.LOADER_WORKER)
    stats = [(one, stat) for one in below if (stat := _stat(f"/proc/{one}/stat")) is not None]
    io_bytes = sum(_io_bytes(f"/proc/{one}/io") for one in (pid, *below))  # e.g. a copy by rsync is the rank's work
    inodes = {inode for one in (pid, *below) for inode in _sockets(one)}
    io_bytes += sum(socket_bytes.get(inode, 0) for inode in inodes)
    return Reading(
        state=main[0],
        main_ticks=main[1],
        own_ticks=own[1],
        tree_ticks=sum(own[1:]) + sum(own_ticks + dead_ticks for _, (_, own_ticks, dead_ticks) in stats),
        main_delay_s=_scheduled_s(pid)[1],
        running=tuple(one for one, (state, *_) in stats if state == "R"),
        wanted_s={one: sum(_scheduled_s(one)) for one, _ in stats},
        io_bytes=io_bytes,
        workers=workers,
        gpu=_has_gpu(pid),
        traced=_traced(pid),
    )


def waits_within(pid: int, thread: int) -> bool:
    """Whether a thread sleeps or waits for another thread: not for a file, pipe or socket, which may still answer.

    False if that may not be read.
    """
    try:
        with open(f"/proc/{pid}/task/{thread}/syscall", "rb") as syscall:
            return int(syscall.read().split()[0]) in _WITHIN
    except (OSError, IndexError, ValueError):  # "running" instead of a number
        return False


def _stat(path: str) -> tuple[str, int, int] | None:
    """State, CPU ticks of its own, and CPU ticks of its children that are dead and waited for; proc(5) 3, 14-17."""
    try:
        with open(path, "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    except (OSError, IndexError, ValueError):
        return None


def _scheduled_s(pid: int) -> tuple[float, float]:
    """How long the main thread has run, and been ready to run without a core; 0 if the kernel does not count it.

    Documentation/scheduler/sched-stats.rst: the first values of `/proc/<pid>/schedstat`, in nanoseconds.
    """
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as schedstat:
            run_ns, delay_ns, *_ = map(int, schedstat.read().split())
            return run_ns / 1e9, delay_ns / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def _io_bytes(path: str) -> int:
    """Bytes read and written by calls, and by page faults; 0 if that may not be read."""
    try:
        with open(path, "rb") as io:
            values = dict(line.split(b": ", 1) for line in io.read().splitlines())
        return sum(int(values[name]) for name in (b"rchar", b"wchar", b"read_bytes"))
    except (OSError, KeyError, ValueError):
        return 0


def _sockets(pid: int) -> set[str]:
    with contextlib.suppress(OSError):
        return sockets.sockets_of(pid)
    return set()


def _has_gpu(pid: int) -> bool:
    """Whether it has one open; True if that may not be read, which proves less."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(_GPU_DEVICES):
                    return True
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return any(device in line for line in maps for device in _GPU_DEVICES)
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, ProcessLookupError))  # in these cases it has exited


def _traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in status)
    except OSError:
        return False
