from __future__ import annotations

import os
import re
import time
import tty
from collections.abc import Callable, Iterator

import pytest

from gpulaunch.launcher.loop.loop import Loop


class Reader:
    """The user's side of the console: a pipe or a terminal, with what has arrived so far."""

    def __init__(self, loop: FakeClockLoop, *, terminal: bool) -> None:
        self.loop = loop
        self.data = b""
        self.read_fd, self.write_fd = os.openpty() if terminal else os.pipe()
        if terminal:
            tty.setraw(self.write_fd)  # no \n -> \r\n: what we read is what was written
        os.set_blocking(self.read_fd, False)

    def read(self) -> bytes:
        while True:
            try:
                data = os.read(self.read_fd, 1 << 16)
            except (BlockingIOError, OSError):
                return self.data
            if not data:
                return self.data
            self.data += data

    def until(self, holds: Callable[[bytes], object], what: str = "expected output") -> bytes:
        """Turn the loop until `holds(all that was read)`."""
        self.loop.until(lambda: holds(self.read()), what)
        return self.data

    def now(self) -> bytes:
        """What has been written, once nothing is ready any more."""
        self.loop.settle()
        return self.read()

    def screen(self) -> list[str]:
        return screen(self.now())

    def close(self) -> None:
        for fd in (self.read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self.read_fd = self.write_fd = -1

    def hang_up(self) -> None:
        os.close(self.read_fd)
        self.read_fd = -1


class FakeClockLoop(Loop):
    """The real loop, on a clock that the test moves."""

    now_s = 1000.0

    def now(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.turn(0)

    def until(self, holds: Callable[[], object], what: str = "it") -> None:
        """Turn until it holds; fail after a bounded time."""
        deadline_s = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline_s, f"{what} did not happen within a minute"
            self.turn(0.02)

    def settle(self) -> None:
        """Turn until nothing is ready any more."""
        for _ in range(20):
            self.turn(0)


_TOKEN = re.compile(rb"\x1b\[[?0-9;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+")


def screen(data: bytes) -> list[str]:
    """What a terminal shows after these bytes: only the few controls that we may send; anything else is an error."""
    rows = [""]
    column = 0
    for token in _TOKEN.findall(data):
        if token == b"\n":
            rows.append("")
            column = 0
        elif token == b"\r":
            column = 0
        elif token == b"\x1b[K":
            rows[-1] = rows[-1][:column]
        elif token.startswith(b"\x1b"):
            assert token.endswith(b"m") or token in (b"\x1b[?7l", b"\x1b[?7h"), token
        else:
            text = token.decode()
            rows[-1] = rows[-1][:column] + text + rows[-1][column + len(text) :]
            column += len(text)
    return rows


@pytest.fixture
def loop() -> Iterator[FakeClockLoop]:
    loop = FakeClockLoop()
    yield loop
    loop.close()


@pytest.fixture
def pipe(loop: FakeClockLoop) -> Iterator[Reader]:
    reader = Reader(loop, terminal=False)
    yield reader
    reader.close()


@pytest.fixture
def err_pipe(loop: FakeClockLoop) -> Iterator[Reader]:
    reader = Reader(loop, terminal=False)
    yield reader
    reader.close()


@pytest.fixture
def terminal(loop: FakeClockLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    reader = Reader(loop, terminal=True)
    yield reader
    reader.close()
