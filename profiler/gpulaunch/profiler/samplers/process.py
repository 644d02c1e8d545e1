"""Samples memory, CPU time and run-queue waits of every rank and the processes below it, from /proc.

Raw /proc, because this runs once a second beside training: `children` of all threads of a process takes about 40 us
where a walk over every process of the node takes 10 ms, and `stat` plus `statm` take 6 us. More expensive reads are
done longest overdue first, within a time budget per refresh:

- the threads of a process (a torch process has dozens): their time on a core and in the run queue, and the children
  started by threads other than the first;
- the proportional set size (`smaps_rollup`: 5 ms on a process with torch in it, holding the lock that its page faults
  need), of each process at most every `pss_period_s`, and never more than `pss_share` of the time;
- the batches in shared memory (all descriptors of a rank and its workers), of each rank at most every `shm_period_s`.

A process is identified by its pid and its start time, and once known it is followed until it is gone: the kernel
documents that `children` may omit a live child while others start and exit, and an orphan disappears from it for good.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gpulaunch.profiler.record import AttemptGroup, RankProcesses, Reading, Role, Usage
from gpulaunch.profiler.samplers import shm
from gpulaunch.profiler.samplers.host import parse_meminfo
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.runqueue import RunQueue, ThreadTimes, parse_schedstat

T = TypeVar("T")
DATALOADER_WORKER = "pt_data_worker"  # torch.multiprocessing._set_thread_name in torch/utils/data/_utils/worker.py
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_READ_BYTES = 65536
_NEVER_S = float("-inf")


@dataclass(frozen=True, kw_only=True)
class ProcessStat:
    """The fields of /proc/PID/stat that we use."""

    comm: str
    state: str
    user_ticks: int
    system_ticks: int
    start_ticks: int
    """Start time since boot: with the pid it identifies a process."""


@dataclass(kw_only=True)
class _Process:
    """A process that belongs to a rank, as last seen."""

    pid: int
    role: Role
    stat: ProcessStat
    rss_bytes: int = 0
    anonymous_bytes: int = 0
    virtual_bytes: int = 0
    pss_bytes: int | None = None
    pss_anonymous_bytes: int | None = None
    pss_due_s: float = _NEVER_S
    threads: RunQueue = field(default_factory=RunQueue)

    @property
    def source(self) -> str:
        return f"{self.pid}:{self.stat.start_ticks}"

    @property
    def living(self) -> bool:
        return self.stat.state not in "ZX"


@dataclass(kw_only=True)
class _Rank:
    """A rank and the processes found below it."""

    rank: int
    attempt: int = -1
    trainer_pid: int = -1
    """The rank's own process in that attempt."""
    hidden: bool = False
    """It runs, but /proc does not show it."""
    known: dict[int, _Process] = field(default_factory=dict[int, _Process])
    inflight: dict[int, shm.Segment] | None = field(default_factory=dict[int, shm.Segment])
    """Batches in shared memory, by inode, at the last sample; None: they cannot be read."""
    shm_due_s: float = _NEVER_S

    @property
    def workers(self) -> list[_Process]:
        """Its live dataloader workers."""
        found = [process for process in self.known.values() if process.role is Role.WORKERS and process.living]
        return [process for process in found if process.stat.comm == DATALOADER_WORKER]

    @property
    def trainer(self) -> _Process | None:
        """Its own process; None if it was not found."""
        return self.known.get(self.trainer_pid)

    @property
    def may_hold(self) -> bool:
        """Whether there may be batches: a rank that has and had no workers has none."""
        return self.inflight is None or bool(self.inflight or self.workers)

    @property
    def holders(self) -> list[int]:
        """The pids of the processes that may hold a batch."""
        trainer = self.trainer
        return [p.pid for p in self.workers] + ([trainer.pid] if trainer is not None and trainer.living else [])


