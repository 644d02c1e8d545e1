"""Reads our control groups, version 1 and 2: memory limit and headroom, CPU quota.

A limit anywhere above us applies to us too, so every directory from ours up to the mount counts. Inside a container
without a cgroup namespace the path in /proc/self/cgroup does not exist below the mount; the walk upwards then ends at
the mount itself, which is the container's own group.

The agent reads it at the start, the sidecar at each sample; the sidecar is in its agent's group. A rank in a deeper one
(a launcher that moves its children) may have less.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

# Version 1 writes "no limit" as the largest multiple of the page size that fits a signed 64-bit number.
_V1_NO_LIMIT_BYTES: Final = 1 << 62
_LIMIT: Final = {1: "memory.limit_in_bytes", 2: "memory.max"}


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """A memory limit and the memory charged to it."""

    limit_bytes: int
    used_bytes: int
    """Without the page cache of files, which the kernel reclaims before it kills for the limit."""

    @property
    def headroom_bytes(self) -> int:
        """What may still be allocated; briefly negative after a limit was lowered."""
        return self.limit_bytes - self.used_bytes


class Cgroups:
    """Finds the groups once, and reads their limits each time, since these can change while we run."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        """`root`: where /proc and /sys are."""
        self._root = os.fspath(root)

    def memory(self) -> GroupMemory | None:
        """Return the group with the least headroom; None without a limit."""
        limited: list[GroupMemory] = []
        for version, directory, limit in self._memory_limits():
            usage = _number(directory, "memory.current" if version == 2 else "memory.usage_in_bytes")
            if usage is None:
                continue
            stat = parse_stat(_read(directory, "memory.stat"))
            total = "" if version == 2 else "total_"  # version 1 also has figures without child groups
            cache = stat.get(f"{total}active_file", 0) + stat.get(f"{total}inactive_file", 0)
            limited.append(GroupMemory(limit_bytes=limit, used_bytes=max(0, usage - cache)))
        return min(limited, key=lambda group: group.headroom_bytes, default=None)

    def memory_limit(self) -> tuple[int | None, str]:
        """Return the lowest memory limit in bytes and its source, or None with the reason."""
        limits = [(limit, f"cgroup v{version} {_LIMIT[version]}") for version, _, limit in self._memory_limits()]
        return min(limits, default=(None, "no cgroup limit"))

    def cpu_quota_cores(self) -> float | None:
        """Return the CPU time that we may use, in cores; None without a quota."""
        quotas: list[float] = []
        for version, directory in self._cpu_groups:
            if version == 2:
                quota, _, period = _read(directory, "cpu.max").partition(" ")
            else:
                quota, period = _read(directory, "cpu.cfs_quota_us"), _read(directory, "cpu.cfs_period_us")
            if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # else `max`, -1, or no such file
                quotas.append(int(quota) / int(period))
        return min(quotas, default=None)

    def _memory_limits(self) -> Iterator[tuple[int, str, int]]:
        """(version, directory, bytes) of each group with a limit."""
        for version, directory in self._memory_groups:
            limit = _number(directory, _LIMIT[version])
            if limit is not None and limit < _V1_NO_LIMIT_BYTES:
                yield version, directory, limit

    @cached_property
    def _memory_groups(self) -> tuple[tuple[int, str], ...]:
        return tuple(_directories(self._root, "memory"))

    @cached_property
    def _cpu_groups(self) -> tuple[tuple[int, str], ...]:
        return tuple(_directories(self._root, "cpu"))


def parse_stat(text: str) -> dict[str, int]:
    """Read lines of a name and a number; lines of another form are left out."""
    pairs = [line.split(" ") for line in text.splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _directories(root: str, controller: str) -> Iterator[tuple[int, str]]:
    """(version, directory) of each of our groups for this controller, from ours up to the mount."""
    own: dict[int, str] = {}
    for line in _read(root, "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            own[1] = path
        elif number == "0":
            own[2] = path
    for line in _read(root, "proc/self/mountinfo").splitlines():
        # man 5 proc_pid_mountinfo: id parent major:minor root mountpoint options [tags ...] - type source superoptions
        before, _, after = line.partition(" - ")
        mount_root, mount_point = [*before.split(" "), "", "", "", "", ""][3:5]
        kind, _, options = [*after.split(" "), "", "", ""][:3]
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and controller in options.split(",") else 0
        if version not in own:
            continue
        path = own[version]
        if mount_root != "/" and (path + "/").startswith(mount_root + "/"):
            path = path[len(mount_root) :]
        top = os.path.join(root, mount_point.lstrip("/"))
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield version, os.path.join(top, *parts[:depth])


def _number(directory: str, name: str) -> int | None:
    text = _read(directory, name)
    return int(text) if text.isdecimal() else None


def _read(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""  # missing, or not readable: no known limit
