"""What the keeper ends after SIGKILL of the agent: what bears the run's mark and descends from the agent, no more."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulaunch.launcher.loop import linux

CGROUPS = Path("/sys/fs/cgroup")
ASKS = """
import json, sys
from gpulaunch.launcher.loop import orphan_reaper
print(json.dumps(orphan_reaper.leftovers(sys.argv[1])))
"""
# Starts one more process and waits for it: what a queue's daemon does with what is submitted, or a rank's helper.
STARTS_ANOTHER = """
import os, subprocess, sys
more = [sys.argv[1].split("=")] if sys.argv[1] else []
child = subprocess.Popen(["sleep", "600"], env={**os.environ, **dict(more)})
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        for pid in (*linux.descendants_of(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def marked(mark: str) -> dict[str, str]:
    return {**os.environ, linux.RUNS_VARIABLE: f"other:{mark}"}


def leftovers(mark: str) -> tuple[list[int], list[int]]:
    """As a keeper sees it whose new parent is this process: it is what orphans were given to."""
    said = subprocess.run([sys.executable, "-c", ASKS, mark], capture_output=True, text=True, check=True).stdout
    found, unclear = json.loads(said)
    return sorted(found), unclear


def until_marked(pid: int, mark: str) -> int:
    """An exec takes a moment."""
    until_s = time.monotonic() + 10
    while not linux.is_of_run(pid, mark):
        assert time.monotonic() < until_s, f"process {pid} never bears the mark"
        time.sleep(0.005)
    return pid


def test_orphans_that_bear_the_mark_and_what_is_below_them(mark: str, started: list[subprocess.Popen[str]]) -> None:
    orphan = subprocess.Popen(
        [sys.executable, "-c", STARTS_ANOTHER, ""], env=marked(mark), stdout=subprocess.PIPE, text=True
    )
    started.append(orphan)
    assert orphan.stdout is not None
    below = until_marked(int(orphan.stdout.readline()), mark)

    assert leftovers(mark) == (sorted([orphan.pid, below]), [])
    assert leftovers(secrets.token_hex(8)) == ([], []), "of another run"


def test_what_a_foreign_process_runs_in_a_ranks_environment_is_left_alone(
    mark: str, started: list[subprocess.Popen[str]]
) -> None:
    """As slurmstepd does with what sbatch submitted from a rank."""
    handed = f"{linux.RUNS_VARIABLE}={mark}"
    queue = subprocess.Popen([sys.executable, "-c", STARTS_ANOTHER, handed], stdout=subprocess.PIPE, text=True)
    started.append(queue)
    assert queue.stdout is not None
    until_marked(int(queue.stdout.readline()), mark)

    assert leftovers(mark) == ([], [])


@pytest.mark.root
def test_what_the_new_parent_itself_has_started_in_another_cgroup_is_left_alone(
    mark: str, started: list[subprocess.Popen[str]]
) -> None:
    """As systemd does with what systemd-run submitted: it is the parent of orphans, too."""
    parent = next(path for path in (CGROUPS, CGROUPS / "pids", CGROUPS / "memory") if (path / "cgroup.procs").exists())
    unit = parent / f"test-{mark}"
    unit.mkdir()
    try:
        service = subprocess.Popen(["sleep", "600"], env=marked(mark), text=True)
        started.append(service)
        until_marked(service.pid, mark)
        assert leftovers(mark) == ([service.pid], []), "in this cgroup it would be"
        (unit / "cgroup.procs").write_text(str(service.pid))

        assert leftovers(mark) == ([], [])
        service.kill()
        service.wait()
        started.clear()
    finally:
        until_s = time.monotonic() + 10
        while unit.exists():
            try:
                unit.rmdir()
            except OSError:  # the kernel takes the dead out of it by and by
                assert time.monotonic() < until_s
                time.sleep(0.01)


def test_whether_a_process_is_ending() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert linux.is_ending(child.pid), "a zombie"
    assert not linux.is_ending(os.getpid())
    assert linux.session_of(2) is None or not linux.is_ending(2), "a kernel thread has no memory and is not ending"
    child.wait()
    assert linux.is_ending(child.pid)


def test_which_process_cleans_up_after_the_others() -> None:
    def is_tracker(*words: str) -> bool:
        process = subprocess.Popen(
            [sys.executable, "-c", *words, "multiprocessing.resource_tracker"], stdin=subprocess.PIPE
        )
        try:
            until_s = time.monotonic() + 10
            while words[0] not in linux.cmdline_of(process.pid) and time.monotonic() < until_s:
                time.sleep(0.005)
            return linux.is_resource_tracker(process.pid)
        finally:
            process.kill()
            process.communicate()

    read = "import sys; sys.stdin.read()"
    assert is_tracker(f"from multiprocessing.resource_tracker import main;{read}"), "as CPython 3.11 to 3.14 starts it"
    assert not is_tracker(read), "an argument that only names it"
