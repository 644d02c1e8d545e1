"""Segments between a writer and its readers: whole numbers whatever the timing, clear refusals, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel import clock, ring, segment, segment_writer
from gpulaunch.profiler.channel.layout import (
    COPIES,
    PHASES,
    RING_SLOTS,
    SEGMENT_BYTES,
    SITE_KINDS,
    SITE_ROWS,
    SITE_TEXT_BYTES,
    STEP_BUCKETS,
    SYNCS,
    Region,
    StepSource,
    TextSlot,
    Word,
)
from gpulaunch.profiler.channel.quantities import COPY_WORDS, SYNC_WORDS, LoaderState

WRITER = """
import sys
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.channel.quantities import COPY_WORDS, LoaderState, SYNC_WORDS

writer = SegmentWriter(sys.argv[1])
step = rare = 0
print("writing", flush=True)

def parts():
    # Every number of a step follows from the step, or from the last one that had such a part: whatever does not fit
    # together was read torn.
    return [factor * (step if factor in (1, 3, 4, 5, 6, 12) else rare) for factor in range(1, 13)]

def totals():
    return (step, step, 0, 7 * step, sum(parts()), *parts(), step, 1, step)

while True:  # as a rank does: eight plain steps at once, one that is not
    records = []
    for _ in range(8):
        step += 1
        records.append((step, 31 * step, step, 0, 3 * step, 4 * step, 5 * step, 6 * step, 0, 0, 0, 0, 0, 7))
    writer.end_plain_steps(totals(), [step % 15] * 8, records)
    step = rare = step + 1
    writer.end_step(totals(), step % 15, 1, (step, 78 * step, *parts()[:-1], 7))
