"""Makes a trace of ranks of an active run: requests it, waits for it, and measures its cost.

The process that runs this is the daemon that torch's trace clients in the ranks ask; nothing else of the run takes
part, so a trace can be made with the sidecar dead. What ranks do is in `profiler.probe.kineto`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from gpulaunch.launcher.cli.trace_result import Copied, Rss, TraceResult
from gpulaunch.launcher.cli.waiting import Activity
from gpulaunch.launcher.runs.processes import Process
from gpulaunch.profiler.channel import tracing
from gpulaunch.profiler.channel.clock import anchor, monotonic_ns, wall_ns
from gpulaunch.profiler.channel.ring import StepEvent, recent_from
from gpulaunch.profiler.channel.segment import SegmentReader
from gpulaunch.profiler.daemon.kineto import ClientRequest, Daemon, order
from gpulaunch.profiler.daemon.tracefile import Contents, TraceFileError, TraceFileWatch, contents_of, part_name
from gpulaunch.profiler.daemon.window import Span, Window, is_back, speed_of, window

_LOOK_S = 0.1
MISSED_AFTER_NS = 2_000_000_000
"""Kineto creates the file before the window begins; this long after its end there will be none."""
STALLED_AFTER_NS = 60_000_000_000
"""How long a trace being written may stop growing before it is given up."""
SETTLE_TIMEOUT_NS = 30_000_000_000
"""How long a rank may take to return to its speed."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Rank:
    """One rank: its process, held by pidfd, its segment, and the state of its trace."""

    number: int
    process: Process
    segment: SegmentReader
    last_step: int = -1
    """When the tracing began."""
    before: dict[int, Span] = field(default_factory=dict[int, Span])
    """By number: steps that had ended when the rank might have received its order."""
    during: dict[int, Span] = field(default_factory=dict[int, Span])
    """By number: steps that overlap the window."""
    rss_bytes: list[int] = field(default_factory=list[int])
    ordered: bool = False
    busy: bool = False
    """It asked, but another trace is active in it."""
    ended: bool = False
    moved_ns: int = 0
    """When its trace was last seen to grow."""
    copied: list[Counter[str]] = field(default_factory=list[Counter[str]])
    """Bytes copied, by direction, as seen by the probe: at the start and the end of the window."""
    contents: Contents | None = None
    whole: bool = False
    trouble: str = ""

    @property
    def open(self) -> bool:
        """Its trace may still arrive."""
        return not self.trouble and not self.whole

    def steps(self) -> list[StepEvent]:
        """Its last steps."""
        return recent_from(self.segment)

    def note_steps(self, of_all: Window) -> None:
        """Record those of its last steps that are relevant."""
        steps = [Span(event.step, event.start_ns, event.duration_ns) for event in self.steps()]
        self.before.update((span.step, span) for span in of_all.before(steps))
        self.during.update((span.step, span) for span in of_all.touched(steps))

    def note_copies(self) -> None:
        """Record the copies that the probe has seen."""
        copied: Counter[str] = Counter()
        for (direction, _), copies in self.segment.read().copies.items():
            copied[direction] += copies.size_bytes
        self.copied.append(copied)

    def note_rss(self) -> None:
        """Record its present memory."""
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.process.pid}/statm", "rb") as statm:
            self.rss_bytes.append(int(statm.read().split()[1]) * _PAGE_BYTES)


