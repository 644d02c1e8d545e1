"""The limits of our control group, version 1 and 2: CPU quota and memory.

A limit of any parent group applies too, so every directory from ours up to the mount is read and the tightest counts.
Inside a container without a cgroup namespace the path in /proc/self/cgroup does not exist below the mount; the walk
upwards then ends at the mount itself, which is the container's own group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# Version 1 writes "no limit" as the largest multiple of the page size that fits a signed 64-bit number.
_V1_NO_LIMIT_BYTES = 1 << 62


def cpu_quota(root: str) -> float | None:
    """CPUs' worth of time that our cgroup may use, or None without a quota."""
    quotas: list[float] = []
    for version, directory in _directories(root, "cpu"):
        if version == 2:
            quota, _, period = _read(directory, "cpu.max").partition(" ")
        else:
            quota, period = _read(directory, "cpu.cfs_quota_us"), _read(directory, "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # otherwise `max`, -1, or no such file
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: str) -> tuple[int | None, str]:
    """The memory limit of our cgroup and its source, or None with the reason."""
    limits: list[tuple[int, str]] = []
    for version, directory in _directories(root, "memory"):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        limit = _read(directory, name)
        if limit.isdecimal() and int(limit) < _V1_NO_LIMIT_BYTES:
            limits.append((int(limit), f"cgroup v{version} {name}"))
    return min(limits, default=(None, "no cgroup limit"))


def _directories(root: str, controller: str) -> Iterator[tuple[int, str]]:
    """(version, directory) of each cgroup that contains us for this controller, from ours to the mount."""
    own: dict[int, str] = {}
    for line in _read(root, "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            own[2] = path
        elif controller in controllers.split(","):
            own[1] = path
    for line in _read(root, "proc/self/mountinfo").splitlines():
        # man 5 proc_pid_mountinfo: id parent major:minor root mountpoint options [tags ...] - type source superoptions
        before, _, after = line.partition(" - ")
        mount_root, mount_point = before.split()[3:5]
        kind, _, options = [*after.split(), "", "", ""][:3]
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


def _read(directory: str, name: str) -> str:
    try:
        with open(os.path.join(directory, name), encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # not found: no limit of this kind