"""
OFTEN = {factor: phase for factor, phase in enumerate(PHASES, 1) if factor in (1, 3, 4, 5, 6, 12)}
RARELY = {factor: phase for factor, phase in enumerate(PHASES, 1) if factor not in OFTEN}


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "rank-3.bin")
    segment_writer.create(made, rank=3, local_rank=1, attempt=2)
    return made


A_STEP = dict(zip(PHASES, (10, 1, 20, 30, 2, 5, 3, 0, 0, 4, 0, 25), strict=True))
"""Nanoseconds of the parts of a step of 100 ns."""


def a_step(writer: segment_writer.SegmentWriter, steps: int, **more: int) -> None:
    """One more step of 100 ns, in a segment that has had `steps - 1`."""
    totals = (steps, steps, 0, 0, 100 * steps, *(part * steps for part in A_STEP.values()), 0, 1, 0)
    writer.end_step(totals, 0, 1, (1000 + steps, 100, *[*A_STEP.values()][:-1], more.get("samples", 8)))


def test_a_new_page_is_empty_and_says_whose_it_is(path):
    snapshot = segment.read(path)

    assert (snapshot.rank, snapshot.local_rank, snapshot.attempt) == (3, 1, 2)
    assert (snapshot.pid, snapshot.armed, snapshot.steps) == (0, False, 0)
    assert snapshot.step_source is StepSource.NONE
    assert snapshot.phase_ns == dict.fromkeys(A_STEP, 0)
    assert len(snapshot.step_counts) == STEP_BUCKETS
    assert ring.recent(path) == []


def test_only_the_owner_may_read_a_page(path):
    status = os.stat(path)

    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == SEGMENT_BYTES
    assert status.st_blocks * 512 >= SEGMENT_BYTES, (
        "the segment is not reserved: a full tmpfs would kill the rank with SIGBUS"
    )


def test_the_anchor_turns_a_monotonic_instant_into_wall_time(path):
    now_ns = clock.wall_ns(time.monotonic_ns(), segment.read(path).anchor)

    assert abs(now_ns - time.time_ns()) < 1_000_000_000


def test_what_the_writer_puts_in_the_reader_gets_out(path):
    writer = segment_writer.SegmentWriter(path)
    a_step(writer, 1)
    a_step(writer, 2, samples=9)
    writer.words[LoaderState.ready] = 5
    writer.write_text(TextSlot.NOTE, "epoch 3")
    snapshot = segment.read(path)
    events = ring.recent(path)
    writer.close()

    assert (snapshot.pid, snapshot.armed) == (os.getpid(), True)
    assert (snapshot.steps, snapshot.step_ns_total, snapshot.loader.ready, snapshot.note) == (2, 200, 5, "epoch 3")
    assert snapshot.phase_ns == {phase: 2 * part for phase, part in A_STEP.items()}
    assert snapshot.step_counts[0] == 2
    assert [(event.step, event.start_ns, event.samples, event.phase_ns) for event in events] == [
        (0, 1001, 8, A_STEP),
        (1, 1002, 9, A_STEP),
    ]


def test_where_the_training_thread_is_is_one_word(path):
    before = segment.read(path)
    writer = segment_writer.SegmentWriter(path)
    writer.words[Word.LAST_EDGE] = 123_456_789 << 3 | Region.BACKWARD
    after = segment.read(path)
    writer.close()

    assert (before.region, before.last_edge_ns) == (Region.NONE, 0)
    assert (after.region, after.last_edge_ns) == (Region.BACKWARD, 123_456_789)


def test_every_word_has_its_field(path):
    begins = ("FIRST_STEP_", "CHECKPOINT_", "RESUMED_", "LOADER_", "GPU_", "GC_", "COMPILE", "COMM_", "DDP_")
    words = [word for word in Word if word.name.startswith(begins) and not word.name.endswith("_HISTOGRAM")]
    words = [word for word in words if not Word.DATA_WAIT_NS_TOTAL <= word <= Word.OTHER_NS_TOTAL]
    writer = segment_writer.SegmentWriter(path)
    for word in words:
        writer.words[word] = 1000 + word
    writer.words[Word.LISTENS] = 1
    snapshot = segment.read(path)
    writer.close()

    assert {word: getattr(snapshot, word.name.lower()) for word in words} == {word: 1000 + word for word in words}
    assert snapshot.listens


def test_copies_and_syncs_are_told_apart_by_kind(path):
    writer = segment_writer.SegmentWriter(path)
    writer.words[Word.COPY_FIRST + COPY_WORDS * COPIES.index(("h2d", "pinned")) + 1] = 4096
    writer.words[Word.SYNC_FIRST + SYNC_WORDS * SYNCS.index("tolist")] = 3
    snapshot = segment.read(path)
    writer.close()

    assert {key: copies.size_bytes for key, copies in snapshot.copies.items() if copies.size_bytes} == {
        ("h2d", "pinned"): 4096
    }
    assert {key: syncs.calls for key, syncs in snapshot.syncs.items() if syncs.calls} == {"tolist": 3}


def test_lines_of_the_program_have_rows_of_their_own(path):
    """Until the table is full: then the others share one, so that nothing is lost from the sums."""
    long = "/very/long" * 30 + "/train.py:7 main"
    with segment.SegmentReader(path) as reader:
        empty = reader.sites()
        writer = segment_writer.SegmentWriter(path)
        rows = [writer.add_site(SITE_KINDS.index("item"), f"train.py:{line} main") for line in range(SITE_ROWS - 2)]
        rows.append(writer.add_site(SITE_KINDS.index("h2d"), long))
        rows += [writer.add_site(SITE_KINDS.index("h2d"), "late.py:1 main") for _ in range(2)]
        writer.site(rows[4], size_bytes=8, blocked_ns=100, gpu_ns=50, pinned=1, non_blocking=1)
        writer.site(rows[4], size_bytes=8, blocked_ns=100)
        writer.site(rows[-1], size_bytes=3, count=2)
        writer.site(rows[-2], size_bytes=4)
        sites = reader.sites()
        writer.close()

    assert empty == ()
    assert rows == [*range(1, SITE_ROWS), 0, 0]
    assert sites[0] == row_of("elsewhere", "", count=3, size_bytes=7)
    assert sites[5] == row_of(
        "item", "train.py:4 main", count=2, size_bytes=16, blocked_ns=200, gpu_ns=50, pinned=1, non_blocking=1
    )
    assert (len(sites), len(sites[-1].text), sites[-1].text) == (SITE_ROWS, SITE_TEXT_BYTES, long[-SITE_TEXT_BYTES:])


def row_of(kind: str, text: str, **counters: int) -> segment.Site:
    zeros = dict.fromkeys(("count", "size_bytes", "blocked_ns", "gpu_ns", "pinned", "non_blocking"), 0)
    return segment.Site(kind=kind, text=text, **{**zeros, **counters})


def test_the_ring_keeps_the_last_steps(path):
    writer = segment_writer.SegmentWriter(path)
    for steps in range(1, RING_SLOTS + 51):
        a_step(writer, steps)
    events = ring.recent(path)
    writer.close()

    assert [event.step for event in events] == list(range(50, RING_SLOTS + 50))


@given(text=st.text(max_size=400))
def test_any_text_is_kept_as_far_as_it_fits(text, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("segment") / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    writer = segment_writer.SegmentWriter(path)
    writer.write_text(TextSlot.NOTE, text)
    writer.close()
    kept = segment.read(path).note

    assert text.encode("utf-8", "replace").decode().startswith(kept)
    assert len(kept.encode()) >= min(len(text.encode("utf-8", "replace")), 229), "more was cut than one character"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes, a segment has 65536"),
        (b"x" * 100, "100 bytes, a segment has 65536"),
        (bytes(SEGMENT_BYTES), "not a gpulaunch segment"),
        (
            struct.pack("@2Q", int.from_bytes(b"gpulpage", "little"), 99) + bytes(SEGMENT_BYTES - 16),
            "segment version 99",
        ),
        (
            struct.pack("@2Q", int.from_bytes(b"gpulpage", "little"), 1) + bytes(SEGMENT_BYTES - 16),
            "segment version 1, ",
        ),
    ],
)
def test_a_reader_refuses_what_is_no_page_of_its_version(tmp_path, content, why):
    path = tmp_path / "rank-0.bin"
    path.write_bytes(content)

    with pytest.raises(segment.SegmentError, match=why):
        segment.read(str(path))
    with pytest.raises(segment.SegmentError, match=why):
        segment_writer.SegmentWriter(str(path))
    with pytest.raises(FileNotFoundError):
        segment.read(str(tmp_path / "none.bin"))


@given(noise=st.integers(0, 2**32).map(lambda seed: random.Random(seed).randbytes(SEGMENT_BYTES - 16)))
def test_a_damaged_page_can_be_read_to_its_end(noise, tmp_path_factory):
    path = tmp_path_factory.mktemp("segment") / "rank-0.bin"
    path.write_bytes(struct.pack("@2Q", int.from_bytes(b"gpulpage", "little"), segment_writer.VERSION) + noise)

    assert len(segment.read(str(path)).step_counts) == STEP_BUCKETS
    assert len(ring.recent(str(path))) <= RING_SLOTS


@pytest.mark.root
def test_a_full_tmpfs_is_told_when_the_page_is_made(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match="No space left on device"):
            segment_writer.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_page_has_one_writer(path):
    """A second program with the rank's environment is told so; when the first has ended it may have it, cleared."""
    first = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    try:
        with pytest.raises(segment_writer.SegmentBusyError, match="another process writes this segment"):
            segment_writer.SegmentWriter(path)
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    writer = segment_writer.SegmentWriter(path)
    snapshot = segment.read(path)
    writer.close()

    assert (snapshot.rank, snapshot.pid, snapshot.steps, snapshot.consistent) == (3, os.getpid(), 0, True)
    assert ring.recent(path) == []