class ProcessSampler:
    """Follows the processes of every rank."""

    def __init__(
        self,
        group: Callable[[], AttemptGroup | None],
        ledger: MonotonicTotals,
        *,
        proc: Path = Path("/proc"),
        shm_dir: Path = Path("/dev/shm"),  # noqa: S108 - where torch puts its segments, not a place of ours
        clock: Callable[[], float] = time.monotonic,
        threads_budget_s: float = 0.002,
        pss_period_s: float = 30.0,
        pss_budget_s: float = 0.010,
        pss_share: float = 0.003,
        shm_period_s: float = 10.0,
        shm_budget_s: float = 0.001,
        lives: Callable[[int], bool] | None = None,
    ) -> None:
        """`lives`: returns, without /proc, whether a process with this pid exists."""
        self._group = group
        self._ledger = ledger
        self._proc = str(proc)
        self._shm_dir = str(shm_dir)
        self._clock = clock
        self._threads_budget_s = threads_budget_s
        self._pss_period_s = pss_period_s
        self._pss_budget_s = pss_budget_s
        self._pss_share = pss_share
        self._pss_rests_until_s = _NEVER_S
        self._shm_period_s = shm_period_s
        self._shm_budget_s = shm_budget_s
        self._ranks: dict[int, _Rank] = {}
        self._waits_counted: bool | None = None
        self._lives = lives or _lives

    def read(self, now: float) -> Reading[tuple[RankProcesses, ...]]:
        """Return the processes of every rank of the group; a rank with no process left keeps its CPU seconds."""
        errors: list[str] = []
        group = self._group()
        places = () if group is None else group.ranks
        self._ranks = {place.rank: self._ranks.get(place.rank, _Rank(rank=place.rank)) for place in places}
        if self._waits_counted is None and not self._find_out_about_waits():
            errors.append("run queue: this kernel does not count it")
        for place in places:
            rank = self._ranks[place.rank]
            try:
                self._follow(rank, group.attempt if group else 0, place.pid)
            except OSError as error:
                errors.append(f"rank {place.rank}: {error.strerror}")
            else:
                if rank.hidden:
                    errors.append(f"rank {place.rank}: /proc does not show its process")
        errors.extend(self._look_at_threads(now))
        errors.extend(self._ask_pss(now))
        errors.extend(self._ask_shm(now))
        values = tuple(self._sum(rank) for rank in self._ranks.values() if not rank.hidden)
        absent = "/proc does not show the processes of the ranks" if places and not values else ""
        return Reading(values=values, absent=absent, errors=tuple(errors), late_s=self._clock() - now)

    def _find_out_about_waits(self) -> bool:
        try:
            text = self._read("self", "schedstat")
        except OSError:  # an unreadable /proc is treated as none
            text = None
        self._waits_counted = text is not None and parse_schedstat(text) is not None
        return self._waits_counted

    def _follow(self, rank: _Rank, attempt: int, root: int) -> None:
        known = rank.known
        if (rank.attempt, rank.trainer_pid) != (attempt, root) or rank.hidden:
            # First sample of this attempt's process. Later the pid alone proves nothing: it may have been reused.
            rank.attempt, rank.trainer_pid = attempt, root
            rank.inflight, rank.shm_due_s = {}, _NEVER_S
            known.pop(root, None)
            rank.hidden = True  # unless it is found now, or known to be gone: mount option hidepid, or a foreign /proc
            if (stat := self._stat(root)) is not None:
                known[root] = _Process(pid=root, role=Role.TRAINER, stat=stat)
            rank.hidden = stat is None and self._lives(root)
        for process in list(known.values()):
            stat = self._stat(process.pid)
            if stat is None or stat.start_ticks != process.stat.start_ticks:
                del known[process.pid]
            else:
                process.stat = stat
        asked: list[int] = list(known)
        for pid in asked:  # grows while we walk: children of children
            asked.extend(self._adopt(rank, self._children(pid, pid)))
        for process in known.values():
            pages = parse_statm(self._read(process.pid, "statm") or b"")
            process.rss_bytes, process.anonymous_bytes, process.virtual_bytes = (n * _PAGE_BYTES for n in pages)

    def _adopt(self, rank: _Rank, children: Iterable[int]) -> list[int]:
        """Follow the new ones from now on; return their pids."""
        adopted: list[int] = []
        for child in children:
            if child not in rank.known and (stat := self._stat(child)) is not None:
                rank.known[child] = _Process(pid=child, role=Role.WORKERS, stat=stat)
                adopted.append(child)
        return adopted

    def _look_at_threads(self, now: float) -> list[str]:
        """Read the run queue of all threads, and the children started by threads other than the first."""
        errors: list[str] = []
        due = [(process, rank) for rank in self._ranks.values() for process in rank.known.values() if process.living]
        due.sort(key=lambda item: item[0].threads.looked_s)
        for process, rank in self._within(self._threads_budget_s, due):
            threads: dict[int, ThreadTimes] = {}
            try:
                for tid in self._threads(process.pid):
                    text = self._read(process.pid, f"task/{tid}/schedstat") if self._waits_counted else None
                    if text is not None and (times := parse_schedstat(text)) is not None:
                        threads[tid] = times
                    if tid != process.pid:
                        self._adopt(rank, self._children(process.pid, tid))
            except OSError as error:
                errors.append(f"threads of rank {rank.rank}: {error.strerror}")
            process.threads.look(threads, now)
        return errors

    def _ask_pss(self, now: float) -> list[str]:
        """Read the proportional set size of the processes that are due.

        Where that takes long (page tables in a nested virtual machine: 15 ms), it is done less often.
        """
        errors: list[str] = []
        began_s = self._clock()
        latest_s = now if now >= self._pss_rests_until_s else _NEVER_S  # never read: due at once
        processes = [process for rank in self._ranks.values() for process in rank.known.values()]
        due = [process for process in processes if process.pss_due_s <= latest_s]
        for process in self._within(self._pss_budget_s, sorted(due, key=lambda process: process.pss_due_s)):
            process.pss_due_s = now + self._pss_period_s
            try:
                text = self._read(process.pid, "smaps_rollup")
            except OSError as error:
                errors.append(f"proportional memory: {error.strerror}")
                continue
            # A zombie holds no memory. For any other process, a missing file or line means that the kernel lacks it.
            sizes = parse_meminfo(text or b"")  # the same format
            process.pss_bytes = sizes.get("Pss") if process.living else 0
            process.pss_anonymous_bytes = sizes.get("Pss_Anon") if process.living else 0
        if due:
            self._pss_rests_until_s = now + (self._clock() - began_s) / self._pss_share
        return errors

    def _ask_shm(self, now: float) -> list[str]:
        """Read the batches of the ranks that are due."""
        errors: list[str] = []
        due = [r for r in self._ranks.values() if r.shm_due_s <= now and r.may_hold]
        for rank in self._within(self._shm_budget_s, sorted(due, key=lambda rank: rank.shm_due_s)):
            rank.shm_due_s = now + self._shm_period_s
            try:
                rank.inflight = shm.batches(self._proc, self._shm_dir, rank.holders, trainer_pid=rank.trainer_pid)
            except OSError as error:
                rank.inflight = None
                errors.append(f"shared memory of rank {rank.rank}: {error.strerror}")
        return errors

    def _within(self, budget_s: float, items: Iterable[T]) -> Iterator[T]:
        """Yield the items until this much time has passed."""
        started = self._clock()
        for item in items:
            if self._clock() - started >= budget_s:
                return
            yield item

    def _sum(self, rank: _Rank) -> RankProcesses:
        by_role: dict[Role, list[_Process]] = defaultdict(list)
        for process in rank.known.values():
            by_role[process.role].append(process)
        usage: dict[Role, Usage] = {}
        runqueue_s: dict[Role, float] = {}
        for role in Role:
            processes = by_role[role]
            used = {p.source: (p.stat.user_ticks, p.stat.system_ticks, p.threads.waited_ns) for p in processes}
            user, system, waited_ns = self._ledger.total(f"{rank.rank}/{role.value}", used, width=3)
            usage[role] = Usage(
                rss_bytes=sum(process.rss_bytes for process in processes),
                pss_bytes=_sum_known(process.pss_bytes for process in processes),
                cpu_user_s=user / _TICKS_PER_S,
                cpu_system_s=system / _TICKS_PER_S,
                anonymous_bytes=sum(process.anonymous_bytes for process in processes),
                virtual_bytes=sum(process.virtual_bytes for process in processes),
                pss_anonymous_bytes=_sum_known(process.pss_anonymous_bytes for process in processes),
            )
            if self._waits_counted:
                runqueue_s[role] = waited_ns / 1e9
        wanting = [
            p.threads.runnable_threads
            for p in rank.known.values()
            if p.living and p.threads.runnable_threads is not None
        ]
        return RankProcesses(
            rank=rank.rank,
            usage=usage,
            workers_alive=len(rank.workers),
            worker_cores=self._worker_cores(rank),
            runqueue_s=runqueue_s,
            main_thread_s=None if rank.trainer is None else rank.trainer.threads.wanted_s(rank.trainer.pid),
            threads=sum(wanting) if wanting and self._waits_counted else None,
            shm_inflight_bytes=_by_maker(rank),
        )

    def _worker_cores(self, rank: _Rank) -> frozenset[int]:
        cores: set[int] = set()
        for process in rank.workers if self._proc == "/proc" else ():  # a pid of another /proc is another process here
            with suppress(OSError):  # it has ended
                cores |= os.sched_getaffinity(process.pid)
        return frozenset(cores)

    def _stat(self, pid: int) -> ProcessStat | None:
        text = self._read(pid, "stat")
        return None if text is None else parse_stat(text)

    def _threads(self, pid: int) -> list[int]:
        try:
            return [int(name) for name in os.listdir(f"{self._proc}/{pid}/task")]
        except (FileNotFoundError, ProcessLookupError):
            return []

    def _children(self, pid: int, tid: int) -> list[int]:
        """Return the children started by a thread: they are listed under it, not under the process."""
        text = self._read(pid, f"task/{tid}/children")
        return [int(word) for word in (text or b"").split() if word.isdigit()]

    def _read(self, pid: int | str, name: str) -> bytes | None:
        """Return the bytes of a file of a process; None if the process is gone (which is not an error)."""
        try:
            fd = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)  # a file object makes more calls
            try:
                text = b""
                while chunk := os.read(fd, _READ_BYTES):
                    text += chunk
                return text
            finally:
                os.close(fd)
        except (FileNotFoundError, ProcessLookupError):
            return None


