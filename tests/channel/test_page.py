"""Pages between a writer and its readers: whole numbers whatever the timing, clear refusals, nothing left behind."""

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

from gpulaunch.profiler.channel import clock, page, ring
from gpulaunch.profiler.channel.layout import (
    PAGE_BYTES,
    RING_SLOTS,
    STEP_BUCKETS,
    VERSION,
    Region,
    StepSource,
    TextSlot,
    Word,
)

WRITER = """
import sys
from gpulaunch.profiler.channel.page import PageWriter

writer = PageWriter(sys.argv[1])
step = 0
print("writing", flush=True)
while True:
    step += 1
    # Every number of a step follows from the step: whatever does not fit together was read torn.
    phases = (step, 2 * step, 3 * step, 4 * step, 5 * step)
    totals = (step, step, 0, 7 * step, sum(phases), *phases, step, 1, step)
    writer.end_step(totals, step % 15, 1, (step, 15 * step, step, 2 * step, 3 * step, 4 * step, 7))
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "rank-3.bin")
    page.create(made, rank=3, local_rank=1, attempt=2)
    return made


def a_step(writer: page.PageWriter, steps: int, **more: int) -> None:
    """One more step of 100 ns, in a page that has had `steps - 1`."""
    totals = (steps, steps, 0, 0, 100 * steps, 10 * steps, 20 * steps, 30 * steps, 5 * steps, 35 * steps, 0, 1, 0)
    writer.end_step(totals, 0, 1, (1000 + steps, 100, 10, 20, 30, 5, more.get("samples", 8)))


def test_a_new_page_is_empty_and_says_whose_it_is(path):
    snapshot = page.read(path)

    assert (snapshot.rank, snapshot.local_rank, snapshot.attempt) == (3, 1, 2)
    assert (snapshot.pid, snapshot.armed, snapshot.steps) == (0, False, 0)
    assert snapshot.step_source is StepSource.NONE
    assert snapshot.phase_ns == {"data_wait": 0, "forward": 0, "backward": 0, "optimizer": 0, "other": 0}
    assert len(snapshot.step_histogram_counts) == STEP_BUCKETS
    assert ring.recent(path) == []


def test_only_the_owner_may_read_a_page(path):
    status = os.stat(path)

    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == PAGE_BYTES
    assert status.st_blocks * 512 >= PAGE_BYTES, (
        "the page is not reserved: a full tmpfs would kill the rank with SIGBUS"
    )


def test_the_anchor_turns_a_monotonic_instant_into_wall_time(path):
    now_ns = clock.wall_ns(time.monotonic_ns(), page.read(path).anchor)

    assert abs(now_ns - time.time_ns()) < 1_000_000_000


def test_what_the_writer_puts_in_the_reader_gets_out(path):
    writer = page.PageWriter(path)
    a_step(writer, 1)
    a_step(writer, 2, samples=9)
    writer.words[Word.LOADER_READY] = 5
    writer.write_text(TextSlot.NOTE, "epoch 3")
    snapshot = page.read(path)
    events = ring.recent(path)
    writer.close()

    assert (snapshot.pid, snapshot.armed) == (os.getpid(), True)
    assert (snapshot.steps, snapshot.step_ns_total, snapshot.loader_ready, snapshot.note) == (2, 200, 5, "epoch 3")
    assert snapshot.phase_ns == {"data_wait": 20, "forward": 40, "backward": 60, "optimizer": 10, "other": 70}
    assert snapshot.step_histogram_counts[0] == 2
    assert [(event.step, event.start_ns, event.samples, event.other_ns) for event in events] == [
        (0, 1001, 8, 35),
        (1, 1002, 9, 35),
    ]


def test_where_the_training_thread_is_is_one_word(path):
    before = page.read(path)
    writer = page.PageWriter(path)
    writer.words[Word.LAST_EDGE] = 123_456_789 << 3 | Region.BACKWARD
    after = page.read(path)
    writer.words[Word.LAST_EDGE] = 123_456_789 << 3 | 7
    damaged = page.read(path)
    writer.close()

    assert (before.region, before.last_edge_ns) == (Region.NONE, 0)
    assert (after.region, after.last_edge_ns) == (Region.BACKWARD, 123_456_789)
    assert (damaged.region, damaged.last_edge_ns) == (Region.NONE, 123_456_789)


def test_every_word_of_progress_has_its_field(path):
    words = [word for word in Word if word.name.startswith(("FIRST_STEP_", "CHECKPOINT_", "RESUMED_"))]
    writer = page.PageWriter(path)
    for word in words:
        writer.words[word] = 1000 + word
    writer.words[Word.LISTENS] = 1
    snapshot = page.read(path)
    writer.close()

    assert {word: getattr(snapshot, word.name.lower()) for word in words} == {word: 1000 + word for word in words}
    assert snapshot.listens


def test_the_ring_keeps_the_last_steps(path):
    writer = page.PageWriter(path)
    for steps in range(1, RING_SLOTS + 51):
        a_step(writer, steps)
    events = ring.recent(path)
    writer.close()

    assert [event.step for event in events] == list(range(50, RING_SLOTS + 50))


@given(text=st.text(max_size=400))
def test_any_text_is_kept_as_far_as_it_fits(text, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("page") / "rank-0.bin")
    page.create(path, rank=0, local_rank=0, attempt=0)
    writer = page.PageWriter(path)
    writer.write_text(TextSlot.NOTE, text)
    writer.close()
    kept = page.read(path).note

    assert text.encode("utf-8", "replace").decode().startswith(kept)
    assert len(kept.encode()) >= min(len(text.encode("utf-8", "replace")), 229), "more was cut than one character"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes, a page has 16384"),
        (b"x" * 100, "100 bytes, a page has 16384"),
        (bytes(PAGE_BYTES), "not a gpulaunch page"),
        (struct.pack("@2Q", int.from_bytes(b"gpulpage", "little"), 99) + bytes(PAGE_BYTES - 16), "page version 99"),
        (struct.pack("@2Q", int.from_bytes(b"gpulpage", "little"), 1) + bytes(PAGE_BYTES - 16), "page version 1, "),
    ],
)
def test_a_reader_refuses_what_is_no_page_of_its_version(tmp_path, content, why):
    path = tmp_path / "rank-0.bin"
    path.write_bytes(content)

    with pytest.raises(page.PageError, match=why):
        page.read(str(path))
    with pytest.raises(page.PageError, match=why):
        page.PageWriter(str(path))
    with pytest.raises(FileNotFoundError):
        page.read(str(tmp_path / "none.bin"))


@given(noise=st.integers(0, 2**32).map(lambda seed: random.Random(seed).randbytes(PAGE_BYTES - 16)))
def test_a_damaged_page_can_be_read_to_its_end(noise, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "rank-0.bin"
    path.write_bytes(struct.pack("@2Q", int.from_bytes(b"gpulpage", "little"), VERSION) + noise)

    assert len(page.read(str(path)).step_histogram_counts) == STEP_BUCKETS
    assert len(ring.recent(str(path))) <= RING_SLOTS


@pytest.mark.root
def test_a_full_tmpfs_is_told_when_the_page_is_made(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match="No space left on device"):
            page.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_page_has_one_writer(path):
    """A second program with the rank's environment is told so; when the first has ended it may have it, cleared."""
    first = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    try:
        with pytest.raises(page.PageBusyError, match="another process writes this page"):
            page.PageWriter(path)
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    writer = page.PageWriter(path)
    snapshot = page.read(path)
    writer.close()

    assert (snapshot.rank, snapshot.pid, snapshot.steps, snapshot.consistent) == (3, os.getpid(), 0, True)
    assert ring.recent(path) == []


