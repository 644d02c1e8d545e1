"""Batches in shared memory: over a fake /proc, and those of a real DataLoader, which no listing shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.record import AttemptGroup, RankPlace
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.process import ProcessSampler
from gpulaunch.profiler.samplers.shm import Segment, batches, creator_pid, listed_segments, open_segments

WAIT_S = 60.0


class FakeNode:
    """A /proc and a /dev/shm; a descriptor is a link to a file that holds what the segment holds."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.shm = root / "dev/shm"
        self.unlinked = root / "unlinked/dev/shm"
        for directory in (self.shm, self.unlinked):
            directory.mkdir(parents=True)

    def segment(self, name: str, size_bytes: int) -> Path:
        path = (self.unlinked if name.endswith(" (deleted)") else self.shm) / name
        with path.open("wb") as file:
            file.truncate(size_bytes)
        return path

    def opens(self, pid: int, *targets: Path | str) -> None:
        (self.proc / f"{pid}/fd").mkdir(parents=True, exist_ok=True)
        for target in targets:
            number = len(os.listdir(self.proc / f"{pid}/fd"))
            (self.proc / f"{pid}/fd/{number}").symlink_to(target)

    def batches(self, *pids: int, trainer_pid: int) -> dict[int, int]:
        """Bytes by who made them."""
        found = batches(str(self.proc), str(self.shm), pids, trainer_pid=trainer_pid)
        total: dict[int, int] = {}
        for segment in found.values():
            total[segment.maker_pid] = total.get(segment.maker_pid, 0) + segment.size_bytes
        return total


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


def test_a_batch_that_two_processes_hold_is_one(node: FakeNode) -> None:
    """The worker lets go of it only after the rank has it."""
    batch, fetched = node.segment("torch_11_77_0 (deleted)", 1000), node.segment("torch_11_78_1 (deleted)", 300)
    node.opens(10, batch, "socket:[4711]")
    node.opens(11, batch, fetched, "pipe:[12]")

    assert node.batches(10, 11, trainer_pid=10) == {11: 1300}


def test_what_the_rank_made_itself_is_no_batch(node: FakeNode) -> None:
    node.opens(10, node.segment("torch_10_1_0 (deleted)", 5000), node.segment("torch_11_1_0 (deleted)", 100))
    node.opens(11)

    assert node.batches(10, 11, trainer_pid=10) == {11: 100}


def test_a_batch_outlives_its_worker(node: FakeNode) -> None:
    node.opens(10, node.segment("torch_11_1_0 (deleted)", 100))

    assert node.batches(10, trainer_pid=10) == {11: 100}


def test_a_file_that_nobody_has_open_is_found_in_the_listing(node: FakeNode) -> None:
    """The other way of torch's to share (file_system); the listing has those of other jobs as well."""
    node.opens(10)
    node.opens(11)
    node.segment("torch_11_1_0", 100)
    node.segment("torch_99_1_0", 7000)
    node.segment("sem.mp-1", 32)

    assert node.batches(10, 11, trainer_pid=10) == {11: 100}


def test_a_listed_file_that_is_open_too_is_one(node: FakeNode) -> None:
    node.opens(10)
    node.opens(11, node.segment("torch_11_1_0", 100))

    assert node.batches(10, 11, trainer_pid=10) == {11: 100}


def test_a_process_that_is_gone_holds_nothing(node: FakeNode) -> None:
    assert open_segments(str(node.proc), 10) == {}
    node.opens(11, node.unlinked / "torch_11_1_0 (deleted)")  # closed between the look at its name and at its size
    assert open_segments(str(node.proc), 11) == {}


def test_what_may_not_be_looked_at_is_an_error(node: FakeNode) -> None:
    (node.proc / "10").mkdir(parents=True)
    (node.proc / "10/fd").write_text("no directory")
    with pytest.raises(NotADirectoryError):
        open_segments(str(node.proc), 10)


