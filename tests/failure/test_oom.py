"""The kernel's OOM killer for real: small processes in a memory cgroup (version 1) of the test's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.failure.classify import Kind, classify
from gpulaunch.launcher.failure.evidence import OomWatch
from gpulaunch.launcher.failure.kernel_log import KernelLog

pytestmark = pytest.mark.root

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 32 << 20
# Says that it is there; then takes 1 MiB after the other, every page of it, once it is told to.
EATER = """
import sys
print("ready", flush=True)
sys.stdin.readline()
eaten = [bytearray(b"x") * (1 << 20) for _ in range(1024)]
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A limited cgroup with two unlimited ones below it, as a job manager makes them."""
    top = MEMORY / f"gpulaunch-test-{secrets.token_hex(4)}"
    try:
        top.mkdir()
        (top / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as err:
        pytest.skip(f"no memory cgroup of version 1 to be made here: {err.strerror}")
    with contextlib.suppress(OSError):  # not where the kernel does not count swap
        (top / "memory.memsw.limit_in_bytes").write_text(str(LIMIT_BYTES))
    places = [top, top / "a", top / "b"]
    for place in places[1:]:
        place.mkdir()
    yield top
    for place in reversed(places):
        place.rmdir()


Start = Callable[[Path], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process in a cgroup; all are gone before the cgroup is removed."""
    started: list[subprocess.Popen[str]] = []

    def one(place: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (place / "cgroup.procs").write_text(str(process.pid))
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def eat(process: subprocess.Popen[str]) -> None:
    process.communicate("now\n", timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("may_read_the_log", [True, False])
def test_an_oom_kill_is_told_from_a_plain_sigkill(
    cgroup: Path, start: Start, make_end: Any, may_read_the_log: bool
) -> None:
    """Of three ranks in cgroups deeper than the agent's one eats too much; its neighbour in the same cgroup and one in
    another are killed by somebody."""
    log = KernelLog() if may_read_the_log else KernelLog("/nowhere/kmsg")
    watch = OomWatch(log=log)
    watch.start()
    if may_read_the_log and not (log.readable and log.numbers_are_ours):
        pytest.skip("this container does not show the kernel log, or numbers its processes anew")
    eater, beside, elsewhere = start(cgroup / "a"), start(cgroup / "a"), start(cgroup / "b")
    for process in (eater, beside, elsewhere):
        watch.watch(process.pid)

    def kind_of(process: subprocess.Popen[str]) -> Kind:
        fact = watch.evidence(process.pid)
        return classify(make_end(pid=process.pid, signal=signal.SIGKILL, evidence=(fact,) if fact else ()))

    eat(eater)
    assert kind_of(eater) is Kind.HOST_OOM

    for process in (beside, elsewhere):
        process.kill()
        process.wait()
        assert kind_of(process) is Kind.SIGNAL
    log.close()


def test_a_rank_that_moved_after_its_start_is_found_by_the_next_look(cgroup: Path, start: Start) -> None:
    """And a look between its death and its reaping, when the kernel says that it is nowhere, does no harm."""
    watch = OomWatch(log=KernelLog("/nowhere/kmsg"))
    watch.start()
    moving = start(cgroup / "a")
    watch.watch(moving.pid)
    (cgroup / "b/cgroup.procs").write_text(str(moving.pid))
    watch.watch(moving.pid)

    assert moving.stdin is not None
    print("now", file=moving.stdin, flush=True)
    os.waitid(os.P_PID, moving.pid, os.WEXITED | os.WNOWAIT)
    watch.watch(moving.pid)

    assert "in this rank's cgroup (memory.oom_control: oom_kill 0 -> 1)" in str(watch.evidence(moving.pid))
