"""Counters and files beside the rank's own words, over a fake /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulaunch.launcher.failure import evidence, inside
from gpulaunch.launcher.failure.evidence import OomWatch, read_last_words, shm_evidence, shm_sentence


def put(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


V2 = "sys/fs/cgroup/kubepods/pod1/memory.events"
V1 = "sys/fs/cgroup/memory/docker/abc/memory.oom_control"


@pytest.mark.parametrize(
    ("cgroup", "counter", "limit"),
    [
        ("0::/kubepods/pod1\n", V2, "memory.max"),
        ("0::/\n", "sys/fs/cgroup/memory.events", "memory.max"),
        ("0::/../outside\n", "sys/fs/cgroup/memory.events", "memory.max"),
        ("9:name=systemd:/\n4:memory:/docker/abc\n0::/\n", V1, "memory.limit_in_bytes"),
        ("4:cpu,memory:/elsewhere\n0::/\n", "sys/fs/cgroup/memory/memory.oom_control", "memory.limit_in_bytes"),
    ],
)
def test_a_counter_that_rose_is_evidence(tmp_path: Path, cgroup: str, counter: str, limit: str) -> None:
    put(tmp_path, "proc/self/cgroup", cgroup)
    put(tmp_path, "proc/vmstat", "oom_kill 0\n")
    file = put(tmp_path, counter, "low 0\nhigh 12\noom 3\noom_kill 3\noom_group_kill 0\n")
    put(file.parent, limit, "8589934592\n")
    watch = OomWatch(str(tmp_path))
    watch.start()

    assert watch.evidence() is None, "it struck before this attempt"

    file.write_text("low 0\noom 4\noom_kill 4\n")
    assert watch.evidence() == (
        f"the kernel's OOM killer struck in this job's cgroup (limit 8.0 GiB, {file.name}: oom_kill 3 -> 4)"
    )

    watch.start()
    assert watch.evidence() is None, "the next attempt begins anew"


def test_without_a_limit_none_is_named(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    file = put(tmp_path, V1, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    put(file.parent, "memory.limit_in_bytes", "9223372036854771712\n")
    watch = OomWatch(str(tmp_path))
    watch.start()
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")

    assert watch.evidence() == (
        "the kernel's OOM killer struck in this job's cgroup (memory.oom_control: oom_kill 0 -> 1)"
    )


def test_on_a_host_without_a_counter_of_its_own_the_hosts_counter_speaks(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/cgroup", "0::/\n")
    vmstat = put(tmp_path, "proc/vmstat", "nr_free_pages 7\noom_kill 5\n")
    watch = OomWatch(str(tmp_path))
    watch.start()
    vmstat.write_text("nr_free_pages 7\noom_kill 6\n")

    assert watch.evidence() == "the kernel's OOM killer struck somewhere on this host (/proc/vmstat: oom_kill 5 -> 6)"


def test_nothing_to_read_is_no_evidence(tmp_path: Path) -> None:
    watch = OomWatch(str(tmp_path))

    assert watch.evidence() is None, "never started"
    watch.start()
    assert watch.evidence() is None


def test_the_watch_finds_a_counter_on_this_machine() -> None:
    watch = OomWatch()
    watch.start()

    assert watch.evidence() is None


MIB = 1 << 20


@pytest.mark.parametrize(
    ("total", "free", "said"),
    [
        (64 * MIB, 64 * MIB, "/dev/shm has 64 of 64 MiB free"),
        (8192 * MIB, 100 * MIB, "/dev/shm has 100 of 8192 MiB free"),
        (8192 * MIB, 8000 * MIB, None),
        (0, 0, "/dev/shm has 0 of 0 MiB free"),
    ],
)
def test_a_full_or_a_small_shared_memory_is_evidence(total: int, free: int, said: str | None) -> None:
    assert shm_sentence(total, free) == said


def test_a_host_without_shared_memory_is_no_evidence(tmp_path: Path) -> None:
    assert shm_evidence(str(tmp_path)) is None


def test_an_empty_fault_log_is_none_and_a_broken_error_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "fault.log").touch()
    (tmp_path / "error.json").write_text('{"mess')

    words = read_last_words(str(tmp_path))

    assert words.error is None
    assert words.fault is None
    assert words.evidence == ('error.json is not a complete error file; it begins: {"mess',)


def test_the_rank_writes_where_the_agent_reads() -> None:
    assert (evidence.FAULT_FILE, evidence.THREAD_ERROR_FILE) == (inside.FAULT_FILE, inside.THREAD_ERROR_FILE)


def test_a_rank_without_a_directory_left_no_words(tmp_path: Path) -> None:
    words = read_last_words(str(tmp_path / "none"))

    assert (words.error, words.fault, words.evidence) == (None, None, ())
