"""`torch.distributed.elastic.timer` as its documentation has it: a block of code that takes too long ends its rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulaunch.launcher.agent.timers import FileTimers, pipe_of
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.loop import Loop

PROGRAM = """
    import os, sys, time
    import torch.distributed.elastic.timer as timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=60):
        print("IN TIME", flush=True)
    if os.environ["RANK"] == sys.argv[1]:
        with timer.expires(after=1, scope="the step"):
            time.sleep(600)
    if sys.argv[1] != "none":
        time.sleep(600)
"""
ENABLED = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(PROGRAM))
    return file


@pytest.mark.torch
def test_a_rank_whose_timer_expires_is_killed_and_named(gpulaunch, program: Path) -> None:
    """torchrun kills the rank, too, and then itself, so that its other ranks live on: with one rank here."""
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", program, "0"],
        env={**os.environ, **ENABLED}, cwd=program.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (theirs.returncode, theirs.stdout) == (-signal.SIGKILL, "IN TIME\n"), theirs.stderr

    ended = gpulaunch("--nproc", "2", program, "1", env=ENABLED, timeout_s=60)

    assert ended.code == 124, ended
    assert ended.stdout.count("IN TIME") == 2
    assert "rank 1 (pid " in ended.stderr
    assert "its timer the step has expired; it is sent SIGKILL" in ended.stderr
    assert "hung: its timer the step (torch.distributed.elastic.timer) has expired" in ended.stderr


@pytest.mark.torch
def test_timers_that_are_released_in_time_do_nothing(gpulaunch, program: Path, tmp_path: Path) -> None:
    env = {**ENABLED, "TORCHELASTIC_TIMER_FILE": str(tmp_path / "pipe"), "TORCHELASTIC_HEALTH_CHECK_PORT": "8080"}
    ended = gpulaunch("--nproc", "2", program, "none", env=env)

    assert ended.code == 0, ended
    assert ended.stdout.count("IN TIME") == 2
    assert not (tmp_path / "pipe").exists()
    assert "TORCHELASTIC_HEALTH_CHECK_PORT: no health check server is started, as with torchrun" in ended.stderr


# --- the pipe


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def line(pid: int, scope: str, in_s: float | None, signum: int = 9) -> bytes:
    """As torch's client writes it; None releases."""
    when_s = -1 if in_s is None else time.time() + in_s
    said = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": when_s, "signal": signum}
    return json.dumps(said).encode() + b"\n"


def turn_until(loop: Loop, done: Callable[[], bool], within_s: float = 10.0) -> None:
    until_s = time.monotonic() + within_s
    while not done() and time.monotonic() < until_s:
        loop.turn(0.05)


def test_what_expires_is_told_and_what_is_released_replaced_or_without_a_signal_is_not(
    loop: Loop, tmp_path: Path
) -> None:
    told: list[tuple[int, int, str]] = []
    timers = FileTimers(loop, str(tmp_path / "pipe"), lambda *one: told.append(one))
    lines = [
        line(1, "released", 0.3), line(1, "released", None), line(1, "replaced", 0.3), line(1, "replaced", 60.0),
        line(1, "silent", 0.1, signum=0), b"no json\n", b"[]\n", b'{"pid": "x"}\n', line(2, "late", 0.6),
        line(2, "soon", 0.2, signum=15), line(3, "past", -5.0),
    ]  # fmt: skip
    for at in range(0, len(b"".join(lines)), 100):  # cut anywhere: a reader may be slower than the writers
        with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
            pipe.write(b"".join(lines)[at : at + 100])
            loop.turn(0.01)
    turn_until(loop, lambda: len(told) == 3)
    turn_until(loop, lambda: False, 0.2)
    timers.close()

    assert told == [(3, 9, "past"), (2, 15, "soon"), (2, 9, "late")]
    assert not (tmp_path / "pipe").exists()


def said(**fields: object) -> bytes:
    return json.dumps({"version": 1, "pid": 1, "scope_id": "x", "expiration_time": 0, "signal": 9} | fields).encode()


@pytest.mark.parametrize(
    "hostile",
    [
        said(expiration_time=10**400), said(expiration_time=float("inf")), said(expiration_time=float("nan")),
        said(expiration_time=-(10**400)), said(signal=2**40), said(signal=65), said(pid=[]), b"5", b"{}", b"[" * 4000,
        b'{"pid": 1' + b"0" * 4000 + b"}",
    ],
    ids=lambda text: text[:70].decode(),
)  # fmt: skip
def test_what_no_client_says_is_not_heard_and_what_comes_after_it_is(
    loop: Loop, tmp_path: Path, hostile: bytes
) -> None:
    told: list[tuple[int, int, str]] = []
    timers = FileTimers(loop, str(tmp_path / "pipe"), lambda *one: told.append(one))
    with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
        pipe.write(hostile + b"\n")
        pipe.write(line(2, "after", 0.05))
    turn_until(loop, lambda: bool(told))
    timers.close()

    assert told == [(2, 9, "after")]


def test_timers_of_an_attempt_that_is_over_are_forgotten(loop: Loop, tmp_path: Path) -> None:
    """Those in the pipe, too: a new rank may have the pid of a dead one."""
    told: list[tuple[int, int, str]] = []
    timers = FileTimers(loop, str(tmp_path / "pipe"), lambda *one: told.append(one))
    with open(tmp_path / "pipe", "wb", buffering=0) as pipe:
        pipe.write(line(1, "set", 0.1))
        loop.turn(0.01)
        pipe.write(line(1, "in the pipe", 0.1) + line(1, "cut", 0.1)[:50])
        timers.clear()
        pipe.write(line(2, "of the next attempt", 0.2))
    turn_until(loop, lambda: bool(told))
    timers.close()

    assert told == [(2, 9, "of the next attempt")]


def test_a_pipe_of_a_killed_launcher_is_replaced_and_a_file_of_the_users_is_not(loop: Loop, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    FileTimers(loop, str(tmp_path / "pipe"), lambda *_: None).close()
    (tmp_path / "file").write_text("mine")

    with pytest.raises(UsageError, match="is not a named pipe; use another path"):
        FileTimers(loop, str(tmp_path / "file"), lambda *_: None)
    with pytest.raises(UsageError, match="cannot create the pipe"):
        FileTimers(loop, str(tmp_path / "nowhere" / "pipe"), lambda *_: None)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({}, ""),
        ({"TORCHELASTIC_TIMER_FILE": "/x"}, ""),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, ""),
        (ENABLED, "/run/timers"),
        ({**ENABLED, "TORCHELASTIC_TIMER_FILE": "/x"}, "/x"),
    ],
)
def test_timers_are_there_where_torchruns_variable_asks_for_them(environ: dict[str, str], path: str) -> None:
    assert pipe_of(environ, "/run") == path