def _lives(pid: int) -> bool:
    """Whether the process exists: by signal 0, regardless of what /proc shows."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def parse_stat(text: bytes) -> ProcessStat | None:
    """Parse /proc/PID/stat; None if invalid. The name may contain anything: it ends at the LAST bracket."""
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
    """Parse the resident pages of /proc/PID/statm; 0 if invalid (a zombie has none left)."""
    return parse_statm(text)[0]


def parse_statm(text: bytes) -> tuple[int, int, int]:
    """Parse /proc/PID/statm: resident pages, how many of them are anonymous, and pages of address space in use. The
    resident ones that are not anonymous are files and shared memory.

    A forked process and its parent both count the pages that they share.
    """
    fields = text.split()[:3]
    if len(fields) < 3 or not all(field.isdigit() for field in fields):
        return 0, 0, 0
    virtual, resident, shared = map(int, fields)
    return resident, max(0, resident - shared), virtual  # the first two are not counted at the same instant


def _by_maker(rank: _Rank) -> dict[int, int] | None:
    """Return the bytes of a rank's batches by the worker that made them; None if unreadable, or not read yet."""
    if rank.inflight is None or (rank.may_hold and rank.shm_due_s == _NEVER_S):
        return None
    size_bytes: dict[int, int] = defaultdict(int)
    for segment in rank.inflight.values():
        size_bytes[segment.maker_pid] += segment.size_bytes
    return dict(size_bytes)


def _sum_known(sizes: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of them is not known."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