def test_a_forked_child_does_not_hold_the_page(path):
    """A dataloader worker that outlives its rank must not keep the next program of the rank from the page."""
    read_end, write_end = os.pipe()
    rank = os.fork()
    if rank == 0:
        page.PageWriter(path)
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
        page.PageWriter(path).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_reader_never_sees_half_a_step(path):
    """A process writes as fast as it can while this one reads; it is killed, and its last steps are still there."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    records = 0
    try:
        with page.PageReader(path) as reader:
            last = reads = 0
            deadline = time.monotonic() + 60
            while reads < 4000 or last < 4000:  # on a busy machine the two may take turns for a while
                assert time.monotonic() < deadline, f"{reads} reads beside {last} steps"
                reads += 1
                seen = reader.read()
                assert seen.steps >= last, "a counter went back"
                last = seen.steps
                if seen.consistent:
                    assert sum(seen.phase_ns.values()) == seen.step_ns_total == 15 * seen.steps
                    assert seen.samples == 7 * seen.steps
                    assert sum(seen.step_histogram_counts) - seen.steps in (0, 1)
            while records <= 20:  # the writer overtakes the reader: of a whole ring, few records may be left standing
                assert time.monotonic() < deadline, f"{records} records"
                for event in ring.recent_from(reader):
                    records += 1
                    step = event.step + 1
                    assert (event.start_ns, event.duration_ns, event.other_ns) == (step, 15 * step, 5 * step)
                    assert (event.data_wait_ns, event.forward_ns) == (step, 2 * step)
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()

    assert len(ring.recent(path)) >= RING_SLOTS - 1


def test_a_writer_killed_inside_a_step_leaves_a_readable_page(path):
    writer = page.PageWriter(path)
    a_step(writer, 1)
    writer.words[Word.OPENING] += 1  # as end_step leaves it if it is killed there
    snapshot = page.read(path)
    writer.close()

    assert (snapshot.steps, snapshot.consistent) == (1, False)


def test_a_reader_learns_that_its_page_was_replaced(path):
    """A new attempt gets a new page; the old rank, if it still writes, writes where nobody looks."""
    old = page.PageWriter(path)
    with page.PageReader(path) as reader:
        before = reader.replaced()
        page.create(path, rank=3, local_rank=1, attempt=3)
        a_step(old, 1)
        after = reader.replaced()
        old.close()
        fresh = page.read(path)
        os.unlink(path)

        assert (before, after, reader.replaced()) == (False, True, True)
        assert (fresh.attempt, fresh.steps) == (3, 0)
        assert reader.read().steps == 1


def test_create_leaves_nothing_beside_the_page(tmp_path):
    page.create(str(tmp_path / "rank-0.bin"), rank=0, local_rank=0, attempt=0)
    with pytest.raises(FileNotFoundError):
        page.create(str(tmp_path / "none" / "rank-0.bin"), rank=0, local_rank=0, attempt=0)

    assert os.listdir(tmp_path) == ["rank-0.bin"]
