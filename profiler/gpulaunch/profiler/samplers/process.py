"""Memory and CPU time of every rank and of the processes below it, from /proc.

Raw /proc, because this runs once a second beside training: `children` of all threads of a process costs about 40 us
where a walk over every process of the node costs 10 ms, and `stat` plus `statm` cost 6 us. Only the proportional set
size is dear (`smaps_rollup`: 5 ms on a process with torch in it, holding the lock that its page faults need), so it
is asked of one process at a time, each at most every `pss_period_s`, within a budget of time per refresh.

A process is known by its pid and its start time, and once known it is followed until it is gone: the kernel documents
that `children` may leave out a living child while others come and go, and an orphan leaves it for ever.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulaunch.profiler.record import Group, RankProcesses, Reading, Role, Usage
from gpulaunch.profiler.samplers.ledger import Ledger

DATALOADER_WORKER = "pt_data_worker"  # torch.multiprocessing._set_thread_name in torch/utils/data/_utils/worker.py
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """What /proc/PID/stat says that we use."""

    comm: str
    state: str
    user_ticks: int
    system_ticks: int
    start_ticks: int
    """Start time since boot: with the pid it names a process for good."""


@dataclass(kw_only=True)
class _Process:
    """A process that belongs to a rank, as last seen."""

    pid: int
    role: Role
    stat: ProcessStat
    rss_bytes: int = 0
    pss_bytes: int | None = None
    pss_due_s: float = float("-inf")

    @property
    def source(self) -> str:
        return f"{self.pid}:{self.stat.start_ticks}"


class ProcessSampler:
    """Follows the processes of every rank."""

    def __init__(
        self,
        group: Callable[[], Group | None],
        ledger: Ledger,
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
        pss_period_s: float = 30.0,
        pss_budget_s: float = 0.010,
    ) -> None:
        self._group = group
        self._ledger = ledger
        self._proc = str(proc)
        self._clock = clock
        self._pss_period_s = pss_period_s
        self._pss_budget_s = pss_budget_s
        self._known: dict[int, dict[int, _Process]] = {}
        self._trainers: dict[int, tuple[int, int]] = {}  # rank -> (attempt, pid) whose process was found

    def read(self, now: float) -> Reading[tuple[RankProcesses, ...]]:
        """Give the processes of every rank of the group; a rank with no process left keeps its CPU seconds."""
        errors: list[str] = []
        group = self._group()
        places = () if group is None else group.ranks
        self._known = {place.rank: self._known.get(place.rank, {}) for place in places}
        for place in places:
            try:
                self._follow(place.rank, (group.attempt if group else 0, place.pid))
            except OSError as error:
                errors.append(f"rank {place.rank}: {error.strerror}")
        errors.extend(self._ask_pss(now))
        values = tuple(self._sum(place.rank) for place in places)
        return Reading(values=values, errors=tuple(errors), late_s=self._clock() - now)

    def _follow(self, rank: int, trainer: tuple[int, int]) -> None:
        known = self._known[rank]
        _, root = trainer
        if self._trainers.get(rank) != trainer:
            # First sight of this attempt's process. Later the pid alone proves nothing: it may have been given to a
            # stranger.
            self._trainers[rank] = trainer
            known.pop(root, None)
            if (stat := self._stat(root)) is not None:
                known[root] = _Process(pid=root, role=Role.TRAINER, stat=stat)
        for process in list(known.values()):
            stat = self._stat(process.pid)
            if stat is None or stat.start_ticks != process.stat.start_ticks:
                del known[process.pid]
            else:
                process.stat = stat
        asked: list[int] = list(known)
        for pid in asked:  # grows while we walk: children of children
            for child in self._children(pid):
                if child not in known and (stat := self._stat(child)) is not None:
                    known[child] = _Process(pid=child, role=Role.WORKERS, stat=stat)
                    asked.append(child)
        for process in known.values():
            process.rss_bytes = self._rss_bytes(process.pid)

    def _ask_pss(self, now: float) -> list[str]:
        """Ask the processes that are due, the longest due first, until the budget of this refresh is spent."""
        errors: list[str] = []
        due = [process for known in self._known.values() for process in known.values() if process.pss_due_s <= now]
        started = self._clock()
        for process in sorted(due, key=lambda process: process.pss_due_s):
            if self._clock() - started >= self._pss_budget_s:
                break
            process.pss_due_s = now + self._pss_period_s
            try:
                text = self._read(process.pid, "smaps_rollup")
            except OSError as error:
                errors.append(f"proportional memory: {error.strerror}")
                continue
            # A zombie holds no memory. Any other process without this file: a kernel that cannot say.
            process.pss_bytes = 0 if process.stat.state == "Z" else parse_pss(text or b"")
        return errors

    def _sum(self, rank: int) -> RankProcesses:
        by_role: dict[Role, list[_Process]] = defaultdict(list)
        for process in self._known[rank].values():
            by_role[process.role].append(process)
        usage: dict[Role, Usage] = {}
        for role in Role:
            processes = by_role[role]
            ticks = {process.source: (process.stat.user_ticks, process.stat.system_ticks) for process in processes}
            user, system = self._ledger.total(f"{rank}/{role.value}", ticks, width=2)
            pss = [process.pss_bytes for process in processes if process.pss_bytes is not None]
            usage[role] = Usage(
                rss_bytes=sum(process.rss_bytes for process in processes),
                pss_bytes=sum(pss) if len(pss) == len(processes) else None,
                cpu_user_s=user / _TICKS_PER_S,
                cpu_system_s=system / _TICKS_PER_S,
            )
        alive = sum(p.stat.comm == DATALOADER_WORKER and p.stat.state not in "ZX" for p in by_role[Role.WORKERS])
        return RankProcesses(rank=rank, usage=usage, workers_alive=alive)

    def _stat(self, pid: int) -> ProcessStat | None:
        text = self._read(pid, "stat")
        return None if text is None else parse_stat(text)

    def _rss_bytes(self, pid: int) -> int:
        text = self._read(pid, "statm")
        return 0 if text is None else parse_resident_pages(text) * _PAGE_BYTES

    def _children(self, pid: int) -> list[int]:
        """Give the children of all threads of a process: a child is listed under the thread that forked it."""
        try:
            threads = os.listdir(f"{self._proc}/{pid}/task")
        except (FileNotFoundError, ProcessLookupError):
            return []
        children: list[int] = []
        for thread in threads:
            text = self._read(pid, f"task/{thread}/children")
            children.extend(int(word) for word in (text or b"").split() if word.isdigit())
        return children

    def _read(self, pid: int, name: str) -> bytes | None:
        """Give the bytes of a file of a process, None if the process is gone (that is life, not an error)."""
        try:
            with open(f"{self._proc}/{pid}/{name}", "rb", buffering=0) as file:
                return file.read()
        except (FileNotFoundError, ProcessLookupError):
            return None


def parse_stat(text: bytes) -> ProcessStat | None:
    """Read /proc/PID/stat, None for what is not one. The name may hold anything: it ends at the LAST bracket."""
    before, bracket, after = text.rpartition(b")")
    _, opening, comm = before.partition(b"(")
    fields = after.split()
    if not bracket or not opening or len(fields) < 20:
        return None
    try:
        user, system, start = (int(fields[index]) for index in (11, 12, 19))  # proc(5) counts from 1 and from the pid
    except ValueError:
        return None
    return ProcessStat(
        comm=comm.decode("utf-8", "replace"),
        state=fields[0].decode("ascii", "replace"),
        user_ticks=user,
        system_ticks=system,
        start_ticks=start,
    )


def parse_resident_pages(text: bytes) -> int:
    """Read the resident pages of /proc/PID/statm; 0 for what is not one (a zombie has none left)."""
    fields = text.split()
    return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0


def parse_pss(text: bytes) -> int | None:
    """Read the proportional set size of /proc/PID/smaps_rollup in bytes; None where there is no such line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == b"Pss:" and words[1].isdigit() and words[2] == b"kB":
            return int(words[1]) * 1024
    return None