class Tracer:
    """Makes one trace of some ranks, all in the same window."""

    def __init__(self, ranks: Sequence[Rank], *, channel_dir: str, directory: str, what: Sequence[str]) -> None:
        """`directory`: where the traces go; it exists. `what`: names of `kineto.WHAT`."""
        self._ranks = ranks
        self._channel_dir = channel_dir
        self._directory = directory
        self._what = what
        self._poller = select.poll()
        self._by_fd = {rank.process.pidfd: rank for rank in ranks}
        self._by_pid = {rank.process.pid: rank for rank in ranks}
        self._files: dict[int, TraceFileWatch] = {}

    def make(self, *, duration_s: float, step_s: float, tell: Callable[[Window], Activity]) -> list[TraceResult]:
        """Make it, which takes about ten seconds more than the window itself. Raises OSError.

        Args:
            duration_s: how long the window is.
            step_s: how long a step of the slowest rank takes.
            tell: called with the window once it is known; its result then shows the progress.
        """
        for fd in self._by_fd:
            self._poller.register(fd, select.POLLIN)
        has_gpu = any(rank.segment.read().gpu.reserved_bytes for rank in self._ranks)
        of_all = window(monotonic_ns(), step_s=step_s, duration_s=duration_s, has_gpu=has_gpu)
        doing = tell(of_all)
        for rank in self._ranks:
            rank.note_steps(of_all)
            rank.last_step = max(rank.before, default=-1)
        link = tracing.traces_path(self._channel_dir)
        with self._apart() as parts:
            self._files = {rank.number: TraceFileWatch(parts, rank.number) for rank in self._ranks}
            try:
                # The ranks get a path through this link: its characters are safe, whatever the directory's name.
                _remove(link)
                os.symlink(self._directory, link)
                self._order(of_all, os.path.join(link, os.path.basename(parts)))
                self._record(of_all, doing)
                self._collect(of_all, doing)
            finally:
                _remove(link)
                _remove(tracing.socket_path(self._channel_dir))  # if Ctrl-C came between its creation and its `with`
        return self._settle(of_all, doing)

    @contextlib.contextmanager
    def _apart(self) -> Generator[str]:
        """Make a directory for unfinished files inside that of the traces; a file left in it is no trace.

        Its name is new, so it contains no older trace, and none that was interrupted and is written only now. Other
        users cannot read it: a trace shows paths and shapes, and a rank's umask is not ours.
        """
        parts = tempfile.mkdtemp(prefix=".part-", dir=self._directory)
        try:
            for rank in self._ranks[:1]:  # all belong to one user, who is not root even if root traces them
                with contextlib.suppress(OSError):
                    os.chown(parts, os.stat(f"/proc/{rank.process.pid}").st_uid, -1)
            yield parts
        finally:
            shutil.rmtree(parts, ignore_errors=True)

    def _order(self, of_all: Window, parts: str) -> None:
        """Give all ranks the order; ranks that do not fetch it in time have no trace.

        The socket exists no longer than that: a late answer, because this process was busy, would be taken for the
        answer to a later question.
        """
        texts = {rank.number: self._text(rank, of_all, parts) for rank in self._ranks}

        def order_for(ask: ClientRequest) -> str:
            rank = self._by_pid.get(ask.pid)
            if rank is None or rank.ordered:
                return ""
            rank.busy = not ask.free
            return texts[rank.number] if ask.free else ""

        with Daemon(self._channel_dir) as daemon:
            self._poller.register(daemon, select.POLLIN)
            while any(rank.open and not rank.ordered for rank in self._ranks) and monotonic_ns() < of_all.orders_ns:
                self._wait()
                for pid in daemon.answer(order_for):
                    self._by_pid[pid].ordered = True
                for rank in self._ranks:
                    if rank.open and not rank.ordered:
                        rank.trouble = tracing.refused(self._channel_dir, rank.number, rank.process.pid)
            self._poller.unregister(daemon)
        for rank in self._ranks:
            if rank.open and not rank.ordered:
                rank.trouble = _why_not(rank)

    def _text(self, rank: Rank, of_all: Window, parts: str) -> str:
        return order(
            os.path.join(parts, part_name(rank.number)),
            start_ms=wall_ns(of_all.start_ns, anchor()) // 1_000_000,
            duration_ms=(of_all.end_ns - of_all.start_ns) // 1_000_000,
            warmup_s=of_all.warmup_s,
            what=self._what,
        )

    def _record(self, of_all: Window, doing: Activity) -> None:
        """Wait until the window is over, and record what the ranks do in it."""
        for edge_ns in (of_all.start_ns, of_all.end_ns):
            while (now_ns := monotonic_ns()) < edge_ns and any(rank.open for rank in self._ranks):
                if now_ns >= of_all.start_ns:
                    share = (now_ns - of_all.start_ns) / (of_all.end_ns - of_all.start_ns)
                    doing(self._steps_seen(), share)
                self._wait(until_s=(edge_ns - now_ns) / 1e9)
                for rank in self._ranks:
                    if rank.open:
                        rank.note_steps(of_all)
            for rank in self._ranks:
                rank.note_copies()

    def _steps_seen(self) -> str:
        """How many steps all ranks have made in the window."""
        count = min((len(rank.during) for rank in self._ranks if rank.open), default=0)
        return f"recording, {count} step{'' if count == 1 else 's'}"

    def _collect(self, of_all: Window, doing: Activity) -> None:
        """Wait until all traces are written, and collect them."""
        while any(rank.open for rank in self._ranks):
            there = sum(rank.whole for rank in self._ranks)
            coming = sum(rank.open for rank in self._ranks)
            doing(f"writing, {there} of {there + coming} traces are complete", there / (there + coming))
            self._wait()
            for rank in self._ranks:
                try:
                    if rank.open:
                        self._take(rank, of_all)
                except OSError as error:
                    rank.trouble = f"its trace cannot be read: {error.strerror}"

    def _take(self, rank: Rank, of_all: Window) -> None:
        """Check a rank's trace: whether it is complete, or will never be."""
        file, now_ns = self._files[rank.number], monotonic_ns()
        before = file.path, file.size_bytes
        if file.look() and self._named(rank, file.path):
            return
        if before != (file.path, file.size_bytes) or not rank.moved_ns:
            rank.moved_ns = now_ns
        if not file.path and now_ns > of_all.end_ns + MISSED_AFTER_NS:
            rank.trouble = "torch missed the start, or could not write; try again"
        elif now_ns - rank.moved_ns > STALLED_AFTER_NS:
            named = file.path.endswith(".json")
            rank.trouble = (
                "its trace is incomplete" if named else "torch cancelled it: did the program use torch.profiler?"
            )

    def _named(self, rank: Rank, path: str) -> bool:
        """Rename a file to its final name if it is a complete trace."""
        try:
            rank.contents = contents_of(path)
        except TraceFileError:  # it may be between two writes
            return False
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
        finally:
            os.close(fd)
        os.replace(path, os.path.join(self._directory, file_name(rank.number)))
        rank.whole = True
        return True

    def _settle(self, of_all: Window, doing: Activity) -> list[TraceResult]:
        """Wait until the ranks are as fast as before, or the deadline; return the result of each."""
        written_ns = monotonic_ns()
        until_ns = written_ns + SETTLE_TIMEOUT_NS
        doing(f"waiting until ranks are as fast as before, {SETTLE_TIMEOUT_NS / 1e9:.0f} s at most")
        while True:
            results = [self._result(rank, of_all, written_ns) for rank in self._ranks]
            slow = [
                rank
                for rank, result in zip(self._ranks, results, strict=True)
                if rank.whole and not rank.ended and result.before is not None and not result.back
            ]
            if not slow or monotonic_ns() > until_ns:
                return results
            self._wait()

    def _result(self, rank: Rank, of_all: Window, written_ns: int) -> TraceResult:
        rank.note_rss()
        rank.note_steps(of_all)  # one that was cut by the end of the window is over by now
        inside = of_all.inside(rank.during.values())
        before = speed_of(rank.before.values())
        after = speed_of(event for event in rank.steps() if event.start_ns >= written_ns)
        rss = None
        if rank.rss_bytes:
            first, most, last = rank.rss_bytes[0], max(rank.rss_bytes), rank.rss_bytes[-1]
            rss = Rss(before_bytes=first, during_bytes=most, after_bytes=last)
        return TraceResult(
            rank=rank.number,
            pid=rank.process.pid,
            path=os.path.join(self._directory, file_name(rank.number)) if rank.whole else "",
            trouble=rank.trouble,
            size_bytes=self._files[rank.number].size_bytes,
            num_events=rank.contents.num_events if rank.contents is not None else None,
            first_step=min((span.step for span in inside), default=None),
            num_steps=len(inside),
            before=before,
            during=speed_of(inside or rank.during.values()),
            after=after,
            back=is_back(before, after) if before and after else None,
            rss=rss,
            copied=_copied(rank),
        )

    def _wait(self, until_s: float = _LOOK_S) -> None:
        """Wait at most this long, until a rank asks or ends."""
        for fd, _ in self._poller.poll(min(_LOOK_S, until_s) * 1000):
            rank = self._by_fd.get(fd)
            if rank is not None:
                self._poller.unregister(fd)
                rank.ended = True
                if rank.open:
                    rank.trouble = "it has ended"
        for rank in self._ranks:
            if rank.open:
                rank.note_rss()


def file_name(rank: int) -> str:
    """The file name of a rank's trace."""
    return f"rank-{rank}.json"


def _why_not(rank: Rank) -> str:
    """Why a rank has not fetched its order."""
    if rank.busy:
        return "the program uses torch.profiler itself"
    if max((event.step for event in rank.steps()), default=-1) == rank.last_step:
        return "it has completed no step since the request, and requests are read at the end of a step"
    return "its torch trace client did not fetch the request"


def _copied(rank: Rank) -> dict[str, Copied]:
    """What the GPU copied in the window, by its trace and by the probe's own ledger."""
    if rank.contents is None or not rank.contents.copied_bytes:
        return {}
    at_start, at_end = rank.copied[0], rank.copied[-1]
    return {
        direction: Copied(traced_bytes=size_bytes, ledger_bytes=at_end[direction] - at_start[direction])
        for direction, size_bytes in sorted(rank.contents.copied_bytes.items())
    }


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
