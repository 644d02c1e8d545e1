"""Looks into real processes with py-spy; and stand-ins for it that hang, babble, refuse or are not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.pyspy import Look, PySpy, find_pyspy, parse_pyspy, reason_of
from gpulaunch.profiler.stack import Frame

NAPS = """
import threading, time
def nap():
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
nap()
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(census: None) -> Iterator[Start]:
    """Start a process that has something to say first; it is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*argv: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield one
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def stand_in(tmp_path: Path) -> Callable[..., PySpy]:
    """A py-spy that is a shell script."""

    def one(script: str, *, longest_s: float = 30.0) -> PySpy:
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return PySpy(str(path), longest_s=longest_s)

    return one


def dumped(*threads: dict[str, object]) -> str:
    known: dict[str, object] = {"thread_name": None, "os_thread_id": None, "active": True, "owns_gil": False}
    return json.dumps([{**known, "frames": [], **thread} for thread in threads])


def framed(name: str) -> list[dict[str, object]]:
    return [{"name": name, "filename": "train.py", "line": 1}]


# -- the real one


def test_the_main_thread_of_a_process_is_seen_where_it_is(start: Start) -> None:
    process = start(sys.executable, "-c", NAPS)

    look = PySpy().look(process.pid)

    assert [frame.name for frame in look.frames] == ["nap", "<module>"]
    assert look.frames[1] == Frame(name="<module>", file="<string>", line=7)
    assert look.failed == ""
    assert look.cpu_s > 0


def test_a_stopped_process_is_seen_and_stays_stopped(start: Start) -> None:
    process = start(sys.executable, "-c", NAPS)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    assert PySpy().look(process.pid).frames[0].name == "nap"
    assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_process_that_is_no_python_is_told_in_one_line(start: Start) -> None:
    look = PySpy().look(start("sh", "-c", "echo ready; exec sleep 600").pid)

    assert look.frames == ()
    assert look.failed.startswith("py-spy: ")
    assert "\n" not in look.failed


def test_a_process_that_has_ended_is_no_failure() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    look = PySpy().look(ended.pid)

    assert (look.frames, look.failed) == ((), "")


@pytest.mark.root
def test_where_ptrace_is_forbidden_the_reason_says_so(start: Start) -> None:
    """Another user's process, as py-spy sees it under Yama or in a container without SYS_PTRACE."""
    process = start(sys.executable, "-c", NAPS)
    answers, tell = os.pipe()
    nobody = os.fork()
    if nobody == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(tell, PySpy().look(process.pid).failed.encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(answers) as pipe:
        said = pipe.read()
    os.waitpid(nobody, 0)

    assert said.startswith("py-spy: permission denied (ptrace: another user, Yama, or a container")


# -- which one


def test_the_one_beside_this_python_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, path = tmp_path / "bin", tmp_path / "path"
    for directory in (beside, path):
        directory.mkdir()
        (directory / "py-spy").touch(0o700)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(path))

    assert find_pyspy() == str(beside / "py-spy")
    (beside / "py-spy").chmod(0o600)
    assert find_pyspy() == str(path / "py-spy")


def test_one_that_is_installed_while_the_job_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    spy = PySpy()

    assert spy.absent() == "py-spy: it is installed neither next to this Python nor on PATH"
    assert spy.look(os.getpid()) == Look(failed=spy.absent())
    (tmp_path / "py-spy").touch(0o700)
    assert spy.absent() == ""


# -- stand-ins


def test_the_thread_with_the_number_of_the_process_is_the_main_one(stand_in: Callable[..., PySpy]) -> None:
    out = dumped(
        {"thread_name": "MainThread", "os_thread_id": 7, "frames": framed("named")},
        {"thread_name": "pool-1", "os_thread_id": os.getpid(), "frames": framed("numbered")},
    )

    assert stand_in(f"echo '{out}'").look(os.getpid()).frames[0].name == "numbered"


def test_where_numbers_mean_nothing_its_name_tells(stand_in: Callable[..., PySpy]) -> None:
    """A rank in a pid namespace of its own."""
    out = dumped(
        {"thread_name": "pool-1", "os_thread_id": 3, "frames": framed("pooled")},
        {"thread_name": "MainThread", "os_thread_id": 1, "frames": framed("main")},
    )

    assert stand_in(f"echo '{out}'").look(os.getpid()).frames[0].name == "main"


@pytest.mark.parametrize(
    "script",
    [
        "exec sleep 600",
        "exec sleep 600 >&- 2>&-",  # says that it is done, and is not
        "echo '[]'; exec sleep 600",
    ],
)
def test_one_that_hangs_is_killed(stand_in: Callable[..., PySpy], script: str) -> None:
    """That no process is left is the census's to see."""
    look = stand_in(script, longest_s=0.3).look(os.getpid())

    assert (look.frames, look.failed) == ((), "py-spy: it did not answer in time")


def test_one_that_never_stops_talking_is_killed(stand_in: Callable[..., PySpy]) -> None:
    assert stand_in("exec cat /dev/zero").look(os.getpid()).failed == "py-spy: it did not answer in time"


@pytest.mark.parametrize("out", ["", "[]", "null", "{}", "[[]]", '[{"thread_name": 1}]', "\\0"])
def test_one_that_talks_nonsense_has_found_nothing(stand_in: Callable[..., PySpy], out: str) -> None:
    assert stand_in(f"printf '%b' '{out}'").look(os.getpid()).failed == "py-spy: it found no Python thread"


def test_one_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    assert PySpy(str(tmp_path / "nothing")).look(os.getpid()).failed == "py-spy: No such file or directory"


def test_it_can_be_ended_though_the_sidecar_blocks_sigterm(stand_in: Callable[..., PySpy]) -> None:
    spy = stand_in("grep SigBlk /proc/self/status >&2; exit 1")
    looks: list[Look] = []

    def as_the_sidecar_does() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        looks.append(spy.look(os.getpid()))

    thread = threading.Thread(target=as_the_sidecar_does)
    thread.start()
    thread.join()

    assert looks[0].failed == "py-spy: SigBlk:\t0000000000000000"


def test_it_leaves_no_descriptor_open(stand_in: Callable[..., PySpy], tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stand_in("exit 1").look(os.getpid())
    stand_in("exec sleep 600", longest_s=0.1).look(os.getpid())
    PySpy(str(tmp_path / "nothing")).look(os.getpid())

    assert len(os.listdir("/proc/self/fd")) == before


# -- parsers


@given(st.binary())
def test_what_pyspy_may_print(out: bytes) -> None:
    parse_pyspy(out)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_json_it_may_print(document: object) -> None:
    parse_pyspy(json.dumps(document).encode())


@given(st.binary())
def test_what_errors_it_may_print(err: bytes) -> None:
    assert "\n" not in reason_of(err)


@pytest.mark.parametrize(
    ("err", "reason"),
    [
        (b"", ""),
        (
            b"Error: Failed to find python version from target process\n",
            "Failed to find python version from target process",
        ),
        (b"Error: Failed to get process\nCaused by:\n    0: No such process\n", "No such process"),
        (b"Error: it broke\nStack backtrace:\n   0: main\n", "it broke"),
        (
            b"Permission Denied: Try running again with elevated permissions\n",
            "permission denied (ptrace: another user, Yama, or a container without SYS_PTRACE)",
        ),
    ],
)
def test_an_error_is_one_line(err: bytes, reason: str) -> None:
    assert reason_of(err) == reason