def test_a_forked_child_does_not_hold_the_page(path):
    """A dataloader worker that outlives its rank must not keep the next program of the rank from the segment."""
    read_end, write_end = os.pipe()
    rank = os.fork()
    if rank == 0:
        segment_writer.SegmentWriter(path)
        worker = os.fork()
        if worker == 0:
            signal.pause()
        os.write(write_end, str(worker).encode())
        os._exit(0)
    os.close(write_end)
    worker = int(os.read(read_end, 20))
    os.close(read_end)
    os.waitpid(rank, 0)
    try:
        segment_writer.SegmentWriter(path).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_reader_never_sees_half_a_step(path):
    """A process writes as fast as it can while this one reads; it is killed, and its last steps are still there."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    records = 0
    try:
        with segment.SegmentReader(path) as reader:
            last = reads = 0
            deadline = time.monotonic() + 60
            while reads < 4000 or last < 4000:  # on a busy machine the two may take turns for a while
                assert time.monotonic() < deadline, f"{reads} reads beside {last} steps"
                reads += 1
                seen = reader.read()
                assert seen.steps >= last, "a counter went back"
                last = seen.steps
                if seen.consistent:
                    assert sum(seen.phase_ns.values()) == seen.step_ns_total
                    assert {seen.phase_ns[phase] / factor for factor, phase in OFTEN.items()} == {seen.steps}
                    (rare,) = {seen.phase_ns[phase] / factor for factor, phase in RARELY.items()}
                    assert rare == seen.steps - seen.steps % 9
                    assert seen.samples == 7 * seen.steps
                    assert 0 <= sum(seen.step_counts) - seen.steps <= 8
            while records <= 20:  # the writer overtakes the reader: of a whole ring, few records may be left standing
                assert time.monotonic() < deadline, f"{records} records"
                for event in ring.recent_from(reader):
                    records += 1
                    step = event.step + 1
                    rare, duration_ns = (step, 78 * step) if step % 9 == 0 else (0, 31 * step)
                    assert (event.start_ns, event.duration_ns) == (step, duration_ns)
                    assert {event.phase_ns[phase] / factor for factor, phase in OFTEN.items()} == {step}
                    assert {event.phase_ns[phase] / factor for factor, phase in RARELY.items()} == {rare}
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()

    assert len(ring.recent(path)) >= RING_SLOTS - 8, "but for those that it was at"


def test_a_writer_killed_inside_a_step_leaves_a_readable_page(path):
    writer = segment_writer.SegmentWriter(path)
    a_step(writer, 1)
    writer.words[Word.OPENING] += 1  # as end_step leaves it if it is killed there
    snapshot = segment.read(path)
    writer.close()

    assert (snapshot.steps, snapshot.consistent) == (1, False)


def test_a_reader_learns_that_its_page_was_replaced(path):
    """A new attempt gets a new segment; the old rank, if it still writes, writes where nobody looks."""
    old = segment_writer.SegmentWriter(path)
    with segment.SegmentReader(path) as reader:
        before = reader.replaced()
        segment_writer.create(path, rank=3, local_rank=1, attempt=3)
        a_step(old, 1)
        after = reader.replaced()
        old.close()
        fresh = segment.read(path)
        os.unlink(path)

        assert (before, after, reader.replaced()) == (False, True, True)
        assert (fresh.attempt, fresh.steps) == (3, 0)
        assert reader.read().steps == 1


def test_create_leaves_nothing_beside_the_page(tmp_path):
    segment_writer.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    with pytest.raises(FileNotFoundError):
        segment_writer.create(str(tmp_path / "none" / "rank-0.bin"), rank=0, local_rank=0, attempt=0)

    assert os.listdir(tmp_path) == ["rank-0.bin"]
