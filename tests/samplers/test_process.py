"""The processes of a rank: over a fake /proc for the stories that the kernel tells rarely, and over real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.record import AttemptGroup, RankPlace, RankProcesses, Role
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.process import (
    ProcessSampler,
    ProcessStat,
    parse_resident_pages,
    parse_stat,
    parse_statm,
)

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
S = 1_000_000_000


def group(*pids: int, attempt: int = 0) -> AttemptGroup:
    ranks = tuple(RankPlace(rank=rank, local_rank=rank, pid=pid) for rank, pid in enumerate(pids))
    return AttemptGroup(run_id="0" * 16, name="toy", attempt=attempt, world_size=len(pids), node_rank=0, ranks=ranks)


class FakeProc:
    """A /proc that holds what a test puts into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.counts_waits()

    def counts_waits(self, text: str = "5 7 9\n") -> None:
        (self.root / "self").mkdir(exist_ok=True)
        (self.root / "self/schedstat").write_text(text)

    def thread(self, pid: int, tid: int, *, ran: int = 0, waited: int = 0, children: tuple[int, ...] = ()) -> None:
        home = self.root / f"{pid}/task/{tid}"
        home.mkdir(parents=True, exist_ok=True)
        (home / "schedstat").write_text(f"{ran * S} {waited * S} 3\n")
        (home / "children").write_text("".join(f"{child} " for child in children))

    def opens(self, pid: int, *targets: Path) -> None:
        shutil.rmtree(self.root / f"{pid}/fd", ignore_errors=True)
        (self.root / f"{pid}/fd").mkdir(parents=True)
        for number, target in enumerate(targets):
            (self.root / f"{pid}/fd/{number}").symlink_to(target)

    def put(self, pid: int, *, comm: str = "python", state: str = "S", start: int = 100, user: int = 0, system: int = 0,
            pages: int = 10, shared: int = 0, pss_kb: int | None = 7, pss_parts: str = "", ran: int = 0,
            waited: int = 0, children: tuple[int, ...] = ()) -> None:  # fmt: skip
        home = self.root / str(pid)
        self.thread(pid, pid, ran=ran, waited=waited, children=children)
        fields = [state, 1, pid, pid, 0, -1, 0, 0, 0, 0, 0, user, system, 0, 0, 20, 0, 1, 0, start, 5120000, pages]
        (home / "stat").write_text(f"{pid} ({comm}) " + " ".join(map(str, fields)) + " 0 0\n")
        (home / "statm").write_text(f"1251 {pages} {shared} 193 0 270 0\n")
        if pss_kb is None:
            (home / "smaps_rollup").unlink(missing_ok=True)
        else:
            (home / "smaps_rollup").write_text(
                f"5591-7fff ---p 0 00:00 0 [rollup]\nRss: 99 kB\nPss: {pss_kb} kB\n{pss_parts}"
            )

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