def test_a_node_without_shared_memory_has_no_segments(tmp_path: Path) -> None:
    assert listed_segments(str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("path", "pid"),
    [
        ("/dev/shm/torch_123_4567_0 (deleted)", 123),
        ("/dev/shm/torch_123_4567_0", 123),
        ("torch_123_4567_0", 123),
        ("x_torch_123_4567_0", None),
        ("/dev/shm/torch_123", None),
        ("/dev/shm/torch__1_1", None),
        ("/dev/shm/torch_99999999999_1_1", None),
        ("/dev/shm/torch_1_1/other", None),
        ("/dev/shm/sem.mp-abc", None),
        ("/data/torch_123_4567_0", None),
        ("socket:[123]", None),
        ("", None),
    ],
)
def test_a_name_tells_who_made_it(path: str, pid: int | None) -> None:
    assert creator_pid(path) == pid


@given(st.text())
def test_any_name_is_read_without_trouble(name: str) -> None:
    pid = creator_pid(name)
    assert pid is None or name.rpartition("/")[2].startswith("torch_")


# -- the kernel's own and torch's own

# What torch's C++ does to share a tensor, without torch.
HOLDER = """
import os, sys
name = f"/dev/shm/torch_{os.getpid()}_{os.getppid()}_0"
fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
os.unlink(name)
os.ftruncate(fd, 1 << 20)
os.dup(fd)
print("ready", flush=True)
sys.stdin.readline()
os.closerange(3, 20)
print("freed", flush=True)
sys.stdin.readline()
"""


def test_a_real_file_that_was_unlinked_is_found_until_it_is_freed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "ready\n"
            assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{holder.pid}_")]
            assert list(open_segments("/proc", holder.pid).values()) == [
                Segment(maker_pid=holder.pid, size_bytes=1 << 20)
            ]
            holder.stdin.write("\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "freed\n"
            assert open_segments("/proc", holder.pid) == {}
        finally:
            holder.kill()


# A training loop that holds one batch of 1 MiB while two workers make two more each. Then it ends the loader.
LOADER = """
import sys, torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(1 << 18)
if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy(sys.argv[2])
    batches = iter(DataLoader(Data(), batch_size=1, num_workers=2, multiprocessing_context=sys.argv[1]))
    first = next(batches)
    print("ready", *(worker.pid for worker in batches._workers), flush=True)
    sys.stdin.readline()
    del first, batches
    print("ended", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "strategy"), [("fork", "file_descriptor"), ("fork", "file_system"), ("spawn", "file_descriptor")]
)
def test_the_batches_of_a_real_loader(tmp_path: Path, method: str, strategy: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOADER)
    with subprocess.Popen(
        [sys.executable, str(script), method, strategy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as loop:
        assert loop.stdin is not None
        assert loop.stdout is not None
        try:
            word, *pids = loop.stdout.readline().split()
            assert word == "ready"
            place = RankPlace(rank=0, local_rank=0, pid=loop.pid)
            group = AttemptGroup(run_id="0" * 16, name="toy", attempt=0, world_size=1, node_rank=0, ranks=(place,))
            sampler = ProcessSampler(lambda: group, MonotonicTotals(), shm_period_s=0.0, shm_budget_s=60.0)
            # One batch that the loop holds, and the four that it has asked for: the one that follows it was asked of
            # the worker that made it.
            held_mib = {int(pid): size for pid, size in zip(pids, (3, 2), strict=True)}
            assert wait_for(sampler, held_mib) == held_mib

            loop.stdin.write("\n")
            loop.stdin.flush()
            assert loop.stdout.readline() == "ended\n"
            assert wait_for(sampler, {}) == {}
        finally:
            loop.kill()


def wait_for(sampler: ProcessSampler, expected: dict[int, int]) -> dict[int, int]:
    """Read until the sampler sees what is expected; else what it saw last."""
    deadline = time.monotonic() + WAIT_S
    while True:
        reading = sampler.read(time.monotonic())
        assert reading.errors == ()
        # In MiB: the other way of sharing has a header of some bytes in each.
        seen = {pid: size_bytes >> 20 for pid, size_bytes in reading.values[0].shm_inflight_bytes.items()}
        if seen == expected or time.monotonic() > deadline:
            return seen
        time.sleep(0.05)
