"""From a stream of bytes to console lines: pure, and the same however the stream was cut into chunks.

What a line is, byte by byte:

- `\n` ends a line; `\r\n` (and `\r\r\n`, what a terminal makes of it) does so too.
- Any other `\r` starts the line again, as a progress bar means it: what stood before is dropped, the last state stays.
- A state longer than PIECE_BYTES is given out in pieces of that size, each a line that ends with CONTINUES.
"""

from __future__ import annotations

from collections import deque

from gpulaunch.launcher.logs.terminal import plain

PIECE_BYTES = 64 * 1024
CONTINUES = b" [gpulaunch: line continues]"

TAIL_LINES = 20
TAIL_LINE_BYTES = 2048


class LineSplitter:
    """Holds one unfinished line, at most PIECE_BYTES of it; gives out whole lines."""

    __slots__ = ("_held", "progress")

    def __init__(self) -> None:
        self._held = b""  # the last state of the unfinished line, and one \r if that came last
        self.progress = False
        """The unfinished line has carriage returns in it: a progress bar."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; give the lines they finish as one block, each ended by a newline."""
        if len(data) <= PIECE_BYTES:
            return self._feed(data)
        return b"".join(self._feed(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))

    def _feed(self, data: bytes) -> bytes:
        text = self._held + data
        pieces = b""
        if len(text) > PIECE_BYTES:
            # Only the first state can be too long: each later one lies within `data`.
            ends = [at for at in (text.find(b"\n"), text.find(b"\r")) if at >= 0]
            end = min(ends, default=len(text))
            while end > PIECE_BYTES:
                pieces += text[:PIECE_BYTES] + CONTINUES + b"\n"
                text = text[PIECE_BYTES:]
                end -= PIECE_BYTES
        if b"\r" in text:
            *lines, rest = text.split(b"\n")
            self.progress = b"\r" in rest or (self.progress and not lines)
            kept = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
            text = b"\n".join([*map(_last_state, lines), kept])
        elif b"\n" in data:
            self.progress = False
        end = text.rfind(b"\n") + 1
        self._held = text[end:]
        return pieces + text[:end] if pieces else text[:end]

    @property
    def state(self) -> bytes:
        """The unfinished line as it stands."""
        return self._held.rstrip(b"\r")

    def finish(self) -> bytes:
        """The unfinished line as a block of one line, or nothing; the stream may still go on afterwards."""
        state = self.state
        self._held, self.progress = b"", False
        return state + b"\n" if state else b""


def _last_state(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


class Tail:
    """The last TAIL_LINES lines of a stream, each cut at TAIL_LINE_BYTES."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def feed(self, block: bytes) -> None:
        """Take a block of whole lines."""
        self._lines.extend(map(_cut, block.rsplit(b"\n", TAIL_LINES + 1)[-TAIL_LINES - 1 : -1]))

    def read(self, lines: int, unfinished: bytes) -> list[str]:
        """The last lines as plain text, the unfinished one included."""
        known = [*self._lines, _cut(unfinished)] if unfinished else list(self._lines)
        return [plain(line) for line in known[-lines:]] if lines > 0 else []


def _cut(line: bytes) -> bytes:
    return line if len(line) <= TAIL_LINE_BYTES else line[:TAIL_LINE_BYTES] + b"..."
