"""Reads the kernel log since an attempt began: victims of the OOM killer, and reports of the NVIDIA driver.

/dev/kmsg gives one record a read, `priority,sequence,microseconds,flags;text`. Reading it needs CAP_SYSLOG where
kernel.dmesg_restrict is set, which is nearly everywhere; without it, or inside a container that does not show it,
nothing is known and nothing is reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpulaunch.profiler.xid import PROGRAM_XIDS

_RECORD_BYTES = 8192  # no record is longer (LOG_LINE_MAX and its dictionary)
_MAX_READS = 20_000
_TEXT_CAP = 1 << 18
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of linux/proc_ns.h

# mm/oom_kill.c, __oom_kill_process() and oom_kill_process():
#   Memory cgroup out of memory: Killed process 812 (python) total-vm:2040kB, ...
#   Out of memory (oom_kill_allocating_task): Killed process 812 (python) total-vm:2040kB, ...
_KILLED = re.compile(
    r"(?:Memory cgroup out|Out) of memory\b[^:\n]*: Killed process (\d+) \(([^\n]{0,64}?)\)(?= total-vm:)"
)
# NVIDIA's kernel_rc.c: NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)[^)]*\): (\d{1,5})(?:, ([^\n]*))?")
_WHO = re.compile(r"^pid='?(?P<pid>\d+|<unknown>)'?(?:, name=[^,]*)?(?:, |$)")


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A process that the kernel's OOM killer killed."""

    pid: int
    """In the host's pid namespace."""
    comm: str
    said: str
    """The kernel's message: `Memory cgroup out of memory: Killed process 812 (python)`."""


@dataclass(frozen=True, kw_only=True)
class Xid:
    """An error that the NVIDIA driver reported."""

    number: int
    card: str
    """Its PCI address: `0000:3b:00`."""
    pid: int | None
    """The affected process, in the host's pid namespace, if the driver knows it."""
    said: str
    """The driver's message after number and process."""


class KernelLog:
    """Lines of the kernel log since `start()`. Never blocks, never raises."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._path = path
        self._fd = -1
        self._text = ""

    def start(self) -> None:
        """Skip earlier records: an attempt begins."""
        self._text = ""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # not permitted
            self._fd = -1

    @property
    def readable(self) -> bool:
        """Whether the log can be read."""
        return self._fd >= 0

    @property
    def numbers_are_ours(self) -> bool:
        """Whether its pids are in this process's pid namespace: not so inside a container."""
        try:
            return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
        except OSError:
            return False

    def text(self) -> str:
        """All relevant records since `start()`."""
        for _ in range(_MAX_READS if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BrokenPipeError:  # the kernel overwrote what was not read in time; the next read continues after it
                continue
            except OSError:  # EAGAIN: no more records
                break
            if not record:
                break
            if (b"ut of memory" in record or b"NVRM: Xid" in record) and len(self._text) < _TEXT_CAP:
                self._text += record.decode("utf-8", "replace")
        return self._text

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def victims(text: str) -> tuple[Victim, ...]:
    """The processes that the OOM killer killed, oldest first."""
    return tuple(Victim(pid=int(found[1]), comm=found[2], said=found[0]) for found in _KILLED.finditer(text))


def xids(text: str) -> tuple[Xid, ...]:
    """The errors that the NVIDIA driver reported, oldest first."""
    found: list[Xid] = []
    for line in _XID.finditer(text):
        rest = line[3] or ""
        who = _WHO.match(rest)
        pid = int(who["pid"]) if who and who["pid"].isdigit() else None
        said = (rest[who.end() :] if who else rest).strip(" .")
        found.append(Xid(number=int(line[2]), card=line[1].rstrip(":."), pid=pid, said=said[:200]))
    return tuple(found)


def xid_evidence(reported: Sequence[Xid]) -> str | None:
    """Return a sentence that names the faulty GPUs; None if only programs caused errors."""
    faults = dict.fromkeys(
        f"Xid {one.number} of GPU {one.card}" + (f" ({one.said})" if one.said else "")
        for one in reported
        if one.number not in PROGRAM_XIDS
    )
    if not faults:
        return None
    shown = list(faults)[:4]
    more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
    return f"the NVIDIA driver reported {', '.join(shown)}{more}"
