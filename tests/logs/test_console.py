from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.logs.console import CONGESTED_BYTES, DRAINED_BYTES, Console
from gpulaunch.launcher.logs.fold import WINDOW_S

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def consoles() -> Iterator[list[Console]]:
    made: list[Console] = []
    yield made
    for console in made:
        console.close()


@pytest.fixture
def on_pipes(loop: Any, pipe: Any, err_pipe: Any, consoles: list[Console]) -> Console:
    consoles.append(Console(loop, stdout_fd=pipe.write_fd, stderr_fd=err_pipe.write_fd))
    return consoles[-1]


@pytest.fixture
def on_terminal(loop: Any, terminal: Any, consoles: list[Console]) -> Console:
    consoles.append(Console(loop, stdout_fd=terminal.write_fd, stderr_fd=terminal.write_fd))
    consoles[-1].expect_ranks(8)
    return consoles[-1]


def training_run(console: Console, loop: Any) -> None:
    """What a job of 8 ranks says; the golden pages are this run on a pipe and on a terminal."""
    console.say("8 ranks on one host\nmetrics: http://127.0.0.1:9464/metrics")
    for rank in range(8):
        console.block(Std.OUT, rank, b"", b"hello\nI am %d\n" % rank)
    loop.pass_time(WINDOW_S)
    for rank in (0, 1, 2, 3, 6):
        console.line(Std.ERR, rank, b"", b"UserWarning: lr_scheduler.step()")
    loop.pass_time(WINDOW_S)
    console.line(Std.OUT, 1, b"[trainer1]:", b"teed, as torchrun writes it")
    console.line(Std.OUT, 5, b"", "\x1b[33mcolour left on \u2588".encode())
    console.line(Std.OUT, 5, b"", b"title \x1b]0;x\x07, bytes \xff\xfe, tab\there")
    loop.pass_time(WINDOW_S)
    console.say("rank 5 failed: \x1b[2J")


def readable(page: bytes) -> str:
    """Control characters and odd bytes by name, so that a golden page can be read anywhere."""
    text = page.decode("utf-8", "surrogateescape")
    return (
        re.sub(r"[^\n\x20-\x7e]", lambda odd: f"<{ord(odd[0]):02X}>", text).replace("<1B>", "<ESC>").replace("<DC", "<")
    )


def test_golden_page_of_pipes(loop: Any, pipe: Any, err_pipe: Any, on_pipes: Console) -> None:
    training_run(on_pipes, loop)

    page = "-- stdout\n" + readable(pipe.now()) + "-- stderr\n" + readable(err_pipe.now())
    assert (GOLDEN / "pipes.txt").read_text("utf-8") == page


def test_golden_page_of_a_terminal(loop: Any, terminal: Any, on_terminal: Console) -> None:
    training_run(on_terminal, loop)

    assert (GOLDEN / "terminal.txt").read_text("utf-8") == readable(terminal.now())


def test_a_pipe_gets_every_line_of_every_rank(loop: Any, pipe: Any, on_pipes: Console) -> None:
    for rank in range(8):
        on_pipes.line(Std.OUT, rank, b"", b"same")

    assert pipe.now() == b"".join(b"[%d] same\n" % rank for rank in range(8))


def test_one_rank_on_a_terminal_does_not_wait(loop: Any, terminal: Any, on_terminal: Console) -> None:
    on_terminal.expect_ranks(2)
    on_terminal.line(Std.OUT, 0, b"", b"first")
    on_terminal.expect_ranks(1)
    on_terminal.line(Std.OUT, 0, b"", b"second")

    assert terminal.screen() == ["[0] first", "[0] second", ""]


def test_our_own_lines_come_after_what_was_said_before(loop: Any, terminal: Any, on_terminal: Console) -> None:
    on_terminal.line(Std.ERR, 3, b"", b"waits for the others")
    on_terminal.say("rank 3 died")

    assert terminal.screen() == ["[3] waits for the others", "[gpulaunch] rank 3 died", ""]


