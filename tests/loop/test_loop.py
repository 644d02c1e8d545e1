"""The loop with real pipes, processes and signals."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.loop import Exit, Loop

PATIENCE_S = 30.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def run(loop: Loop) -> None:
    """Turn until somebody calls stop(), or fail."""
    timer = loop.call_at(loop.now() + PATIENCE_S, lambda: pytest.fail("nothing happened"))
    loop.run()
    timer.cancel()


def python(code: str, **how: object) -> int:
    return child.start([sys.executable, "-S", "-c", code], os.environ, **how)  # type: ignore[arg-type]


def test_timers_fire_in_order_and_a_cancelled_one_is_silent(loop: Loop) -> None:
    seen: list[str] = []
    now = loop.now()
    loop.call_at(now + 0.02, lambda: (seen.append("second"), loop.stop())[0])
    loop.call_at(now + 0.01, lambda: seen.append("first"))
    loop.call_at(now + 0.005, lambda: seen.append("never")).cancel()

    run(loop)

    assert ["first", "second"] == seen


def test_a_turn_waits_no_longer_than_its_bound_and_no_longer_than_a_timer(loop: Loop) -> None:
    seen: list[str] = []
    loop.call_at(loop.now() + 0.01, lambda: seen.append("timer"))

    while not seen:
        loop.turn(PATIENCE_S)  # would be all of our patience if the timer did not wake it
    started_s = loop.now()
    loop.turn(0.01)

    assert loop.now() - started_s < PATIENCE_S / 2


def test_a_pipe_is_read_until_its_end(loop: Loop) -> None:
    read, write = os.pipe()
    got: list[bytes] = []

    def readable() -> None:
        got.append(os.read(read, 100))
        if not got[-1]:
            loop.unwatch_read(read)
            loop.stop()

    loop.watch_read(read, readable)
    os.write(write, b"hello")
    os.close(write)
    run(loop)
    os.close(read)

    assert [b"hello", b""] == got


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", (3, None)),
        ("import os; os.kill(os.getpid(), 9)", (None, 9)),
        ("pass", (0, None)),
    ],
)
def test_a_child_is_reaped_and_its_end_is_told(loop: Loop, code: str, expected: tuple[int, int]) -> None:
    ends: list[Exit] = []
    loop.watch_pid(python(code), lambda end: (ends.append(end), loop.stop())[0])

    run(loop)

    assert expected == (ends[0].code, ends[0].signal)
    assert ends[0].max_rss_bytes > 1_000_000
    with pytest.raises(ChildProcessError):
        os.waitpid(ends[0].pid, os.WNOHANG)


def test_an_end_that_came_before_anybody_watched_is_still_told(loop: Loop) -> None:
    """A rank can die before the fork server's answer names it."""
    pid = python("raise SystemExit(7)")
    loop.on_orphan(lambda end: loop.stop())
    run(loop)
    ends: list[Exit] = []

    loop.watch_pid(pid, lambda end: (ends.append(end), loop.stop())[0])
    run(loop)

    assert [7] == [end.code for end in ends]


@pytest.fixture
def subreaper() -> Iterator[None]:
    """Only as long as the test: who stays one, gets the orphans of all tests that come after."""
    linux.become_subreaper()
    yield
    assert ctypes.CDLL(None).prctl(36, ctypes.c_ulong(0), 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER


def test_an_orphan_of_a_child_becomes_ours_and_is_reaped(loop: Loop, subreaper: None) -> None:
    orphans: list[int] = []
    loop.on_orphan(lambda end: (orphans.append(end.code or 0), loop.stop())[0])
    middle = python("import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(0.3); os._exit(9)")
    loop.watch_pid(middle, lambda end: None)

    run(loop)

    assert [9] == orphans


def test_signals_arrive_on_the_loop(loop: Loop) -> None:
    seen: list[int] = []
    loop.on_signal(signal.SIGUSR1, lambda signum: (seen.append(signum), loop.stop())[0])
    loop.call_at(loop.now(), lambda: os.kill(os.getpid(), signal.SIGUSR1))

    run(loop)

    assert [signal.SIGUSR1] == seen


def test_closing_gives_signal_handling_back() -> None:
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGCHLD)
    loop = Loop()
    loop.on_signal(signal.SIGUSR1, lambda _: None)
    loop.close()

    assert before == (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGCHLD))