@pytest.fixture
def fake(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


class Clock:
    """Time that moves when the test says so, and a little with every look."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def cpu(rank: RankProcesses, role: Role) -> tuple[float, float]:
    usage = rank.usage[role]
    return usage.cpu_user_s, usage.cpu_system_s


def test_a_rank_and_its_workers_are_told_apart(fake: FakeProc) -> None:
    fake.put(10, pages=100, pss_kb=50, user=3 * TICKS_PER_S, children=(11, 12))
    fake.put(11, comm="pt_data_worker", pages=20, pss_kb=5, user=TICKS_PER_S, children=(13,))
    fake.put(12, comm="pt_data_worker", pages=30, pss_kb=6, system=TICKS_PER_S)
    fake.put(13, comm="ffmpeg", pages=40, pss_kb=7)
    reading = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock()).read(time.monotonic())
    (rank,) = reading.values

    assert reading.errors == ()
    assert rank.usage[Role.TRAINER].rss_bytes == 100 * PAGE_BYTES
    assert rank.usage[Role.TRAINER].pss_bytes == 50 * 1024
    assert rank.usage[Role.WORKERS].rss_bytes == 90 * PAGE_BYTES
    assert rank.usage[Role.WORKERS].pss_bytes == 18 * 1024
    assert cpu(rank, Role.TRAINER) == (3.0, 0.0)
    assert cpu(rank, Role.WORKERS) == (1.0, 1.0)
    assert rank.workers_alive == 2


def test_no_group_means_no_ranks_and_no_error(fake: FakeProc) -> None:
    reading = ProcessSampler(lambda: None, MonotonicTotals(), proc=fake.root, clock=Clock()).read(time.monotonic())
    assert reading.values == ()
    assert reading.errors == ()


def test_cpu_seconds_of_workers_that_ended_stay(fake: FakeProc) -> None:
    """Every epoch starts new workers; the counter must not fall when the old ones go."""
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(10, children=(11,))
    fake.put(11, user=5 * TICKS_PER_S)
    assert cpu(sampler.read(0.0).values[0], Role.WORKERS) == (5.0, 0.0)

    fake.remove(11)
    fake.put(10)
    gone = sampler.read(1.0)
    assert gone.errors == ()
    assert cpu(gone.values[0], Role.WORKERS) == (5.0, 0.0)
    assert gone.values[0].usage[Role.WORKERS].rss_bytes == 0

    fake.put(10, children=(12,))
    fake.put(12, user=2 * TICKS_PER_S)
    assert cpu(sampler.read(2.0).values[0], Role.WORKERS) == (7.0, 0.0)


def test_a_worker_that_the_children_file_leaves_out_for_a_moment_is_not_counted_twice(fake: FakeProc) -> None:
    """proc(5): `children` is reliable only if all of them stand still."""
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(11, user=5 * TICKS_PER_S)
    seen: list[tuple[float, float]] = []
    for children in ((11,), (), (11,)):
        fake.put(10, children=children)
        seen.append(cpu(sampler.read(0.0).values[0], Role.WORKERS))

    assert seen == [(5.0, 0.0)] * 3


def test_a_pid_given_to_a_stranger_is_not_the_rank(fake: FakeProc) -> None:
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(10, start=100, user=4 * TICKS_PER_S)
    sampler.read(0.0)
    fake.put(10, start=999, user=50 * TICKS_PER_S, pages=1000)
    for moment in (1.0, 2.0):
        (rank,) = sampler.read(moment).values
        assert cpu(rank, Role.TRAINER) == (4.0, 0.0)
        assert rank.usage[Role.TRAINER].rss_bytes == 0


def test_the_same_pid_in_a_new_attempt_is_the_rank(fake: FakeProc) -> None:
    attempts = [group(10, attempt=0), group(10, attempt=1)]
    sampler = ProcessSampler(lambda: attempts[0], MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(10, start=100, user=4 * TICKS_PER_S)
    sampler.read(0.0)
    attempts.pop(0)
    fake.put(10, start=999, user=1 * TICKS_PER_S)

    assert cpu(sampler.read(1.0).values[0], Role.TRAINER) == (5.0, 0.0)


def test_an_orphaned_worker_is_followed_until_it_ends(fake: FakeProc) -> None:
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(10, children=(11,))
    fake.put(11, comm="pt_data_worker", pages=8)
    sampler.read(0.0)
    fake.remove(10)

    (rank,) = sampler.read(1.0).values
    assert rank.usage[Role.WORKERS].rss_bytes == 8 * PAGE_BYTES
    assert rank.workers_alive == 1


def test_a_zombie_worker_is_not_alive_and_holds_nothing(fake: FakeProc) -> None:
    fake.put(10, children=(11,))
    fake.put(11, comm="pt_data_worker", state="Z", pages=0, pss_kb=None)
    (rank,) = (
        ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
        .read(time.monotonic())
        .values
    )

    assert rank.workers_alive == 0
    assert rank.usage[Role.WORKERS].pss_bytes == 0


def test_where_the_kernel_has_no_proportional_size_it_is_unknown(fake: FakeProc) -> None:
    fake.put(10, pss_kb=None)
    (rank,) = (
        ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
        .read(time.monotonic())
        .values
    )

    assert rank.usage[Role.TRAINER].pss_bytes is None


def test_what_is_a_files_is_told_from_what_is_theirs(fake: FakeProc) -> None:
    """A mapped dataset is in the resident memory of whoever reads it, and the kernel takes it back when it has to."""
    fake.put(10, pages=100, shared=70, children=(11, 12))
    fake.put(11, comm="pt_data_worker", pages=20, shared=15, pss_kb=9, pss_parts="Pss_Anon: 4 kB\nPss_File: 5 kB\n")
    fake.put(12, comm="pt_data_worker", pages=20, shared=15, pss_kb=8, pss_parts="Pss_Anon: 3 kB\nPss_File: 5 kB\n")
    (rank,) = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock()).read(0.0).values

    assert rank.usage[Role.TRAINER].anonymous_bytes == 30 * PAGE_BYTES
    assert rank.usage[Role.TRAINER].virtual_bytes == 1251 * PAGE_BYTES
    assert rank.usage[Role.TRAINER].pss_anonymous_bytes is None, "this kernel has not told it apart"
    assert rank.usage[Role.WORKERS].anonymous_bytes == 10 * PAGE_BYTES
    assert rank.usage[Role.WORKERS].pss_bytes == 17 * 1024
    assert rank.usage[Role.WORKERS].pss_anonymous_bytes == 7 * 1024


def test_proportional_sizes_are_asked_one_after_another(fake: FakeProc) -> None:
    """A look costs 5 ms per process and holds a lock of the rank: never all at once, again after the period only."""
    for pid in (10, 11, 12):
        fake.put(pid, pss_kb=1)
    clock = Clock(step_s=0.004)  # each look at the clock takes 4 ms: two looks fit into the budget
    ranks = [10, 11, 12]
    sampler = ProcessSampler(lambda: group(*ranks), MonotonicTotals(), proc=fake.root, clock=clock, pss_period_s=30.0)
    known: list[list[int | None]] = []
    for moment in (0.0, 1.0, 2.0):
        known.append([rank.usage[Role.TRAINER].pss_bytes for rank in sampler.read(moment).values])
    assert known == [[1024, 1024, None], [1024, 1024, 1024], [1024, 1024, 1024]]

    for pid in (10, 11, 12):
        fake.put(pid, pss_kb=2)
    before = [rank.usage[Role.TRAINER].pss_bytes for rank in sampler.read(29.0).values]
    after = [rank.usage[Role.TRAINER].pss_bytes for rank in sampler.read(30.0).values]
    assert before == [1024] * 3
    assert after == [2048, 2048, 1024]

    fake.put(13, pss_kb=3)  # a rank that was never asked does not wait
    ranks.append(13)
    soon = [rank.usage[Role.TRAINER].pss_bytes for rank in sampler.read(31.0).values]
    later = [rank.usage[Role.TRAINER].pss_bytes for rank in sampler.read(60.0).values]
    assert soon == [2048, 2048, 1024, 3072], "the last look took a share of the time; it is made up for first"
    assert later[2] == 2048


def test_what_may_not_be_read_is_an_error_and_the_rest_goes_on(fake: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.put(10, user=TICKS_PER_S)
    fake.put(11, user=TICKS_PER_S)
    sampler = ProcessSampler(lambda: group(10, 11), MonotonicTotals(), proc=fake.root, clock=Clock())
    sampler.read(0.0)
    shutil.rmtree(fake.root / "10/task")
    (fake.root / "10/task").write_text("not a directory")  # any OSError that does not mean "gone"
    fake.put(11, user=2 * TICKS_PER_S)
    reading = sampler.read(1.0)

    assert reading.errors == ("rank 0: Not a directory", "threads of rank 0: Not a directory")
    assert [cpu(rank, Role.TRAINER) for rank in reading.values] == [(1.0, 0.0), (2.0, 0.0)]


def test_waiting_for_a_core_is_told_by_role_and_stays_when_a_worker_ends(fake: FakeProc) -> None:
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(10, waited=3, children=(11, 12))
    fake.thread(10, 15, waited=4)  # not the first thread: nothing below /proc/10 but its own file tells of it
    fake.put(11, waited=1)
    fake.put(12, waited=2)
    (rank,) = sampler.read(0.0).values
    assert rank.runqueue_s == {Role.TRAINER: 7.0, Role.WORKERS: 3.0}
    assert rank.main_thread_s == 3.0

    fake.remove(11)
    fake.put(10, waited=5, children=(12,))
    (rank,) = sampler.read(1.0).values
    assert rank.runqueue_s == {Role.TRAINER: 9.0, Role.WORKERS: 3.0}


def test_waiting_goes_on_in_the_next_sidecar(fake: FakeProc) -> None:
    ledger = MonotonicTotals()
    fake.put(10, waited=3)
    fake.thread(10, 15, waited=4)
    ProcessSampler(lambda: group(10), ledger, proc=fake.root, clock=Clock()).read(0.0)
    shutil.rmtree(fake.root / "10/task/15")
    successor = ProcessSampler(lambda: group(10), ledger, proc=fake.root, clock=Clock())

    # It never saw the thread that has ended; a counter must not fall for that.
    assert successor.read(1.0).values[0].runqueue_s[Role.TRAINER] == 7.0
    fake.put(10, waited=9)
    assert successor.read(2.0).values[0].runqueue_s[Role.TRAINER] == 9.0


def test_the_threads_of_a_rank_are_those_that_want_a_core(fake: FakeProc) -> None:
    """Of dozens of threads in a torch process most sleep; those of another rank are its own."""
    sampler = ProcessSampler(lambda: group(10, 20), MonotonicTotals(), proc=fake.root, clock=Clock())
    fake.put(10, ran=100, waited=50, children=(11,))
    fake.thread(10, 15, ran=7)
    fake.put(11, ran=30)
    fake.put(20, ran=1)
    assert [rank.threads for rank in sampler.read(10.0).values] == [None, None]

    fake.put(10, ran=101, waited=51, children=(11,))
    fake.put(11, ran=31, waited=1)
    assert [rank.threads for rank in sampler.read(12.0).values] == [2.0, 0.0]


def test_a_worker_that_has_ended_and_was_not_reaped_wants_nothing(fake: FakeProc) -> None:
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    threads: list[float | None] = []
    for moment, state in enumerate("SSZ"):
        fake.put(10, ran=moment, children=(11,))
        fake.put(11, ran=moment, state=state)
        threads.append(sampler.read(float(moment)).values[0].threads)

    assert threads == [None, 2.0, 1.0]


@pytest.mark.parametrize("text", ["", "0\n", "nothing\n"])
def test_a_kernel_that_does_not_count_waiting_is_told_of_once(fake: FakeProc, text: str) -> None:
    fake.counts_waits(text)
    fake.put(10, waited=3)
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())
    first, second = sampler.read(0.0), sampler.read(1.0)

    assert first.errors == ("run queue: this kernel does not count it",)
    assert second.errors == ()
    assert second.values[0].runqueue_s == {}
    assert second.values[0].threads is None


def test_a_worker_that_another_thread_has_started_is_found(fake: FakeProc) -> None:
    fake.put(10)
    fake.thread(10, 15, children=(11,))
    fake.put(11, comm="pt_data_worker", children=(12,))
    fake.put(12, user=2 * TICKS_PER_S)
    sampler = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock())

    assert sampler.read(0.0).values[0].workers_alive == 1
    assert cpu(sampler.read(1.0).values[0], Role.WORKERS) == (2.0, 0.0)


def test_threads_are_looked_at_in_turns_where_there_are_too_many(fake: FakeProc) -> None:
    """What one refresh has no time for is next; the totals only come a little later."""
    for pid in (10, 11, 12):
        fake.put(pid, waited=pid)
    clock = Clock(step_s=0.002)  # two looks at the clock fit into the budget
    sampler = ProcessSampler(
        lambda: group(10, 11, 12), MonotonicTotals(), proc=fake.root, clock=clock, threads_budget_s=0.005
    )
    seen: list[list[float]] = []
    for moment in (0.0, 1.0):
        seen.append([rank.runqueue_s[Role.TRAINER] for rank in sampler.read(moment).values])

    assert seen == [[10.0, 11.0, 0.0], [10.0, 11.0, 12.0]]


def test_batches_in_shared_memory_are_told_by_worker(fake: FakeProc, tmp_path: Path) -> None:
    shm = tmp_path / "dev/shm"  # not where the listing is: what is unlinked is in none
    shm.mkdir(parents=True)
    first, second, own = shm / "torch_11_1_0 (deleted)", shm / "torch_12_1_0 (deleted)", shm / "torch_10_1_0 (deleted)"
    for path, size_bytes in ((first, 100), (second, 20), (own, 3)):
        path.write_bytes(bytes(size_bytes))
    fake.put(10, children=(11, 12))
    fake.put(11, comm="pt_data_worker")
    fake.put(12, comm="pt_data_worker")
    fake.opens(10, first, own)
    fake.opens(11, first)
    fake.opens(12, second)
    sampler = ProcessSampler(
        lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock(), shm_dir=tmp_path / "none", shm_period_s=5.0
    )
    assert sampler.read(0.0).values[0].shm_inflight_bytes == {11: 100, 12: 20}

    fake.remove(11)
    fake.opens(12)
    assert sampler.read(4.0).values[0].shm_inflight_bytes == {11: 100, 12: 20}  # not due yet
    assert sampler.read(5.0).values[0].shm_inflight_bytes == {11: 100}  # the rank still has it

    fake.put(10)
    fake.remove(12)
    fake.opens(10, own)
    assert sampler.read(10.0).values[0].shm_inflight_bytes == {}


def test_a_rank_without_workers_is_not_asked_what_it_has_open(fake: FakeProc) -> None:
    fake.put(10)
    (fake.root / "10/fd").write_text("would be an error")
    reading = ProcessSampler(lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock()).read(0.0)

    assert reading.errors == ()
    assert reading.values[0].shm_inflight_bytes == {}


def test_descriptors_that_may_not_be_read_are_an_error_and_the_rest_goes_on(fake: FakeProc, tmp_path: Path) -> None:
    for pid in (10, 20):
        fake.put(pid, children=(pid + 1,))
        fake.put(pid + 1, comm="pt_data_worker")
        fake.opens(pid)
    (fake.root / "11/fd").write_text("not a directory")
    reading = ProcessSampler(
        lambda: group(10, 20), MonotonicTotals(), proc=fake.root, clock=Clock(), shm_dir=tmp_path
    ).read(0.0)

    assert reading.errors == ("shared memory of rank 0: Not a directory",)
    assert [rank.workers_alive for rank in reading.values] == [1, 1]
    assert [rank.shm_inflight_bytes for rank in reading.values] == [None, {}]


def test_batches_that_may_be_seen_again_are_told_again(fake: FakeProc, tmp_path: Path) -> None:
    """A figure that cannot be had is no zero, neither at first nor later, and not when the workers are gone."""
    batch = tmp_path / "dev/shm/torch_11_1_0 (deleted)"
    batch.parent.mkdir(parents=True)
    batch.write_bytes(bytes(100))
    fake.put(10, children=(11,))
    fake.put(11, comm="pt_data_worker")
    fake.opens(10, batch)
    fake.opens(11, batch)
    sampler = ProcessSampler(
        lambda: group(10), MonotonicTotals(), proc=fake.root, clock=Clock(), shm_dir=tmp_path / "none", shm_period_s=5.0
    )
    (shown,) = sampler.read(0.0).values
    shutil.rmtree(fake.root / "10/fd")
    (fake.root / "10/fd").write_text("not a directory")
    hidden = sampler.read(5.0)
    fake.remove(11)
    without_workers = sampler.read(10.0)
    (fake.root / "10/fd").unlink()
    fake.opens(10)
    (again,) = sampler.read(15.0).values

    assert shown.shm_inflight_bytes == {11: 100}
    for reading in (hidden, without_workers):
        assert reading.values[0].shm_inflight_bytes is None
        assert reading.errors == ("shared memory of rank 0: Not a directory",)
    assert again.shm_inflight_bytes == {}


def test_batches_that_nobody_has_looked_for_yet_are_not_none(fake: FakeProc, tmp_path: Path) -> None:
    """There are too many ranks to look at all of them in one refresh."""
    for pid in (10, 20):
        fake.put(pid, children=(pid + 1,))
        fake.put(pid + 1, comm="pt_data_worker")
        fake.opens(pid)
        fake.opens(pid + 1)
    clock = Clock(step_s=0.001)
    sampler = ProcessSampler(
        lambda: group(10, 20),
        MonotonicTotals(),
        proc=fake.root,
        clock=clock,
        shm_dir=tmp_path / "none",
        shm_budget_s=0.0015,
    )

    seen = [[rank.shm_inflight_bytes for rank in sampler.read(at).values] for at in (0.0, 1.0)]

    assert seen == [[{}, None], [{}, {}]]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=15).map(
    lambda text: text.encode().replace(b"\0", b"")
)


@given(names, st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**63))
def test_a_stat_is_read_whatever_the_process_calls_itself(comm: bytes, user: int, system: int, start: int) -> None:
    line = b"7 (%b) R 1 7 7 0 -1 0 0 0 0 0 %d %d 0 0 20 0 1 0 %d 5124096 979 18446744073709551615\n"
    stat = parse_stat(line % (comm, user, system, start))

    assert stat == ProcessStat(comm=comm.decode(), state="R", user_ticks=user, system_ticks=system, start_ticks=start)


@given(st.binary() | st.binary().map(lambda tail: b"7 (python) R " + tail))
def test_anything_else_is_no_stat(text: bytes) -> None:
    stat = parse_stat(text)
    assert stat is None or isinstance(stat.start_ticks, int)
    assert parse_resident_pages(text) >= 0
    assert min(parse_statm(text)) >= 0


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        (b"5120 979 600 785 0 270 0\n", (979, 379, 5120)),
        (b"5120 600 979 785 0 270 0\n", (600, 0, 5120)),  # read while it ended
        (b"0 0 0 0 0 0 0\n", (0, 0, 0)),
        (b"5120 979\n", (0, 0, 0)),
        (b"", (0, 0, 0)),
    ],
)
def test_of_the_resident_pages_some_are_anonymous(text: bytes, pages: tuple[int, int, int]) -> None:
    assert parse_statm(text) == pages


WORKER_RANK = """
import os, sys, time
read, write = os.pipe()
lifeline, end = os.pipe()
pid = os.fork()
if pid == 0:
    os.close(end)
    open("/proc/self/comm", "w").write("pt_data_worker")
    until = time.process_time() + 0.1
    while time.process_time() < until: pass
    os.write(write, b"x")
    os.read(lifeline, 1)  # until the rank is gone
    os._exit(0)
os.read(read, 1)
print("ready", pid, flush=True)
sys.stdin.readline()
os.kill(pid, 9); os.waitpid(pid, 0)
print("reaped", flush=True)
sys.stdin.readline()
"""


def test_a_real_rank_and_a_real_worker() -> None:
    """The kernel's own files: memory, CPU seconds, and the seconds of a worker that was killed."""
    sampler_ledger = MonotonicTotals()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER_RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        try:
            sampler = ProcessSampler(lambda: group(rank.pid), sampler_ledger)
            assert rank.stdout.readline().startswith("ready")
            reading = sampler.read(time.monotonic())
            (seen,) = reading.values
            assert reading.errors == ()
            assert (seen.workers_alive, seen.worker_cores) == (1, frozenset(os.sched_getaffinity(0)))
            trainer, workers = seen.usage[Role.TRAINER], seen.usage[Role.WORKERS]
            assert min(trainer.rss_bytes, workers.rss_bytes) > 1 << 20
            assert 0 < (trainer.pss_bytes or 0) <= trainer.rss_bytes + (1 << 20)
            assert sum(cpu(seen, Role.WORKERS)) >= 0.09

            rank.stdin.write("\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == "reaped\n"
            reading = sampler.read(time.monotonic())
            (later,) = reading.values
            assert reading.errors == ()
            assert (later.workers_alive, later.worker_cores) == (0, frozenset())
            assert later.usage[Role.WORKERS].rss_bytes == 0
            assert sum(cpu(later, Role.WORKERS)) >= sum(cpu(seen, Role.WORKERS))
        finally:
            rank.kill()
    (gone,) = sampler.read(time.monotonic()).values
    assert gone.usage[Role.TRAINER].rss_bytes == 0
