"""Read what the ranks say: a pipe for each stream, on the agent's loop."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.logs.console import Console
from gpulaunch.launcher.logs.files import FilteredFile, LogFile
from gpulaunch.launcher.logs.lines import TAIL_LINES, LineSplitter, Tail
from gpulaunch.launcher.logs.terminal import default_prefix
from gpulaunch.launcher.loop.loop import Loop, Timer

_READ_BYTES = 64 * 1024  # what a pipe holds by default, pipe(7)


@dataclass(kw_only=True, slots=True, eq=False)
class _Capture:
    """One stream of one rank in one attempt."""

    local_rank: int
    stream: Std
    fd: int
    file: LogFile
    show: bool
    prefix: bytes
    filtered: FilteredFile | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: Tail = field(default_factory=Tail)
    sampled: bytes = b""  # the block last shown of a line that is still open
    finished: bool = False


class LogHub:
    """Every stream of every rank: to its own file whole, to the console by line, and the last lines in memory."""

    def __init__(
        self,
        loop: Loop,
        console: Console,
        *,
        stdout_filters: Sequence[str] = (),
        stderr_filters: Sequence[str] = (),
        filter_dir: str = "",
    ) -> None:
        """Read for this console.

        Args:
            loop: Says when a pipe has something.
            console: Gets the lines of the streams that are opened with `show`.
            stdout_filters: Lines with any of these words go to `filtered_stdout.log` too.
            stderr_filters: Likewise to `filtered_stderr.log`.
            filter_dir: The directory of these two, which exists; a file that is there is continued.
        """
        self._loop = loop
        self._console = console
        self._captures: dict[tuple[int, Std], _Capture] = {}  # the newest of each, ended ones too: for their tails
        self._reading: dict[int, _Capture] = {}  # by descriptor; leftovers of earlier attempts too
        self._paused = False
        self._changed: dict[Std, set[_Capture]] = {Std.OUT: set(), Std.ERR: set()}
        self._progress_timers: dict[Std, Timer] = {}
        self._told: set[int] = set()
        self._filters: dict[Std, FilteredFile] = {}
        for stream, words, name in (
            (Std.OUT, stdout_filters, "filtered_stdout.log"),
            (Std.ERR, stderr_filters, "filtered_stderr.log"),
        ):
            if words:
                file = LogFile(os.path.join(filter_dir, name), on_trouble=self._file_failed, append=True)
                self._filters[stream] = FilteredFile(file, words)
        console.when_drained(self._resume)

    def open(
        self,
        *,
        rank: int,
        local_rank: int,
        stream: Std,
        path: str,
        show: bool,
        prefix: bytes = b"",
        duplicate: bool = True,
    ) -> int:
        """Make the pipe of one stream; give its write end, which the caller closes once the rank has it.

        Args:
            rank: The global rank; opening the same again starts a new attempt.
            local_rank: What the default prefix names.
            stream: OUT or ERR.
            path: The stream's file; its directory exists, the file must not.
            show: Whether the console shows the stream.
            prefix: Stands before each line; empty for the default one.
            duplicate: Whether the filters look at the stream.

        Raises:
            OSError: The file or the pipe cannot be made.
        """
        file = LogFile(path, on_trouble=self._file_failed)
        try:
            read_fd, write_fd = os.pipe()
        except OSError:
            file.close()
            raise
        os.set_blocking(read_fd, False)  # this end only: each has a description of its own
        capture = _Capture(
            local_rank=local_rank,
            stream=stream,
            fd=read_fd,
            file=file,
            show=show,
            prefix=prefix,
            filtered=self._filters.get(stream) if duplicate else None,
        )
        self._captures[rank, stream] = self._reading[read_fd] = capture
        if not (show and self._paused):
            self._watch(capture)
        self._count_ranks()
        return write_fd

    def tail(self, rank: int, stream: Std, lines: int = TAIL_LINES) -> list[str]:
        """The last lines of a stream, at most TAIL_LINES, as plain text; from memory, whatever became of the file."""
        capture = self._captures.get((rank, stream))
        return capture.tail.read(lines, capture.splitter.state) if capture is not None else []

    def finish(self, rank: int) -> None:
        """The rank is dead: show all it said, its last unfinished line too, without waiting for other holders.

        A process it left behind may hold the pipe still; what that says goes on being read as before.
        """
        for capture in self._of_rank(rank):
            self._drain(capture)
            self._finish_line(capture)
            capture.finished = True
        self._count_ranks()
        self._console.settle()

    def close(self) -> None:
        """Read what there is and close all, pipes that somebody still holds too."""
        for capture in list(self._reading.values()):
            self._drain(capture)
            if capture.fd in self._reading:
                self._end(capture)
        for filtered in self._filters.values():
            filtered.close()
        for timer in self._progress_timers.values():
            timer.cancel()
        self._console.settle()

    # -- reading

    def _watch(self, capture: _Capture) -> None:
        self._loop.watch_read(capture.fd, partial(self._readable, capture))

    def _readable(self, capture: _Capture) -> None:
        self._read(capture)

    def _drain(self, capture: _Capture) -> None:
        """Read what is in the pipe now; not more, since a writer that still lives could go on for ever."""
        if self._reading.get(capture.fd) is capture:
            left_bytes = fcntl.fcntl(capture.fd, fcntl.F_GETPIPE_SZ)
            while left_bytes > 0 and (num_bytes := self._read(capture)):
                left_bytes -= num_bytes

    def _read(self, capture: _Capture) -> int:
        """Read once; give the number of bytes, 0 when there is nothing or the stream has ended."""
        try:
            data = os.read(capture.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._end(capture)
            return 0
        capture.file.write(data)
        self._lines(capture, capture.splitter.feed(data))
        if capture.show:
            self._follow_progress(capture)
            if not self._paused and self._console.congested():
                self._pause()
        return len(data)

    def _lines(self, capture: _Capture, block: bytes) -> None:
        if not block:
            return
        capture.tail.feed(block)
        if capture.filtered is not None:
            capture.filtered.write(capture.prefix or default_prefix((capture.local_rank,)), block)
        if capture.show:
            # The last state of a progress bar may stand on the console already, shown while the line was still open.
            fresh = block.removeprefix(capture.sampled)
            capture.sampled = b""
            if fresh:
                self._console.block(capture.stream, capture.local_rank, capture.prefix, fresh)

    def _finish_line(self, capture: _Capture) -> None:
        self._lines(capture, capture.splitter.finish())
        self._changed[capture.stream].discard(capture)
        if capture.show:
            self._console.hide_live(capture.stream, capture.local_rank)

    def _end(self, capture: _Capture) -> None:
        """Nobody holds the write end any longer."""
        self._finish_line(capture)
        self._loop.unwatch_read(capture.fd)
        del self._reading[capture.fd]
        os.close(capture.fd)
        capture.file.close()
        self._count_ranks()

    def _of_rank(self, rank: int) -> Iterator[_Capture]:
        return (self._captures[key] for key in ((rank, Std.OUT), (rank, Std.ERR)) if key in self._captures)

    def _count_ranks(self) -> None:
        """Tell the console how many ranks can still say a line together."""
        shown = {each.local_rank for each in self._reading.values() if each.show and not each.finished}
        self._console.expect_ranks(len(shown))

    # -- pressure

    def _pause(self) -> None:
        """Read no shown stream until the console has caught up: the ranks then wait in write(2)."""
        self._paused = True
        for capture in self._reading.values():
            if capture.show:
                self._loop.unwatch_read(capture.fd)

    def _resume(self) -> None:
        self._paused = False
        for capture in self._reading.values():
            if capture.show:
                self._watch(capture)

    # -- unfinished lines

    def _follow_progress(self, capture: _Capture) -> None:
        """Have an unfinished line shown before long, if it is still there by then."""
        stream = capture.stream
        if not capture.splitter.state:
            self._console.hide_live(stream, capture.local_rank)
            return
        self._changed[stream].add(capture)
        if stream not in self._progress_timers:
            when_s = self._loop.now() + self._console.progress_period_s(stream)
            self._progress_timers[stream] = self._loop.call_at(when_s, partial(self._show_progress, stream))

    def _show_progress(self, stream: Std) -> None:
        """Show what has changed since the last time: the lowest rank's in place, or everyone's as a line each."""
        del self._progress_timers[stream]
        changed = sorted(self._changed[stream], key=lambda each: each.local_rank)
        self._changed[stream].clear()
        unfinished = [each for each in changed if each.splitter.state]
        if not unfinished:
            return
        first = unfinished[0]
        if not self._console.show_live(stream, first.local_rank, first.prefix, first.splitter.state):
            for capture in unfinished:
                sample = capture.splitter.state + b"\n"
                if capture.splitter.progress and sample != capture.sampled:
                    capture.sampled = sample
                    self._console.block(stream, capture.local_rank, capture.prefix, sample)

    # -- trouble

    def _file_failed(self, path: str, err: OSError) -> None:
        """Say it once for each kind of trouble: a full disk is full for every rank."""
        errno = err.errno or 0
        if errno not in self._told:
            self._told.add(errno)
            self._console.say(f"cannot write {path} ({err.strerror}): output goes on to the console only")
