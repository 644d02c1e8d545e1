"""Splits a stream of bytes into lines: pure, and independent of how the stream was cut into chunks.

Bytes stay unchanged; `\\n` ends a line. Where only one state of a line can be shown (a terminal that several ranks
share, the end of a report), `last_state` returns it: the text after the last `\\r`, as a progress bar intends.
"""

from __future__ import annotations

from collections import deque

from gpulaunch.launcher.logs.terminal import plain

LONGEST_BYTES = 16 * 1024 * 1024
"""Up to this much of a line is held until its end, so that no other rank's output comes between."""
PROGRESS_BYTES = 64 * 1024
"""The same for a line with carriage returns, which may grow for as long as the run."""

TAIL_LINES = 20
TAIL_LINE_BYTES = 2048


class LineSplitter:
    """Holds one unfinished line; returns whole lines."""

    __slots__ = ("held", "progress")

    def __init__(self) -> None:
        self.held = bytearray()
        """The unfinished line so far."""
        self.progress = False
        """It has carriage returns: a progress bar."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; return the lines they complete as one block, ended by a newline."""
        end = data.rfind(b"\n") + 1
        if not end:
            self.held += data
            self.progress = self.progress or b"\r" in data
            return b""
        block = bytes(self.held) + data[:end]
        self.held = bytearray(data[end:])
        self.progress = b"\r" in self.held
        return block

    def excess(self) -> bytes:
        """Remove and return what is too long to hold: whole states of a progress bar, or all of an unfinished line."""
        if len(self.held) <= (PROGRESS_BYTES if self.progress else LONGEST_BYTES):
            return b""
        end = self.held.rfind(b"\r") + 1 or len(self.held)
        excess = bytes(self.held[:end])
        del self.held[:end]
        return excess

    @property
    def state(self) -> bytes:
        """The unfinished line so far."""
        return last_state(bytes(self.held[-PROGRESS_BYTES:]))

    def finish(self) -> bytes:
        """The unfinished line, not ended, or nothing; the stream may still continue afterwards."""
        rest = bytes(self.held)
        self.held, self.progress = bytearray(), False
        return rest


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line with carriage returns, if each state covers the one before."""
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


class Tail:
    """The last TAIL_LINES lines of a stream, each cut at TAIL_LINE_BYTES."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def feed(self, block: bytes) -> None:
        """Take a block of whole lines."""
        self._lines.extend(_cut(last_state(line)) for line in block.rsplit(b"\n", TAIL_LINES + 1)[-TAIL_LINES - 1 : -1])

    def read(self, lines: int, unfinished: bytes) -> list[str]:
        """The last lines as plain text, the unfinished one included."""
        known = [*self._lines, _cut(unfinished)] if unfinished else list(self._lines)
        return [plain(line) for line in known[-lines:]] if lines > 0 else []


def _cut(line: bytes) -> bytes:
    return line if len(line) <= TAIL_LINE_BYTES else line[:TAIL_LINE_BYTES] + b"..."
