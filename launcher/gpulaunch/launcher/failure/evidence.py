"""Collects facts from outside a rank: the kernel's OOM killer, free space in /dev/shm, the files next to error.json.

Each fact is one sentence. The rule table in `classify.py` matches text in them: `OOM killer struck`, `/dev/shm`,
`Xid`, `ECC`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpulaunch.launcher.failure.ends import SHM
from gpulaunch.launcher.failure.errors import RankError, examine, read_bounded
from gpulaunch.launcher.failure.kernel_log import KernelLog, victims
from gpulaunch.launcher.loop import linux

FAULT_FILE = "fault.log"  # as in `inside.py`, which the agent does not import: it is for the rank
EXIT_FILE = "exit.json"
THREAD_ERROR_FILE = "thread-error.json"

_FAULT_CAP_BYTES = 65_536
_SHM_SMALL_BYTES = 64 << 20  # a container runtime's default
_SHM_FULL_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What a rank left in its own directory."""

    error: RankError | None
    fault: str | None
    evidence: tuple[str, ...]


def read_rank_evidence(rank_dir: str) -> RankEvidence:
    """Read all files that a dead rank left in `<job dir>/attempts/<k>/rank-<r>`. Never raises."""
    error, complaint = examine(os.path.join(rank_dir, "error.json"))
    if error is None and complaint is None:
        error, complaint = examine(os.path.join(rank_dir, EXIT_FILE))
    thread_error = examine(os.path.join(rank_dir, THREAD_ERROR_FILE))[0]
    evidence = [complaint] if complaint else []
    if thread_error is not None:
        evidence.append(f"a thread of this rank had ended by {thread_error.headline}")
    fault = read_bounded(os.path.join(rank_dir, FAULT_FILE), _FAULT_CAP_BYTES)
    return RankEvidence(
        error=error, fault=fault.decode("utf-8", "replace") if fault else None, evidence=tuple(evidence)
    )


class OomWatch:
    """Detects whether the OOM killer killed a rank: `start()` before an attempt, `evidence(pid)` after a death.

    The kernel log names the victims, if it is readable. Otherwise counters are used: of the rank's own cgroup if
    `watch(pid)` could read it, else of the agent's (v2 `memory.events`, v1 `memory.oom_control`; a kill for the limit
    of a parent cgroup also counts here, because the victim's cgroup counts it); if that has no counter (the root cgroup
    of v2), the counter of the whole host. The kernel counts before it sends SIGKILL, so at the time of the death the
    counter is already up. One kill explains one death.
    """

    def __init__(self, root: str = "/", log: KernelLog | None = None) -> None:
        self._root = root
        self.log = log or KernelLog()
        self._own = ""
        self._of_rank: dict[int, str] = {}  # pid -> the file with its counter
        self._before: dict[str, int] = {}  # by file

    def start(self) -> None:
        """Record the counter and the position in the log; an attempt begins."""
        self.log.start()
        self._before.clear()
        self._of_rank.clear()
        self._own = self._find("self")

    def watch(self, pid: int) -> None:
        """Record the cgroup of a live rank, which may be deeper than the agent's. May be called repeatedly."""
        if linux.state_of(pid) not in ("Z", "X"):  # version 1 says "/" of a dead process
            path = self._find(str(pid))
            if path and not path.endswith("vmstat"):
                self._of_rank[pid] = path

    def evidence(self, pid: int | None = None) -> str | None:
        """Report that the OOM killer killed a process since `start()`; None if it did not, or if that is unknown.

        Args:
            pid: the rank that died; without it the log, which is by pid, is not used.
        """
        path = self._of_rank.get(pid, self._own) if pid is not None else self._own
        before, count = self._before.get(path, 0), (_counter(path) if path else None) or 0
        killed = victims(self.log.text()) if pid is not None and self.log.numbers_are_ours else ()
        mine = [victim.said for victim in killed if victim.pid == pid]
        others = [victim.said for victim in killed if victim.pid not in self._of_rank]
        if not mine and (count <= before or (killed and not others)):
            return None
        if count > before:
            self._before[path] = before + 1
        if mine:
            return f"the kernel's OOM killer struck this rank ({mine[0]})"
        if others:
            return f"the kernel's OOM killer killed another process ({'; '.join(others[-4:])})"
        if path.endswith("vmstat"):
            where = "somewhere on this host (/proc/vmstat"
        else:
            whose = "job" if path == self._own else "rank"
            where = f"in this {whose}'s cgroup ({_limit(path)}{os.path.basename(path)}"
        return f"the kernel's OOM killer struck {where}: oom_kill {before} -> {count})"

    def _find(self, process: str) -> str:
        """The file with the counter that applies to a process; its value is recorded when first seen."""
        for path in self._candidates(process):
            count = _counter(path)
            if count is not None:
                self._before.setdefault(path, count)
                return path
        return ""

    def _candidates(self, process: str) -> list[str]:
        cgroups = os.path.join(self._root, "sys/fs/cgroup")
        found: list[str] = []
        for line in (
            (read_bounded(os.path.join(self._root, f"proc/{process}/cgroup"), 65_536) or b"")
            .decode("utf-8", "replace")
            .splitlines()
        ):
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            path = path.lstrip("/")
            if "memory" in controllers.split(","):
                # In a container the path is the host's, and the container's own cgroup is mounted in its place.
                found += [os.path.join(cgroups, "memory", place, "memory.oom_control") for place in (path, "")]
            elif number == "0":
                found += [os.path.join(cgroups, place, "memory.events") for place in (path, "")]
        return [*found, os.path.join(self._root, "proc/vmstat")]


def _limit(counter: str) -> str:
    directory = os.path.dirname(counter)
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = (read_bounded(os.path.join(directory, name), 64) or b"").strip()
        if text.isdigit() and int(text) < 1 << 60:  # v1 says "no limit" by a number near 2^63
            return f"limit {int(text) / (1 << 30):.1f} GiB, "
    return ""


def shm_evidence(root: str = "/") -> str | None:
    """Report that /dev/shm is full or small: a reason for SIGBUS. None if there is plenty of space."""
    try:
        room = os.statvfs(os.path.join(root, SHM.lstrip("/")))
    except OSError:
        return None
    total_bytes, free_bytes = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return shm_sentence(total_bytes, free_bytes)


def shm_sentence(total_bytes: int, free_bytes: int) -> str | None:
    """Judge the space in /dev/shm. The dead rank's share is already freed, so a small total is evidence as well."""
    used_share = 1 - free_bytes / total_bytes if total_bytes else 0.0
    if total_bytes > _SHM_SMALL_BYTES and used_share < _SHM_FULL_SHARE:
        return None
    return f"{SHM} has {free_bytes / (1 << 20):.0f} of {total_bytes / (1 << 20):.0f} MiB free"


def _counter(path: str) -> int | None:
    """Read the `oom_kill` line of a file of `name value` lines."""
    for line in (read_bounded(path, 65_536) or b"").splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.strip().isdigit():
            return int(value)
    return None
