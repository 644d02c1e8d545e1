"""Counters and files beside the rank's own words, over a fake /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulaunch.launcher.failure import evidence, inside
from gpulaunch.launcher.failure.evidence import OomWatch, read_rank_evidence, shm_evidence, shm_sentence
from gpulaunch.launcher.failure.kernel_log import KernelLog


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


def test_the_counter_of_a_ranks_own_cgroup_speaks_for_that_rank_only(tmp_path: Path) -> None:
    """Version 1 counts a kill in the victim's cgroup and in none above it."""
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    put(tmp_path, V1, "oom_kill 0\n")
    of_rank = {pid: put(tmp_path, f"sys/fs/cgroup/memory/docker/abc/{pid}/memory.oom_control", "oom_kill 2\n")
               for pid in (-11, -12)}  # fmt: skip
    watch = OomWatch(str(tmp_path), KernelLog(str(tmp_path / "none")))
    watch.start()
    for pid in of_rank:
        put(tmp_path, f"proc/{pid}/cgroup", f"4:memory:/docker/abc/{pid}\n")
        watch.watch(pid)
    of_rank[-11].write_text("oom_kill 3\n")
    for pid in of_rank:  # long after: by then the kernel says "/" of the dead one, or nothing
        (tmp_path / f"proc/{pid}/cgroup").unlink()
        watch.watch(pid)

    assert watch.evidence(-12) is None
    assert watch.evidence(-11) == (
        "the kernel's OOM killer struck in this rank's cgroup (memory.oom_control: oom_kill 2 -> 3)"
    )
    assert watch.evidence(-11) is None, "one kill explains one death"


def kernel_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, before: str = "", ours: bool = True) -> Path:
    monkeypatch.setattr(KernelLog, "numbers_are_ours", ours)
    return put(tmp_path, "kmsg", before)


KILLED = "3,9,5,-;Memory cgroup out of memory: Killed process {} (python) total-vm:9kB, anon-rss:8kB, UID:0\n"


def test_the_kernel_log_names_the_victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kills: of a rank, and of a process that is none; a third rank was killed by somebody at the same time."""
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    counter = put(tmp_path, V1, "oom_kill 0\n")
    said = kernel_said(tmp_path, monkeypatch, before=KILLED.format(11))
    watch = OomWatch(str(tmp_path), KernelLog(str(said)))
    watch.start()
    assert watch.evidence(11) is None, "the pid of an earlier process"

    with said.open("a") as log:
        log.write(KILLED.format(12))
    counter.write_text("oom_kill 1\n")
    assert watch.evidence(12) == (
        "the kernel's OOM killer struck this rank (Memory cgroup out of memory: Killed process 12 (python))"
    )
    assert watch.evidence(13) is None

    with said.open("a") as log:
        log.write(KILLED.format(77))
    counter.write_text("oom_kill 2\n")
    assert watch.evidence(13) == (
        "the kernel's OOM killer killed another process (Memory cgroup out of memory: Killed process 12 (python); "
        "Memory cgroup out of memory: Killed process 77 (python))"
    )
    watch.log.close()


def test_a_kill_of_another_rank_explains_only_that_ranks_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    counter = put(tmp_path, V1, "oom_kill 0\n")
    said = kernel_said(tmp_path, monkeypatch)
    watch = OomWatch(str(tmp_path), KernelLog(str(said)))
    watch.start()
    eaters, other = (99_000_001, 99_000_002), 99_000_003  # no such processes here
    for pid in eaters:
        put(tmp_path, f"proc/{pid}/cgroup", "4:memory:/docker/abc\n")
        watch.watch(pid)
    said.write_text("".join(map(KILLED.format, eaters)))
    counter.write_text("oom_kill 2\n")

    assert watch.evidence(other) is None
    assert all("struck this rank" in str(watch.evidence(pid)) for pid in eaters)
    watch.log.close()


def test_a_process_killed_in_another_job_of_the_host_is_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    put(tmp_path, V1, "oom_kill 0\n")
    said = kernel_said(tmp_path, monkeypatch)
    watch = OomWatch(str(tmp_path), KernelLog(str(said)))
    watch.start()
    said.write_text(KILLED.format(77))

    assert watch.evidence(13) is None
    watch.log.close()


def test_in_a_container_the_pids_of_the_log_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "proc/self/cgroup", "4:memory:/docker/abc\n")
    counter = put(tmp_path, V1, "oom_kill 0\n")
    said = kernel_said(tmp_path, monkeypatch, ours=False)
    watch = OomWatch(str(tmp_path), KernelLog(str(said)))
    watch.start()
    said.write_text(KILLED.format(13))
    assert watch.evidence(13) is None

    counter.write_text("oom_kill 1\n")
    assert "memory.oom_control: oom_kill 0 -> 1" in str(watch.evidence(99))
    watch.log.close()


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

    words = read_rank_evidence(str(tmp_path))

    assert words.error is None
    assert words.fault is None
    assert words.evidence == ('error.json is not a complete error file; it begins: {"mess',)


def test_the_rank_writes_where_the_agent_reads() -> None:
    assert (evidence.FAULT_FILE, evidence.THREAD_ERROR_FILE) == (inside.FAULT_FILE, inside.THREAD_ERROR_FILE)


def test_a_rank_without_a_directory_left_no_words(tmp_path: Path) -> None:
    words = read_rank_evidence(str(tmp_path / "none"))

    assert (words.error, words.fault, words.evidence) == (None, None, ())
