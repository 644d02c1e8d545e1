"""The shared console: every shown line of every rank, whole, prefixed, in a bounded queue that never blocks.

Ranks' stdout goes to our stdout, their stderr to ours. When both are the same file (a terminal, `2>&1 | less`) they
share one sink, so that no line can be cut by another.

Off a terminal, bytes pass unchanged, each line after its prefix; an unfinished line is passed on after a moment, and
ended if another rank writes before it continues. On a terminal prefixes have colours, lines are made harmless, equal
lines of several ranks are folded, and the unfinished line of one rank (a progress bar) is drawn in place under the
others. The output of a rank that prints alone passes unchanged (`raw`); on a terminal it has its own terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
import time
from collections.abc import Callable

from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.logs.fold import Fold, FoldWindow
from gpulaunch.launcher.logs.lines import last_state
from gpulaunch.launcher.logs.sink import Sink
from gpulaunch.launcher.logs.terminal import ERASE, bold, default_prefix, inert, live_line, rank_colored, wants_color
from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.profiler.redact import redact

CONGESTED_BYTES = 4 * 1024 * 1024
DRAINED_BYTES = CONGESTED_BYTES // 2
# An updating line is redrawn four times a second. Off a terminal, the content of an unfinished line is passed on after
# a moment; progress bars of several ranks, which would break each other into lines, every few seconds.
LIVE_PERIOD_S = 0.25
PART_PERIOD_S = 0.2
PROGRESS_PERIOD_S = 5.0

_OWN_PREFIX = b"[gpulaunch] "


class Console:
    """The output of ranks and launcher. Never blocks except in `flush`, never raises because of the reader."""

    def __init__(
        self,
        loop: Loop,
        *,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        color: bool | None = None,
        fold: bool | None = None,
    ) -> None:
        """Take over two descriptors, unchanged; they stay the caller's.

        Args:
            loop: Calls back when they are writable.
            stdout_fd: Where ranks' stdout goes.
            stderr_fd: Where ranks' stderr and the launcher's own lines go.
            color: Coloured prefixes; None: on a terminal, unless NO_COLOR is set or TERM is dumb.
            fold: Equal lines of several ranks as one; None: on a terminal.
        """
        self._congested = False
        self._when_drained: Callable[[], None] = _nothing

        def out(fd: int, told_as: str) -> _Out:
            sink = Sink(loop, fd, on_drain=self._drained, on_off=lambda err: self._off(told_as, err))
            tty = os.isatty(fd)
            return _Out(
                loop,
                sink,
                tty=tty,
                color=wants_color(os.environ, is_tty=tty) if color is None else color,
                fold=tty if fold is None else fold,
            )

        self._stderr = out(stderr_fd, "stderr")
        self._stdout = self._stderr if _same_file(stdout_fd, stderr_fd) else out(stdout_fd, "stdout")
        self._outs = {Std.OUT: self._stdout, Std.ERR: self._stderr}
        self._terminals = [fd for fd in (stdout_fd, stderr_fd) if os.isatty(fd)]

    # -- lines

    def say(self, text: str) -> None:
        """Write lines of the launcher's own to stderr, after all earlier stderr output, at once if there is room."""
        block = redact(text).encode("utf-8", "backslashreplace").rstrip(b"\n") + b"\n"
        self._stderr.say(block)

    def line(self, stream: Std, local_rank: int, prefix: bytes, payload: bytes) -> None:
        """Write one line, given without its newline. An empty prefix means the default one."""
        self.block(stream, local_rank, prefix, payload + b"\n")

    def block(self, stream: Std, local_rank: int, prefix: bytes, block: bytes) -> None:
        """Write a block of whole lines, each ended by a newline: the fast path."""
        self._outs[stream].block((stream, local_rank), local_rank, prefix, block)

    def part(self, stream: Std, local_rank: int, prefix: bytes, data: bytes) -> None:
        """Write a piece of one rank's unfinished line; off a terminal only."""
        out = self._outs[stream]
        out.write((stream, local_rank), out.label(local_rank, prefix), data)

    def raw(self, stream: Std, data: bytes) -> None:
        """Write the bytes of the only rank that prints, unchanged."""
        self._outs[stream].write("raw", b"", data)

    def is_terminal(self, stream: Std) -> bool:
        """Whether the stream goes to a terminal."""
        return self._outs[stream].tty

    def window_size(self) -> bytes:
        """The terminal's `struct winsize`, in the form of TIOCSWINSZ."""
        for fd in self._terminals:
            with contextlib.suppress(OSError):
                return fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
        return bytes(8)

    def expect_ranks(self, num_ranks: int) -> None:
        """Set how many ranks write here: a line that all of them have written need not wait longer."""
        for out in self._distinct():
            out.expect_ranks(num_ranks)

    def settle(self) -> None:
        """Stop folding: hand the lines that wait for other ranks to the sinks."""
        for out in self._distinct():
            out.settle()

    # -- unfinished lines

    def show_live(self, stream: Std, local_rank: int, prefix: bytes, state: bytes) -> bool:
        """Draw an unfinished line in place of the previous one; False if nothing can be drawn."""
        return self._outs[stream].show_live((stream, local_rank), local_rank, prefix, state)

    def hide_live(self, stream: Std, local_rank: int) -> None:
        """Erase this rank's unfinished line, if it is the one drawn."""
        self._outs[stream].hide_live((stream, local_rank))

    # -- backpressure

    def congested(self) -> bool:
        """True when too much waits for the readers: write no more until `when_drained` calls back."""
        waiting_bytes = sum(out.sink.waiting_bytes for out in self._distinct())
        self._congested = waiting_bytes > (DRAINED_BYTES if self._congested else CONGESTED_BYTES)
        return self._congested

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call back each time the console is no longer congested."""
        self._when_drained = callback

    def flush(self, timeout_s: float) -> None:
        """Write pending output for at most this long, and clean up the terminal. Blocks: only at the end of a run."""
        self.settle()
        deadline_s = time.monotonic() + timeout_s
        for out in self._distinct():
            out.hide_live(None)
            out.sink.flush(deadline_s)

    def close(self) -> None:
        """Drop pending output and release the descriptors."""
        for out in self._distinct():
            out.close()

    def _distinct(self) -> tuple[_Out, ...]:
        return (self._stdout,) if self._stdout is self._stderr else (self._stdout, self._stderr)

    def _drained(self) -> None:
        if self._congested and not self.congested():
            self._when_drained()

    def _off(self, told_as: str, err: OSError) -> None:
        self._drained()
        if told_as == "stdout":
            self.say(f"stdout cannot be written ({err.strerror}): ranks continue, their output is in their log files")


class _Out:
    """One sink and the state of its output."""

    def __init__(self, loop: Loop, sink: Sink, *, tty: bool, color: bool, fold: bool) -> None:
        self.sink = sink
        self.live = tty and os.environ.get("TERM") != "dumb"
        self._loop = loop
        self.tty = tty
        self._color = color
        self._window = FoldWindow() if fold else None
        self._fold_timer: Timer | None = None
        self._labels: dict[tuple[int, bytes], bytes] = {}
        self._drawn = b""
        self._drawn_by: object = None
        self._open: object = None
        """The owner of the unfinished line at the end of the output."""

    def say(self, block: bytes) -> None:
        self.settle()
        self._put(_prefixed(bold(_OWN_PREFIX) if self._color else _OWN_PREFIX, inert(block) if self.tty else block))
        self.sink.push()

    def block(self, owner: object, local_rank: int, prefix: bytes, block: bytes) -> None:
        if self.tty:
            if b"\r" in block:
                block = b"\n".join(map(last_state, block.split(b"\n")))
            block = inert(block)
        window = self._window
        if window is None or prefix or window.num_ranks == 1:
            self.settle()
            self.write(owner, self.label(local_rank, prefix), block)
            return
        now_s = self._loop.now()
        for line in block[:-1].split(b"\n"):
            window.add(now_s, local_rank, line)
        self._leave(window.ready(now_s))

    def write(self, owner: object, label: bytes, data: bytes) -> None:
        """Write text of one owner, ended or not: it continues its own unfinished line, and ends another owner's."""
        start = b"" if self._open == owner else label
        self._put(start + data[:-1].replace(b"\n", b"\n" + label) + data[-1:], owner)
        self._open = None if data.endswith(b"\n") else owner

    def expect_ranks(self, num_ranks: int) -> None:
        if self._window is not None:
            self._window.num_ranks = num_ranks
            self._leave(self._window.ready(self._loop.now()))

    def settle(self) -> None:
        if self._window is not None:
            self._leave(self._window.flush())

    def show_live(self, owner: object, local_rank: int, prefix: bytes, state: bytes) -> bool:
        if not self.live:
            return False
        erase = ERASE if self._drawn else b""
        self._drawn, self._drawn_by = live_line(self.label(local_rank, prefix), state), owner
        self.sink.put(erase + self._drawn)
        return True

    def hide_live(self, owner: object) -> None:
        """Erase the drawn line of this owner; None: of any."""
        if self._drawn and owner in (None, self._drawn_by):
            self._drawn = b""
            self.sink.put(ERASE)

    def close(self) -> None:
        if self._fold_timer is not None:
            self._fold_timer.cancel()
        self.sink.close()

    def _put(self, lines: bytes, owner: object = None) -> None:
        if self._open not in (None, owner):
            lines = b"\n" + lines
        self._open = None
        self.sink.put(ERASE + lines + self._drawn if self._drawn else lines)

    def label(self, local_rank: int, prefix: bytes) -> bytes:
        label = self._labels.get((local_rank, prefix))
        if label is None:
            label = prefix or default_prefix((local_rank,))
            label = self._labels[local_rank, prefix] = rank_colored(label, local_rank) if self._color else label
        return label

    def _leave(self, folds: list[Fold]) -> None:
        """Write lines that have left the window, and set a timer for the next."""
        if folds:
            self._put(b"".join([b"%b%b\n" % (self._folded_label(fold.ranks), fold.line) for fold in folds]))
        deadline_s = self._window.deadline_s if self._window is not None else None
        if deadline_s is not None and self._fold_timer is None:
            self._fold_timer = self._loop.call_at(deadline_s, self._window_over)

    def _window_over(self) -> None:
        self._fold_timer = None
        if self._window is not None:
            self._leave(self._window.ready(self._loop.now()))

    def _folded_label(self, ranks: tuple[int, ...]) -> bytes:
        if len(ranks) == 1:
            return self.label(ranks[0], b"")
        label = default_prefix(ranks)
        return bold(label) if self._color else label


def _prefixed(prefix: bytes, block: bytes) -> bytes:
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def _same_file(one_fd: int, other_fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one_fd), os.fstat(other_fd))
    except OSError:  # one of them is closed
        return False


def _nothing() -> None:
    """The default callback."""
