"""Reads the ranks' output: a pipe for each stream, on the agent's loop."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.logs import pty
from gpulaunch.launcher.logs.console import LIVE_PERIOD_S, PART_PERIOD_S, PROGRESS_PERIOD_S, Console
from gpulaunch.launcher.logs.files import FilteredFile, LogFile
from gpulaunch.launcher.logs.forward import ForwardedPipe, forward
from gpulaunch.launcher.logs.lines import PROGRESS_BYTES, TAIL_LINES, LineSplitter, Tail
from gpulaunch.launcher.logs.terminal import default_prefix
from gpulaunch.launcher.loop.loop import Loop, Timer

_READ_BYTES = 64 * 1024  # a pipe's default capacity, pipe(7)


@dataclass(kw_only=True, slots=True, eq=False)
class _Capture:
    """One stream of one rank in one attempt."""

    local_rank: int
    stream: Std
    fd: int
    file: LogFile
    show: bool
    prefix: bytes
    raw: bool
    """No other rank's output is shown: it is passed on unchanged."""
    terminal: bool
    """The rank has its own terminal, not a pipe."""
    filtered: FilteredFile | None
    splitter: LineSplitter = field(default_factory=LineSplitter)
    tail: Tail = field(default_factory=Tail)
    passed_bytes: int = 0
    """Bytes of the unfinished line already shown."""
    num_blocks: int = 0
    """Number of whole lines so far."""
    seen_blocks: int = 0
    """Number of whole lines at the last timer tick: tells whether the unfinished line is the same one."""
    seen_bytes: int = 0
    """Length of the unfinished line at the last timer tick."""
    timer: Timer | None = None
    """If not on a terminal: when the unfinished line is passed on."""
    finished: bool = False

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class LogHub:
    """Every stream of every rank: complete in its own file, by line on the console, and the last lines in memory."""

    def __init__(
        self,
        loop: Loop,
        console: Console,
        *,
        stdout_filters: Sequence[str] = (),
        stderr_filters: Sequence[str] = (),
    ) -> None:
        """Write to this console.

        Args:
            loop: Calls back when a pipe is readable.
            console: Gets the lines of the streams that are opened with `show`.
            stdout_filters: Lines with any of these words are also written to `filtered_stdout.log`.
            stderr_filters: Likewise to `filtered_stderr.log`.
        """
        self._loop = loop
        self._console = console
        self._captures: dict[tuple[int, Std], _Capture] = {}  # the newest of each, also ended ones: for their tails
        self._reading: dict[int, _Capture] = {}  # by descriptor; also leftovers of earlier attempts
        self._paused = False
        self._num_shown = 0
        self._changed: dict[Std, set[_Capture]] = {Std.OUT: set(), Std.ERR: set()}
        self._progress_timers: dict[Std, Timer] = {}
        self._told: set[int] = set()
        self._words = {Std.OUT: tuple(stdout_filters), Std.ERR: tuple(stderr_filters)}
        self._filters: dict[Std, tuple[str, FilteredFile]] = {}  # with the directory of each
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
        alone: bool = False,
        filter_dir: str = "",
    ) -> int:
        """Make the pipe of one stream; return its write end, which the caller closes once the rank has it.

        Output of a rank that prints `alone`, without a prefix, is passed on unchanged. If the console is a terminal,
        the rank gets a terminal, as it would without a launcher.

        Args:
            rank: The global rank; opening the same rank again starts a new attempt.
            local_rank: Used in the default prefix.
            stream: OUT or ERR.
            path: The stream's file; its directory exists, the file must not.
            show: Whether the console shows the stream.
            prefix: Written before each line; empty for the default one.
            alone: Whether no other rank of this node is shown.
            filter_dir: The directory of the filters' files, which exists; "": the stream is not filtered.

        Raises:
            OSError: The file or the pipe cannot be made.
        """
        file = LogFile(path, on_trouble=self._file_failed)
        raw = show and alone and not prefix
        on_terminal = self._console.is_terminal(stream)
        try:
            ends = pty.open_terminal(self._console.window_size()) if raw and on_terminal else None
            raw = raw and (ends is not None or not on_terminal)
            read_fd, write_fd = ends or os.pipe()
            filtered = self._filter(stream, filter_dir)
        except OSError:
            file.close()
            raise
        os.set_blocking(read_fd, False)  # this end only: each has its own file description
        capture = _Capture(
            local_rank=local_rank,
            stream=stream,
            fd=read_fd,
            file=file,
            show=show,
            prefix=prefix,
            raw=raw,
            terminal=ends is not None,
            filtered=filtered,
        )
        if ends is not None:
            self._loop.on_signal(signal.SIGWINCH, self._resized)
        self._captures[rank, stream] = self._reading[read_fd] = capture
        if not (show and self._paused):
            self._watch(capture)
        self._count_ranks()
        return write_fd

    @property
    def num_open(self) -> int:
        """Number of streams that a process may still write to; also leftovers of earlier attempts."""
        return len(self._reading)

    def tail(self, rank: int, stream: Std, lines: int = TAIL_LINES) -> list[str]:
        """The last lines of a stream, at most TAIL_LINES, as plain text; from memory, independent of the file."""
        capture = self._captures.get((rank, stream))
        return capture.tail.read(lines, capture.splitter.state) if capture is not None else []

    def finish(self, rank: int) -> None:
        """The rank is dead: show all its output, including its last unfinished line, without waiting for other writers.

        A process it left behind may still hold the pipe; that process's output is read as before.
        """
        for capture in self._of_rank(rank):
            self._drain(capture)
            self._finish_line(capture)
            capture.finished = True
        self._count_ranks()
        self._console.settle()

    def close(self, *, keep_held: bool = False) -> None:
        """Read the rest and close all; `keep_held`: except the pipes that a process still holds, for `hand_over`."""
        for capture in list(self._reading.values()):
            self._drain(capture)
            if capture.fd in self._reading and keep_held:
                self._loop.unwatch_read(capture.fd)
                self._changed[capture.stream].discard(capture)
                capture.stop_timer()
            elif capture.fd in self._reading:
                self._end(capture)
        for _, filtered in self._filters.values():
            filtered.close()
        for timer in self._progress_timers.values():
            timer.cancel()
        self._console.settle()

    def hand_over(self) -> None:
        """After `close`, and after the console has written all: start a process that reads the pipes still held."""
        for capture in self._reading.values():
            del capture.splitter.held[: capture.passed_bytes]
        held = [
            ForwardedPipe(
                fd=capture.fd,
                file_fd=capture.file.fd,
                show_fd=(1 if capture.stream is Std.OUT else 2) if capture.show else None,
                prefix=capture.prefix or default_prefix((capture.local_rank,)),
                raw=capture.raw,
                splitter=capture.splitter,
            )
            for capture in self._reading.values()
        ]
        if held:
            with contextlib.suppress(OSError):  # no process, no memory: further output of these pipes is lost
                forward(held)
        for capture in self._reading.values():
            os.close(capture.fd)
            capture.file.close()
        self._reading.clear()

    # -- reading

    def _watch(self, capture: _Capture) -> None:
        self._loop.watch_read(capture.fd, partial(self._readable, capture))

    def _readable(self, capture: _Capture) -> None:
        self._read(capture)

    def _drain(self, capture: _Capture) -> None:
        """Read what is in the pipe now; no more, since a live writer could go on forever."""
        if self._reading.get(capture.fd) is capture:
            left_bytes = _READ_BYTES if capture.terminal else fcntl.fcntl(capture.fd, fcntl.F_GETPIPE_SZ)
            while left_bytes > 0 and (num_bytes := self._read(capture)):
                left_bytes -= num_bytes

    def _read(self, capture: _Capture) -> int:
        """Read once; return the number of bytes, 0 if there are none or the stream has ended."""
        try:
            data = os.read(capture.fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: the last holder of the terminal has closed it
            data = b""
        if not data:
            self._end(capture)
            return 0
        capture.file.write(data)
        if capture.raw:
            self._console.raw(capture.stream, data)
        self._lines(capture, capture.splitter.feed(data))
        if excess := capture.splitter.excess():
            self._excess(capture, excess)
        if capture.show:
            if not capture.raw:
                self._follow_unfinished(capture)
            if not self._paused and self._console.congested():
                self._pause()
        return len(data)

    def _lines(self, capture: _Capture, block: bytes) -> None:
        if not block:
            return
        capture.tail.feed(block)
        self._duplicate(capture, block)
        if capture.show and not capture.raw:
            self._console.block(capture.stream, capture.local_rank, capture.prefix, block[capture.passed_bytes :])
        capture.passed_bytes = 0
        capture.num_blocks += 1

    def _excess(self, capture: _Capture, piece: bytes) -> None:
        """Handle the beginning of a line that is too long to buffer."""
        self._duplicate(capture, piece)
        if capture.show and not capture.raw and len(piece) > capture.passed_bytes and not self._draws(capture):
            fresh = piece[capture.passed_bytes :]
            self._console.part(capture.stream, capture.local_rank, capture.prefix, fresh)
        capture.passed_bytes = max(0, capture.passed_bytes - len(piece))

    def _duplicate(self, capture: _Capture, block: bytes) -> None:
        if capture.filtered is not None:
            capture.filtered.write(capture.prefix or default_prefix((capture.local_rank,)), block)

    def _finish_line(self, capture: _Capture) -> None:
        if rest := capture.splitter.finish():
            self._lines(capture, rest + b"\n")
        capture.stop_timer()
        self._changed[capture.stream].discard(capture)
        if capture.show:
            self._console.hide_live(capture.stream, capture.local_rank)

    def _filter(self, stream: Std, directory: str) -> FilteredFile | None:
        """The stream's filter in the directory of an attempt; closes that of the previous attempt."""
        if not directory or not self._words[stream]:
            return None
        known = self._filters.get(stream)
        if known is not None:
            if known[0] == directory:
                return known[1]
            known[1].close()
        name = "filtered_stdout.log" if stream is Std.OUT else "filtered_stderr.log"
        file = LogFile(os.path.join(directory, name), on_trouble=self._file_failed, append=True)
        self._filters[stream] = directory, FilteredFile(file, self._words[stream])
        return self._filters[stream][1]

    def _resized(self, _: int) -> None:
        for capture in self._reading.values():
            if capture.terminal:
                pty.set_window_size(capture.fd, self._console.window_size())

    def _end(self, capture: _Capture) -> None:
        """No process holds the write end any longer."""
        self._finish_line(capture)
        self._loop.unwatch_read(capture.fd)
        del self._reading[capture.fd]
        os.close(capture.fd)
        capture.file.close()
        self._count_ranks()

    def _of_rank(self, rank: int) -> Iterator[_Capture]:
        return (self._captures[key] for key in ((rank, Std.OUT), (rank, Std.ERR)) if key in self._captures)

    def _count_ranks(self) -> None:
        """Tell the console how many ranks can still write a common line."""
        shown = {each.local_rank for each in self._reading.values() if each.show and not each.finished}
        self._num_shown = len(shown)
        self._console.expect_ranks(self._num_shown)

    # -- backpressure

    def _pause(self) -> None:
        """Read no shown stream until the console has caught up: the ranks then block in write(2)."""
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

    def _draws(self, capture: _Capture) -> bool:
        """Whether unfinished lines of this stream are drawn in place, or not shown at all: on terminals."""
        return self._console.is_terminal(capture.stream)

    def _follow_unfinished(self, capture: _Capture) -> None:
        """Schedule that an unfinished line is shown soon, if it is still unfinished then."""
        stream = capture.stream
        if not self._draws(capture):
            if capture.splitter.held and capture.timer is None:
                self._pass_on_later(capture)
            return
        if not capture.splitter.state:
            self._console.hide_live(stream, capture.local_rank)
            return
        self._changed[stream].add(capture)
        if stream not in self._progress_timers:
            when_s = self._loop.now() + LIVE_PERIOD_S
            self._progress_timers[stream] = self._loop.call_at(when_s, partial(self._draw, stream))

    def _draw(self, stream: Std) -> None:
        """Draw the unfinished line of the lowest rank whose line has changed since the last time."""
        del self._progress_timers[stream]
        changed = sorted(self._changed[stream], key=lambda each: each.local_rank)
        self._changed[stream].clear()
        for each in changed:
            if each.splitter.state:
                self._console.show_live(stream, each.local_rank, each.prefix, each.splitter.state)
                return

    def _pass_on_later(self, capture: _Capture) -> None:
        bar = capture.splitter.progress and self._num_shown > 1
        when_s = self._loop.now() + (PROGRESS_PERIOD_S if bar else PART_PERIOD_S)
        capture.seen_bytes, capture.seen_blocks = len(capture.splitter.held), capture.num_blocks
        capture.timer = self._loop.call_at(when_s, partial(self._pass_on, capture))

    def _pass_on(self, capture: _Capture) -> None:
        """Show the present part of an unfinished line, unless it is a long one that is just being written."""
        held, capture.timer = capture.splitter.held, None
        if len(held) <= capture.passed_bytes:
            return
        is_new = capture.num_blocks != capture.seen_blocks or (
            len(held) > PROGRESS_BYTES and len(held) != capture.seen_bytes
        )
        if self._paused or is_new:
            self._pass_on_later(capture)
            return
        self._console.part(capture.stream, capture.local_rank, capture.prefix, bytes(held[capture.passed_bytes :]))
        capture.passed_bytes = len(held)

    # -- errors

    def _file_failed(self, path: str, err: OSError) -> None:
        """Report each kind of error once: a full disk is full for every rank."""
        errno = err.errno or 0
        if errno not in self._told:
            self._told.add(errno)
            self._console.say(f"cannot write {path} ({err.strerror}): output goes to the console only")
