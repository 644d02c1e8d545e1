"""Pages of ranks, written through the probe's own writer and read as the sidecar reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel import layout, segment_writer
from gpulaunch.profiler.channel.layout import Word
from gpulaunch.profiler.channel.quantities import (
    COPY_WORDS,
    SYNC_WORDS,
    CheckpointState,
    GpuMemory,
    GpuTime,
    LoaderState,
    Pauses,
)
from gpulaunch.profiler.record import AttemptGroup, CopyTotals, SyncTotals, TrainingState
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.ranks import RankSampler, parse_group

MS = 1_000_000
A_STEP = dict.fromkeys(layout.PHASES, 0)
A_STEP |= {"data_wait": MS, "forward": 2 * MS, "backward": 3 * MS, "optimizer": MS, "gc": MS, "other": 2 * MS}


class Job:
    """The agent's side and the ranks' side of a channel directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, ranks: int, *, attempt: int = 0) -> None:
        for rank in range(ranks):
            segment_writer.create(str(self.page(rank)), rank=rank, local_rank=rank, attempt=attempt)
        self.tell(ranks, attempt=attempt)

    def tell(self, ranks: int, *, attempt: int = 0, name: str = "toy") -> None:
        document = {
            "version": 1,
            "run_id": "0123456789abcdef",
            "name": name,
            "attempt": attempt,
            "world_size": ranks,
            "node_rank": 0,
            "ranks": [{"rank": rank, "local_rank": rank, "pid": os.getpid()} for rank in range(ranks)],
        }
        draft = self.directory / "group.json.new"
        draft.write_text(json.dumps(document))
        draft.rename(self.directory / "group.json")

    def page(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.bin"

    @contextmanager
    def writer(self, rank: int) -> Iterator[segment_writer.SegmentWriter]:
        writer = segment_writer.SegmentWriter(str(self.page(rank)))
        try:
            yield writer
        finally:
            writer.close()

    def step(self, writer: segment_writer.SegmentWriter, count: int = 1) -> None:
        """Make steps of 10 ms, of the parts A_STEP; 32 samples each."""
        for _ in range(count):
            steps, microsteps, skipped, samples, total, *rest = writer.words[Word.STEPS : Word.PROBE_NS_TOTAL + 1]
            *phases, _last, _source, probe = rest
            counters = (steps + 1, microsteps + 2, skipped, samples + 32)
            phases = [before + part for before, part in zip(phases, A_STEP.values(), strict=True)]
            at_ns = 1000 * MS * (steps + 1)
            writer.end_step(
                (*counters, total + 10 * MS, *phases, at_ns, layout.StepSource.OPTIMIZER, probe + 5000),
                layout.STEP_BOUNDS_S.index(0.01),
                1,
                (at_ns - 10 * MS, 10 * MS, *[*A_STEP.values()][:-1], 32),
            )


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def sampler(job: Job) -> Iterator[RankSampler]:
    sampler = RankSampler(job.directory, MonotonicTotals())
    yield sampler
    sampler.close()


def read(sampler: RankSampler) -> tuple[TrainingState, ...]:
    reading = sampler.read(0.0)
    assert reading.errors == ()
    return reading.values


def test_before_the_first_attempt_there_is_nothing_and_no_error(sampler: RankSampler) -> None:
    assert read(sampler) == ()
    assert sampler.group is None


def test_a_rank_that_never_arms_is_there_with_zeros(job: Job, sampler: RankSampler) -> None:
    """A program without torch writes no page; its rank is still one of the job."""
    job.start(1)
    (rank,) = read(sampler)
    assert not rank.armed
    assert rank.steps == 0
    assert rank.step_source is None
    assert rank.last_step_monotonic_ns is None
    assert rank.loader is None
    assert rank.gpu is None
    assert rank.checkpoint is None
    assert rank.gpu_time is None
    assert (rank.copies, rank.syncs, rank.sites, rank.facts) == ({}, {}, (), {})


def test_copies_syncs_and_pauses_go_on_over_attempts(job: Job, sampler: RankSampler) -> None:
    for attempt in range(2):
        job.start(1, attempt=attempt)
        with job.writer(0) as writer:
            at = Word.COPY_FIRST + COPY_WORDS * layout.COPIES.index(("d2h", "pageable"))
            for index, value in enumerate((1, 4096, 700, 300)):
                writer.words[at + index] = value
            writer.words[Word.SYNC_FIRST + SYNC_WORDS * layout.SYNCS.index("item")] = 5
            writer.words[Pauses.gc_collections] = 3
            writer.words[Pauses.ddp_comm_ns] = 9
            writer.words[LoaderState.batches] = 2
            writer.words[LoaderState.wait_ns_total] = 3 * MS
            writer.words[Word.LOADER_WAIT_HISTOGRAM + 1] = 2
            writer.words[GpuTime.steps] = 1
            writer.words[GpuTime.forward_ns_total] = 4 * MS
            (rank,) = read(sampler)

    assert rank.copies == {("d2h", "pageable"): CopyTotals(count=2, size_bytes=8192, blocked_ns=1400, gpu_ns=600)}
    assert rank.syncs == {"item": SyncTotals(calls=10, blocked_ns=0)}
    assert (rank.pauses.gc_collections, rank.pauses.ddp_comm_ns) == (6, 9)
    assert rank.loader is not None
    assert (rank.loader.batches, rank.loader.wait_ns_total, sum(rank.loader.wait_counts)) == (4, 6 * MS, 4)
    assert rank.gpu_time is not None
    assert (rank.gpu_time.steps, rank.gpu_time.forward_ns_total) == (2, 8 * MS)


def test_lines_and_faults_are_those_of_the_running_attempt(job: Job, sampler: RankSampler) -> None:
    job.start(1)
    with job.writer(0) as writer:
        writer.site(writer.add_site(layout.SITE_KINDS.index("item"), "train.py:9 main"), blocked_ns=70)
        writer.words[Word.HOOKS_UNAVAILABLE] = layout.Hook.COPIES | layout.Hook.GPU_TIME
        writer.write_text(layout.TextSlot.FAULT, "COPIES: changed")
        (rank,) = read(sampler)
    job.start(1, attempt=1)
    (again,) = read(sampler)

    assert [(site.kind, site.text, site.count, site.blocked_ns) for site in rank.sites] == [
        ("item", "train.py:9 main", 1, 70)
    ]
    assert (rank.hooks_unavailable, rank.fault) == (("copies", "gpu_time"), "COPIES: changed")
    assert (again.sites, again.hooks_unavailable) == ((), ())


def test_what_a_rank_says_of_its_surroundings_is_read_when_it_changes(job: Job, sampler: RankSampler) -> None:
    job.start(1)
    facts = job.directory / "facts-0.json"
    facts.write_text('{"version": 1, "torch": "2.13.0"}')
    assert read(sampler)[0].facts["torch"] == "2.13.0"

    facts.with_name("new").write_text('{"version": 1, "torch": "2.14.0"}')
    facts.with_name("new").rename(facts)
    assert read(sampler)[0].facts["torch"] == "2.14.0"

    for damage in ("{", "[]", '{"version": 2}', '{"version": 1, "x": "' + "y" * 70_000 + '"}'):
        facts.write_text(damage)
        reading = sampler.read(0.0)
        assert [rank.rank for rank in reading.values] == [0]
        assert len(reading.errors) == 1, damage
    facts.unlink()
    assert read(sampler)[0].facts == {}


def test_what_a_rank_writes_is_read(job: Job, sampler: RankSampler) -> None:
    job.start(2)
    with job.writer(1) as writer:
        job.step(writer, 3)
        writer.words[LoaderState.batches] = 6
        writer.words[LoaderState.ready] = 1
        writer.words[LoaderState.outstanding] = 4
        writer.words[LoaderState.workers_configured] = 2
        writer.words[GpuMemory.allocated_bytes] = 1 << 20
        writer.words[GpuMemory.reserved_bytes] = 2 << 20
        writer.words[GpuMemory.peak_allocated_bytes] = 3 << 20
        idle, busy = read(sampler)
    assert (idle.rank, idle.armed, idle.steps) == (0, False, 0)
    assert (busy.rank, busy.armed, busy.steps, busy.microsteps, busy.samples) == (1, True, 3, 6, 96)
    assert busy.step_ns_total == 30 * MS
    assert busy.phase_ns == {phase: 3 * part for phase, part in A_STEP.items()}
    assert busy.step_counts == tuple(3 if bound == 0.01 else 0 for bound in (*layout.STEP_BOUNDS_S, None))
    assert busy.probe_ns_total == 15_000
    assert busy.step_source == "optimizer"
    assert busy.last_step_monotonic_ns == 3000 * MS
    assert busy.loader is not None
    assert (busy.loader.batches, busy.loader.ready, busy.loader.outstanding) == (6, 1, 4)
    assert busy.gpu is not None
    assert busy.gpu.peak_allocated_bytes == 3 << 20


def test_counters_go_on_over_attempts_and_gauges_start_anew(job: Job, sampler: RankSampler) -> None:
    job.start(1, attempt=0)
    with job.writer(0) as writer:
        job.step(writer, 5)
        writer.words[LoaderState.ready] = 3
        writer.words[LoaderState.batches] = 5
        read(sampler)
        job.step(writer, 2)  # after the last reading, and then the rank dies
    job.start(1, attempt=1)
    (rank,) = read(sampler)
    assert rank.steps == 7
    assert not rank.armed
    assert rank.last_step_monotonic_ns is None
    assert rank.loader is not None
    assert (rank.loader.batches, rank.loader.ready) == (5, 0)

    with job.writer(0) as writer:
        job.step(writer, 1)
        (rank,) = read(sampler)
    assert rank.steps == 8
    assert rank.step_ns_total == 80 * MS
    assert sum(rank.step_counts) == 8
    assert sampler.group is not None
    assert sampler.group.attempt == 1


def save(writer: segment_writer.SegmentWriter, *, step: int, at_ns: int) -> None:
    """As `probe.progress` has it after a save: 2 ms of stall, 1000 bytes."""
    writer.words[CheckpointState.saves] += 1
    writer.words[CheckpointState.stall_ns_total] += 2 * MS
    writer.words[CheckpointState.bytes_total] += 1000
    writer.words[CheckpointState.step] = step
    writer.words[CheckpointState.captured_ns] = at_ns


def saved(sampler: RankSampler) -> CheckpointState:
    checkpoint = read(sampler)[0].checkpoint
    assert checkpoint is not None
    return checkpoint


def test_saves_are_counted_over_attempts_and_the_newest_is_remembered(job: Job, sampler: RankSampler) -> None:
    job.start(1, attempt=0)
    with job.writer(0) as writer:
        writer.words[Word.LISTENS] = 1
        before = saved(sampler)
        save(writer, step=10, at_ns=100 * MS)
        save(writer, step=20, at_ns=200 * MS)
        writer.words[CheckpointState.failures] = 1
        first = saved(sampler)
        save(writer, step=30, at_ns=300 * MS)  # after the last reading, and then the rank dies
    job.start(1, attempt=1)
    restarted = saved(sampler)
    with job.writer(0) as writer:
        writer.words[CheckpointState.resumed_step] = 20  # the newest was damaged
        resumed = saved(sampler)
        save(writer, step=25, at_ns=400 * MS)
        again = saved(sampler)

    assert (before.saves, before.resumed_step) == (0, 0)
    assert (first.saves, first.failures, first.stall_ns_total, first.bytes_total) == (2, 1, 4 * MS, 2000)
    assert (first.step, first.captured_ns) == (20, 200 * MS)
    assert (restarted.saves, restarted.step, restarted.captured_ns) == (3, 30, 300 * MS)
    assert (resumed.saves, resumed.step, resumed.resumed_step) == (3, 30, 20)
    assert (again.saves, again.step, again.captured_ns) == (4, 25, 400 * MS)


def test_the_newest_checkpoint_outlives_the_sidecar_that_saw_it(job: Job) -> None:
    ledger, successor = MonotonicTotals(), MonotonicTotals()
    first = RankSampler(job.directory, ledger)
    job.start(1, attempt=0)
    with job.writer(0) as writer:
        save(writer, step=10, at_ns=100 * MS)
    read(first)
    first.close()
    ledger.save(job.directory / "sidecar.json")
    assert successor.load(job.directory / "sidecar.json")
    job.start(1, attempt=1)
    second = RankSampler(job.directory, successor)
    found = saved(second)
    second.close()

    assert (found.saves, found.step, found.captured_ns) == (1, 10, 100 * MS)


def test_two_programs_after_each_other_in_one_rank_are_added_up(job: Job, sampler: RankSampler) -> None:
    """A rank may be a shell script; its second program claims the same page and counts from zero."""
    job.start(1)
    seen: list[int] = []
    for steps in (5, 2):
        with job.writer(0) as writer:
            job.step(writer, steps)
            seen.append(read(sampler)[0].steps)
    assert seen == [5, 7]


def test_a_rank_that_left_the_group_is_gone(job: Job, sampler: RankSampler) -> None:
    job.start(2)
    assert len(read(sampler)) == 2
    job.tell(1)
    assert [rank.rank for rank in read(sampler)] == [0]
    job.tell(2)
    assert len(read(sampler)) == 2


def test_a_successor_with_the_ledger_gives_the_same_totals(job: Job, sampler: RankSampler) -> None:
    """The sidecar was killed in the second attempt: no counter falls."""
    ledger = MonotonicTotals()
    first = RankSampler(job.directory, ledger)
    job.start(1, attempt=0)
    with job.writer(0) as writer:
        job.step(writer, 5)
    read(first)
    job.start(1, attempt=1)
    with job.writer(0) as writer:
        job.step(writer, 2)
        before = read(first)
        ledger.save(job.directory / "sidecar.json")
        first.close()
        job.step(writer, 1)

    successor_ledger = MonotonicTotals()
    assert successor_ledger.load(job.directory / "sidecar.json")
    second = RankSampler(job.directory, successor_ledger)
    after = read(second)
    second.close()
    assert (before[0].steps, after[0].steps) == (7, 8)


def test_a_successor_without_a_ledger_reads_the_same_pages(job: Job) -> None:
    job.start(1)
    with job.writer(0) as writer:
        job.step(writer, 5)
    for _ in range(2):
        sampler = RankSampler(job.directory, MonotonicTotals())
        assert read(sampler)[0].steps == 5
        sampler.close()


@pytest.mark.parametrize("damage", [b"", b"x" * layout.SEGMENT_BYTES, b"short"])
def test_a_damaged_page_is_an_error_of_that_rank_only(job: Job, sampler: RankSampler, damage: bytes) -> None:
    job.start(2)
    job.page(0).write_bytes(damage)
    reading = sampler.read(0.0)
    assert [rank.rank for rank in reading.values] == [1]
    assert reading.errors == ("segment of rank 0: SegmentError",)

    segment_writer.create(str(job.page(0)), rank=0, local_rank=0, attempt=0)
    assert len(read(sampler)) == 2


def test_a_missing_page_is_an_error_of_that_rank_only(job: Job, sampler: RankSampler) -> None:
    job.start(2)
    read(sampler)
    job.page(1).unlink()
    reading = sampler.read(0.0)
    assert [rank.rank for rank in reading.values] == [0]
    assert reading.errors == ("segment of rank 1: No such file or directory",)


def test_a_group_that_cannot_be_read_leaves_the_old_one(job: Job, sampler: RankSampler) -> None:
    job.start(1)
    read(sampler)
    (job.directory / "group.json").write_text('{"version": 99}')
    reading = sampler.read(0.0)
    assert len(reading.values) == 1
    assert reading.errors == ("group.json: version 99, this sidecar knows 1",)
    assert sampler.read(1.0).errors == ()  # told once, not every second
    (job.directory / "group.json").unlink()
    assert read(sampler) == ()


def test_a_name_is_made_fit_for_a_label(job: Job, sampler: RankSampler) -> None:
    job.start(1)
    job.tell(1, name='/home/me/secret project/train"\n.py')
    read(sampler)
    assert sampler.group is not None
    assert sampler.group.name == "train_.py"


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
groups = st.fixed_dictionaries(
    {
        "version": st.just(1),
        "run_id": st.text() | documents,
        "name": st.text(),
        "attempt": st.integers() | documents,
        "world_size": st.integers(),
        "node_rank": st.integers(0, 9),
        "ranks": st.lists(st.fixed_dictionaries({"rank": st.integers(), "local_rank": st.integers(), "pid": documents}))
        | documents,
    }
)


@given(st.binary() | (documents | groups).map(lambda document: json.dumps(document).encode()))
def test_a_group_is_read_whole_or_refused(text: bytes) -> None:
    try:
        group = parse_group(text)
    except ValueError:
        return
    assert isinstance(group, AttemptGroup)
    assert all(place.pid >= 0 for place in group.ranks)
