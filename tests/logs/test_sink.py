from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.logs.sink import Sink

# A sink that waits for its reader would hang here, where nobody reads.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def refuse_own_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `su`: the terminal or pipe of another user cannot be opened again."""
    really_open = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/self/fd/"):
            raise PermissionError(13, "Permission denied")
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def make_sink(loop: Any) -> Any:
    sinks: list[Sink] = []

    def make(fd: int, on_drain: Callable[[], None] = lambda: None) -> tuple[Sink, list[OSError]]:
        errors: list[OSError] = []
        sinks.append(Sink(loop, fd, on_drain=on_drain, on_off=errors.append))
        return sinks[-1], errors

    yield make
    for sink in sinks:
        sink.close()


TEXT = b"".join(b"line %d\n" % number for number in range(100_000))


def check_no_wait_and_nothing_lost(loop: Any, reader: Any, make_sink: Any) -> None:
    sink, errors = make_sink(reader.write_fd)
    assert os.get_blocking(reader.write_fd), "the flag is shared with the user's shell"
    for at in range(0, len(TEXT), 5000):
        sink.put(TEXT[at : at + 5000])
    loop.settle()  # nobody reads: this must come back
    assert 0 < sink.waiting_bytes < len(TEXT)

    reader.until(lambda data: len(data) >= len(TEXT))
    assert reader.data == TEXT
    assert sink.waiting_bytes == 0
    assert not errors
    assert os.get_blocking(reader.write_fd)


def test_a_slow_pipe_is_not_waited_for(loop: Any, pipe: Any, make_sink: Any) -> None:
    check_no_wait_and_nothing_lost(loop, pipe, make_sink)


def test_a_slow_terminal_is_not_waited_for(loop: Any, terminal: Any, make_sink: Any) -> None:
    check_no_wait_and_nothing_lost(loop, terminal, make_sink)


@pytest.mark.usefixtures("refuse_own_descriptions")
def test_nor_is_a_pipe_we_may_not_open_again(loop: Any, pipe: Any, make_sink: Any) -> None:
    check_no_wait_and_nothing_lost(loop, pipe, make_sink)


def test_nor_is_a_socket(loop: Any, make_sink: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sink, errors = make_sink(ours.fileno())
        sink.put(TEXT * 4)
        loop.settle()
        assert sink.waiting_bytes > 0

        received = bytearray()
        theirs.setblocking(False)

        def read() -> bool:
            while True:
                try:
                    received.extend(theirs.recv(1 << 16))
                except BlockingIOError:
                    return len(received) >= len(TEXT) * 4

        loop.until(read)
        assert received == TEXT * 4
        assert not errors


def test_a_file_is_written_at_once(make_sink: Any, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        sink, errors = make_sink(file.fileno())
        sink.put(b"now\n")

        assert (tmp_path / "out").read_bytes() == b"now\n"
        assert (sink.waiting_bytes, errors) == (0, [])


@pytest.mark.usefixtures("refuse_own_descriptions")
def test_a_reader_that_leaves_a_shared_pipe_turns_it_off(loop: Any, pipe: Any, make_sink: Any) -> None:
    check_hang_up(loop, pipe, make_sink)


def test_a_reader_that_leaves_turns_it_off(loop: Any, pipe: Any, make_sink: Any) -> None:
    check_hang_up(loop, pipe, make_sink)


def test_a_terminal_that_is_closed_turns_it_off(loop: Any, terminal: Any, make_sink: Any) -> None:
    check_hang_up(loop, terminal, make_sink)


def check_hang_up(loop: Any, reader: Any, make_sink: Any) -> None:
    sink, errors = make_sink(reader.write_fd)
    sink.put(TEXT)
    loop.settle()
    reader.hang_up()
    loop.until(lambda: errors)

    sink.put(TEXT)
    loop.settle()
    assert (len(errors), sink.waiting_bytes) == (1, 0)
    assert sink.why_off is errors[0]


def test_closed_before_the_start(loop: Any, make_sink: Any) -> None:
    fd = os.open(os.devnull, os.O_WRONLY)
    os.close(fd)
    sink, _ = make_sink(fd)

    sink.put(b"x\n")
    sink.flush(0.0)
    assert isinstance(sink.why_off, OSError)


def test_a_full_disk_turns_it_off(make_sink: Any) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    sink, errors = make_sink(fd)
    sink.put(b"x\n")
    os.close(fd)

    assert "No space left" in str(errors[0])


def test_flush_waits_for_the_reader_but_not_for_ever(loop: Any, pipe: Any, make_sink: Any) -> None:
    drained: list[int] = []
    sink, _ = make_sink(pipe.write_fd, on_drain=lambda: drained.append(sink.waiting_bytes))
    sink.put(TEXT)
    sink.flush(loop.now() - 1e9)
    assert sink.waiting_bytes == len(TEXT), "its time was up before it began"

    take = f"import os\nleft = {len(TEXT)}\nwhile left: left -= len(os.read(0, left))"
    os.set_blocking(pipe.read_fd, True)
    with subprocess.Popen([sys.executable, "-S", "-c", take], stdin=pipe.read_fd) as reader:
        sink.flush(time.monotonic() + 30)
        assert sink.waiting_bytes == 0
        assert reader.wait() == 0
