"""The file of a rank's workers: slots that workers take and leave, and totals that only grow."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.channel import workers
from gpulaunch.profiler.channel.workers import COUNTERS, SLOTS, WORKERS_BYTES, WorkersError, WorkersReader

ONE = tuple(range(1, 1 + len(COUNTERS)))  # one batch, two samples, and so on

WORKER = f"""
import os, sys
from gpulaunch.profiler.channel.workers import WorkersError, WorkersWriter

try:
    writer = WorkersWriter(sys.argv[1], parent_pid=os.getppid(), worker=int(sys.argv[2]), knows=3)
except WorkersError as error:
    print(error, flush=True)
    sys.exit()
writer.add({ONE})
print(writer.slot, flush=True)
for _ in sys.stdin:
    writer.add({ONE})
    print("added", flush=True)
"""


class Worker:
    """A process that takes a slot and adds one batch to it."""

    def __init__(self, path: str, worker: int = 0, program: str = WORKER) -> None:
        argv = [sys.executable, "-c", program, path, str(worker)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.said = self.line()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def adds(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self.line() == "added"

    def ends(self) -> None:
        self._process.communicate(timeout=60)

    def is_killed(self) -> None:
        self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):  # a child of its own may hold the other ends
            assert pipe is not None
            pipe.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """The file of a rank that is this process."""
    made = str(tmp_path / "workers-3.bin")
    workers.create(made)
    workers.claim(made)
    return made


@pytest.fixture
def start(path: str) -> Iterator[type[Worker]]:
    started: list[Worker] = []

    def start_worker(worker: int = 0, program: str = WORKER) -> Worker:
        started.append(Worker(path, worker, program))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.is_killed()


def counts(slot: workers.WorkerSlot) -> tuple[int, ...]:
    return tuple(getattr(slot, name) for name in COUNTERS)


def test_a_new_file_is_empty_and_the_owners(path):
    status = os.stat(path)

    assert workers.read(path) == ()
    assert (status.st_mode & 0o777, status.st_size) == (0o600, WORKERS_BYTES)
    assert status.st_blocks * 512 >= WORKERS_BYTES, "not reserved: a full tmpfs would kill a worker with SIGBUS"
    assert os.listdir(os.path.dirname(path)) == ["workers-3.bin"]


def test_workers_that_live_at_once_have_a_slot_each(path, start):
    first, second = start(0), start(1)
    first.adds()
    seen = workers.read(path)

    assert (first.said, second.said) == ("0", "1")
    assert [(slot.pid, slot.worker, slot.alive) for slot in seen] == [(first.pid, 0, True), (second.pid, 1, True)]
    assert [counts(slot) for slot in seen] == [tuple(2 * one for one in ONE), ONE]
    assert all(slot.knows_runqueue and slot.knows_io for slot in seen)


def test_a_worker_goes_on_where_another_has_ended(path, start):
    """However it has ended: its counters stay, and are added to."""
    start(0).is_killed()
    second = start(1)
    dead_and_living = [slot.alive for slot in workers.read(path)]
    second.ends()
    third = start(2)
    (slot,) = workers.read(path)

    assert dead_and_living == [True]
    assert (second.said, third.said) == ("0", "0")
    assert (slot.pid, slot.worker, slot.alive) == (third.pid, 2, True)
    assert counts(slot) == tuple(3 * one for one in ONE)
    third.ends()
    assert [slot.alive for slot in workers.read(path)] == [False]


def test_the_first_free_slot_is_taken(path, start):
    first = start(0)
    start(1)
    first.ends()
    third = start(2)

    assert third.said == "0"
    assert [slot.worker for slot in workers.read(path)] == [2, 1]


FORKS = (
    WORKER
    + """
    child = os.fork()
    if child == 0:
        import signal
        signal.pause()
    print(child, flush=True)
"""
)


def test_a_child_that_a_worker_forks_does_not_hold_its_slot(path, start):
    worker = start(0, FORKS)
    worker.adds()
    child = int(worker.line())
    try:
        worker.is_killed()
        (slot,) = workers.read(path)
        assert not slot.alive
        assert start(1).said == "0"
    finally:
        os.kill(child, signal.SIGKILL)


def test_workers_of_another_program_are_turned_away(path, start):
    """A rank starts what it likes, and its environment goes along."""
    program = f"from gpulaunch.profiler.channel import workers; workers.claim({path!r})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert "of process" in start().said
    assert workers.read(path) == ()


def test_where_no_slot_is_free_a_worker_is_not_measured(path, start):
    lock = os.open(path, os.O_RDWR)
    child = os.fork()
    if child == 0:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(lock, b"")
        signal.pause()
    try:
        os.waitpid(child, os.WNOHANG)
        while not _is_locked(path):
            pass
        assert start().said.endswith(f"all {SLOTS} slots are taken")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(lock)


def _is_locked(path: str) -> bool:
    probe = os.open(path, os.O_RDWR)
    try:
        fcntl.lockf(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(probe)
    return False


def test_a_reader_learns_that_its_file_was_replaced(path, start):
    """Workers of an older attempt write where nobody looks."""
    old = start(0)
    with WorkersReader(path) as reader:
        before = reader.replaced()
        workers.create(path)
        old.adds()
        after = reader.replaced()
        os.unlink(path)

        assert (before, after, reader.replaced()) == (False, True, True)
        assert counts(reader.read()[0]) == tuple(2 * one for one in ONE)


def test_files_of_two_attempts_can_be_told_apart(path):
    with WorkersReader(path) as old:
        workers.create(path)
        with WorkersReader(path) as new:
            assert old.made_ns < new.made_ns


MAGIC = int.from_bytes(b"gpulwork", "little")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", f"0 bytes, a file of workers has {WORKERS_BYTES}"),
        (b"\xff" * WORKERS_BYTES, "not a gpulaunch file of workers"),
        (struct.pack("@2Q", MAGIC, 2) + bytes(WORKERS_BYTES - 16), "file of workers version 2"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path, content, why):
    path = tmp_path / "workers-0.bin"
    path.write_bytes(content)

    with pytest.raises(WorkersError, match=why):
        workers.read(str(path))
    with pytest.raises(WorkersError, match=why):
        workers.claim(str(path))
    with pytest.raises(FileNotFoundError):
        workers.read(str(tmp_path / "none"))


@given(st.binary(max_size=1024))
def test_whatever_is_in_the_slots_can_be_read(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("workers") / "workers-0.bin"
    header = struct.pack("@2Q", MAGIC, 1).ljust(256, b"\0")
    path.write_bytes((header + content).ljust(WORKERS_BYTES, b"\0"))

    assert all(not slot.alive for slot in workers.read(str(path)))
