"""Time on a core and time in the run queue: the sums, and the kernel's own figures of processes that want one core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.record import AttemptGroup, RankPlace, RankProcesses, Role
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.process import ProcessSampler
from gpulaunch.profiler.samplers.runqueue import RunQueue, ThreadTimes, parse_schedstat

S = 1_000_000_000


def times(ran_s: float, waited_s: float) -> ThreadTimes:
    return ThreadTimes(ran_ns=round(ran_s * S), waited_ns=round(waited_s * S))


def test_the_threads_of_a_process_are_added_up() -> None:
    queue = RunQueue()
    queue.look({1: times(5, 1), 2: times(3, 2)}, 10.0)

    assert (queue.ran_ns, queue.waited_ns) == (8 * S, 3 * S)
    assert queue.runnable_threads is None  # all of that may have been long ago


def test_a_thread_that_has_ended_stays_in_the_sum() -> None:
    queue = RunQueue()
    queue.look({1: times(5, 1), 2: times(3, 2)}, 10.0)
    queue.look({1: times(6, 1)}, 11.0)

    assert (queue.ran_ns, queue.waited_ns) == (9 * S, 3 * S)


def test_a_number_that_was_given_to_a_new_thread_is_a_new_thread() -> None:
    queue = RunQueue()
    queue.look({1: times(5, 1), 2: times(3, 2)}, 10.0)
    queue.look({1: times(5, 1), 2: times(1, 0)}, 11.0)

    assert (queue.ran_ns, queue.waited_ns) == (9 * S, 3 * S)


def test_threads_that_want_a_core_are_those_that_run_and_those_that_wait() -> None:
    queue = RunQueue()
    queue.look({1: times(5, 1), 2: times(3, 2)}, 10.0)
    queue.look({1: times(6, 2), 2: times(3, 3), 3: times(1, 0)}, 12.0)

    assert queue.runnable_threads == 2.0  # 4 s of wanting in 2 s


def test_a_second_look_at_the_same_moment_divides_by_nothing() -> None:
    queue = RunQueue()
    queue.look({1: times(5, 1)}, 10.0)
    queue.look({1: times(6, 1)}, 10.0)

    assert queue.runnable_threads is None
    assert queue.ran_ns == 6 * S


readings = st.lists(
    st.dictionaries(st.integers(1, 4), st.tuples(st.integers(0, 99), st.integers(0, 99))), min_size=1, max_size=10
)


@given(readings)
def test_sums_never_fall(history: list[dict[int, tuple[int, int]]]) -> None:
    queue, before = RunQueue(), (0, 0)
    for moment, threads in enumerate(history):
        queue.look({tid: ThreadTimes(ran_ns=r, waited_ns=w) for tid, (r, w) in threads.items()}, float(moment))
        assert queue.ran_ns >= before[0]
        assert queue.waited_ns >= before[1]
        assert queue.runnable_threads is None or queue.runnable_threads >= 0
        before = queue.ran_ns, queue.waited_ns


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**31))
def test_a_schedstat_is_three_numbers(ran: int, waited: int, turns: int) -> None:
    assert parse_schedstat(b"%d %d %d\n" % (ran, waited, turns)) == ThreadTimes(ran_ns=ran, waited_ns=waited)


@given(st.binary() | st.sampled_from([b"", b"1 2\n", b"1 2 3 4\n", b"-1 2 3\n", b"1 2 x\n"]))
def test_anything_else_is_none(text: bytes) -> None:
    parsed = parse_schedstat(text)
    assert parsed is None or (len(text.split()) == 3 and parsed.ran_ns >= 0)


# -- the kernel's own

# A rank on one core with a thread that is busy until its input ends, a worker process that is as well, and one that
# sleeps. It tells when all of them are there.
RANK = """
import os, select, sys, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
read, write = os.pipe()
busy = True
def work():
    while busy: pass
pids = []
for wants in ("a core", "nothing"):
    pid = os.fork()
    if pid == 0:
        os.close(write)
        if wants == "a core":
            while not select.select([read], [], [], 0)[0]: sum(range(10000))
        os.read(read, 1)
        os._exit(0)
    pids.append(pid)
threading.Thread(target=work).start()
print("ready", flush=True)
sys.stdin.readline()
busy = False
os.close(write)
for pid in pids: os.waitpid(pid, 0)
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.stdin.close()
            assert process.wait(60) == 0


def test_processes_that_share_a_core_wait_for_each_other(rank: subprocess.Popen[str]) -> None:
    """The rank's busy thread is not its first one; the worker that sleeps adds nothing."""
    place = RankPlace(rank=0, local_rank=0, pid=rank.pid)
    group = AttemptGroup(run_id="0" * 16, name="toy", attempt=0, world_size=1, node_rank=0, ranks=(place,))
    sampler = ProcessSampler(lambda: group, MonotonicTotals(), threads_budget_s=10.0)
    (second,) = sampler.read(time.monotonic()).values
    assert second.threads is None
    for _ in range(3):  # what the host takes meanwhile is neither used nor waited for
        first = second
        threading.Event().wait(1.0)
        reading = sampler.read(time.monotonic())
        (second,) = reading.values
        assert reading.errors == ()
        assert second.threads is not None
        if 1.4 < second.threads < 2.6:
            break

    grown_s = {role: waited(second, role) - waited(first, role) for role in Role}
    used_s = {role: cpu_s(second, role) - cpu_s(first, role) for role in Role}
    assert 1.4 < second.threads < 2.6  # two of them want the core all the time, however few turns they get
    for role in Role:
        share = grown_s[role] / (grown_s[role] + used_s[role])
        assert 0.2 < share < 1.0, (role, grown_s, used_s)


def test_a_process_that_sleeps_neither_wants_nor_waits() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print('ready', flush=True); sys.stdin.readline()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            place = RankPlace(rank=0, local_rank=0, pid=process.pid)
            group = AttemptGroup(run_id="0" * 16, name="toy", attempt=0, world_size=1, node_rank=0, ranks=(place,))
            sampler = ProcessSampler(lambda: group, MonotonicTotals(), threads_budget_s=10.0)
            sampler.read(time.monotonic())  # the end of its start
            threading.Event().wait(0.2)
            sampler.read(time.monotonic())
            threading.Event().wait(0.5)
            (idle,) = sampler.read(time.monotonic()).values
        finally:
            process.kill()
    assert idle.threads is not None
    assert idle.threads < 0.2


def waited(rank: RankProcesses, role: Role) -> float:
    return rank.runqueue_s[role]


def cpu_s(rank: RankProcesses, role: Role) -> float:
    return rank.usage[role].cpu_user_s + rank.usage[role].cpu_system_s


def test_the_kernel_counts_a_thread_that_is_not_the_first() -> None:
    """/proc/PID/schedstat alone would not do: it is the first thread's."""
    done = threading.Event()
    started = threading.Event()

    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        started.set()
        done.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(60)
        with open(f"/proc/{os.getpid()}/task/{thread.native_id}/schedstat", "rb") as file:
            seen = parse_schedstat(file.read())
    finally:
        done.set()
        thread.join()
    assert seen is not None
    assert seen.ran_ns >= 0.04 * S