def test_a_wait_for_a_signal_that_is_stopped_and_continued_hears_none() -> None:
    """A debugger does that, and so does `scontrol suspend`. CPython's sigtimedwait then gives what lay in memory."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        os.write(write, b"waits ")
        while not (heard := linux.wait_for_signal({signal.SIGTERM}, 0.01)):
            pass
        os.write(write, b"heard %d" % heard)
        os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"waits "
    for _ in range(40):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.015)  # longer than the wait that it interrupts
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.002)
    assert not select.select([read], [], [], 0)[0]

    os.kill(pid, signal.SIGTERM)
    assert os.read(read, 10) == b"heard 15"
    os.waitpid(pid, 0)
    os.close(read)


def test_a_program_that_is_not_there_is_an_error_with_its_name() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        child.start(["no-such-program"], os.environ)


def test_a_child_leads_its_own_session_and_has_the_default_sigpipe(loop: Loop) -> None:
    read, write = os.pipe()
    # cat, not Python: Python ignores SIGPIPE itself at its start.
    pid = child.start(["/bin/cat", "/proc/self/status", "/proc/self/stat"], os.environ, stdout_fd=write)
    os.close(write)
    loop.watch_pid(pid, lambda end: loop.stop())
    run(loop)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    ignored = int(said.partition("SigIgn:")[2].split()[0], 16)
    session = int(said.rpartition(")")[2].split()[3])

    assert not ignored & (1 << (signal.SIGPIPE - 1)), "Python's SIG_IGN was handed on"
    assert pid == session


@pytest.mark.parametrize("tracer_pid", [0, os.getpid()], ids=["nobody", "this process"])
def test_whose_stacks_may_be_read_names_who_may(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracer_pid: int
) -> None:
    """Under Yama only ancestors may, and the sidecar is none. (Whether a kernel has Yama cannot be chosen here.)"""
    said = tmp_path / "said"
    monkeypatch.setattr(linux, "prctl", lambda option, value: said.write_text(f"{option} {value.value}"))
    monkeypatch.setattr(linux, "die_with_parent", lambda agent_pid: None)

    pid = child.start(["/bin/true"], os.environ, tracer_pid=tracer_pid)
    loop.watch_pid(pid, lambda end: loop.stop())
    run(loop)

    # PR_SET_PTRACER of linux/prctl.h; never PR_SET_PTRACER_ANY, which is any process of this user.
    assert (said.read_text() if said.exists() else "") == (f"{0x59616D61} {tracer_pid}" if tracer_pid else "")


def test_when_the_parent_is_killed_its_child_dies_too() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        pid = child.start([sys.executable, "-S", "-c", "import time; time.sleep(600)"], os.environ)
        os.write(write, str(pid).encode())
        time.sleep(600)
    grandchild = int(os.read(read, 100))
    pidfd = os.pidfd_open(grandchild)
    os.close(read)
    os.close(write)

    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)

    import select

    assert select.select([pidfd], [], [], PATIENCE_S)[0], "the grandchild outlived its parent"
    os.close(pidfd)


def test_descriptors_are_swapped_without_loss(loop: Loop) -> None:
    """stdout and stderr given as each other's numbers, as when the agent's own stdio is rearranged."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = child.start(["/bin/sh", "-c", "echo out; echo err >&2"], os.environ, stdout_fd=out_write, stderr_fd=err_write)
    os.close(out_write)
    os.close(err_write)
    loop.watch_pid(pid, lambda end: loop.stop())
    run(loop)

    assert (b"out\n", b"err\n") == (os.read(out_read, 10), os.read(err_read, 10))
    os.close(out_read)
    os.close(err_read)