def test_stdout_and_stderr_in_one_pipe_do_not_cut_each_other(loop: Any, pipe: Any, consoles: list[Console]) -> None:
    other = os.dup(pipe.write_fd)
    console = Console(loop, stdout_fd=pipe.write_fd, stderr_fd=other)
    consoles.append(console)
    os.close(other)  # the console was told the descriptors stay the caller's; it has its own
    for _ in range(300):
        console.line(Std.OUT, 0, b"", b"o" * 3000)
        console.line(Std.ERR, 1, b"", b"e" * 3000)

    pipe.until(lambda data: data.count(b"\n") == 600)
    assert set(pipe.data.splitlines()) == {b"[0] " + b"o" * 3000, b"[1] " + b"e" * 3000}


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colours_for_who_wants_none(
    loop: Any, terminal: Any, consoles: list[Console], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    console = Console(loop, stdout_fd=terminal.write_fd, stderr_fd=terminal.write_fd)
    consoles.append(console)
    console.say("hello")
    console.line(Std.OUT, 0, b"", b"x")
    console.settle()

    assert terminal.now() == b"[gpulaunch] hello\n[0] x\n"


def test_a_terminal_can_be_overruled(loop: Any, terminal: Any, consoles: list[Console]) -> None:
    console = Console(loop, stdout_fd=terminal.write_fd, stderr_fd=terminal.write_fd, color=False, fold=False)
    consoles.append(console)
    for rank in range(2):
        console.line(Std.OUT, rank, b"", b"x")

    assert terminal.now() == b"[0] x\n[1] x\n"


def test_an_updating_line_stays_under_the_others(loop: Any, terminal: Any, on_terminal: Console) -> None:
    on_terminal.expect_ranks(1)
    assert on_terminal.show_live(Std.ERR, 0, b"", b" 10%|#")
    assert terminal.screen() == ["[0]  10%|#"]

    on_terminal.line(Std.OUT, 0, b"", b"a line meanwhile")
    on_terminal.show_live(Std.ERR, 0, b"", b" 20%|##")
    assert terminal.screen() == ["[0] a line meanwhile", "[0]  20%|##"]

    on_terminal.hide_live(Std.ERR, 1)
    on_terminal.hide_live(Std.OUT, 0)
    assert terminal.screen() == ["[0] a line meanwhile", "[0]  20%|##"], "somebody else's"

    on_terminal.hide_live(Std.ERR, 0)
    on_terminal.line(Std.ERR, 0, b"", b"100%|####")
    assert terminal.screen() == ["[0] a line meanwhile", "[0] 100%|####", ""]


def test_nothing_is_drawn_in_place_on_a_pipe(on_pipes: Console) -> None:
    assert not on_pipes.show_live(Std.ERR, 0, b"", b" 10%|#")


def test_flush_leaves_a_clean_terminal(loop: Any, terminal: Any, on_terminal: Console) -> None:
    on_terminal.line(Std.OUT, 0, b"", b"folding")
    on_terminal.show_live(Std.ERR, 0, b"", b" 10%|#")
    on_terminal.flush(10.0)

    assert terminal.screen() == ["[0] folding", ""]


def test_congestion_has_two_marks(loop: Any, pipe: Any, err_pipe: Any, on_pipes: Console) -> None:
    calls: list[bool] = []
    on_pipes.when_drained(lambda: calls.append(on_pipes.congested()))
    line, written_bytes = b"x" * 99_995, 0
    while not on_pipes.congested():
        on_pipes.line(Std.OUT, 0, b"", line)
        written_bytes += len(b"[0] ") + len(line) + len(b"\n")
    loop.settle()
    assert on_pipes.congested()
    assert not calls

    def waiting() -> int:
        in_pipe_bytes = struct.unpack("i", fcntl.ioctl(pipe.read_fd, termios.FIONREAD, bytes(4)))[0]
        return written_bytes - len(pipe.data) - in_pipe_bytes

    pipe.until(lambda _: calls)
    assert DRAINED_BYTES - 1_000_000 < waiting() <= DRAINED_BYTES < CONGESTED_BYTES
    pipe.until(lambda _: waiting() == 0)
    assert calls == [False]


def test_a_reader_that_leaves_is_told_on_the_other_stream(
    loop: Any, pipe: Any, err_pipe: Any, on_pipes: Console
) -> None:
    pipe.hang_up()
    on_pipes.line(Std.OUT, 0, b"", b"nobody hears this")
    on_pipes.line(Std.ERR, 0, b"", b"but this")
    loop.settle()
    on_pipes.line(Std.OUT, 0, b"", b"nor this")
    on_pipes.line(Std.ERR, 0, b"", b"and this")

    said = err_pipe.now().decode().splitlines()
    assert sorted(said) == [
        "[0] and this",
        "[0] but this",
        "[gpulaunch] stdout cannot be written (Broken pipe): ranks continue, their output is in their log files",
    ]


def test_congestion_ends_when_the_reader_leaves(loop: Any, pipe: Any, on_pipes: Console) -> None:
    calls: list[None] = []
    on_pipes.when_drained(lambda: calls.append(None))
    while not on_pipes.congested():
        on_pipes.line(Std.OUT, 0, b"", b"x" * 100_000)
    pipe.hang_up()
    loop.until(lambda: calls)

    assert not on_pipes.congested()


def test_our_own_lines_need_no_loop(pipe: Any, err_pipe: Any, on_pipes: Console) -> None:
    on_pipes.say("usage")

    assert err_pipe.read() == b"[gpulaunch] usage\n"


def test_without_stderr_we_are_silent(loop: Any, pipe: Any, consoles: list[Console]) -> None:
    closed = os.open(os.devnull, os.O_WRONLY)
    os.close(closed)
    console = Console(loop, stdout_fd=pipe.write_fd, stderr_fd=closed)
    consoles.append(console)
    console.say("hello")
    console.line(Std.OUT, 0, b"", b"x")

    assert pipe.now() == b"[0] x\n"
