"""The node's shared figures, from a fake root and from the real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.host import (
    PRESSURES,
    HostSampler,
    page_cache_bytes,
    parse_meminfo,
    parse_pressure,
    swap_used_bytes,
)

MEMINFO = b"""MemTotal:       24684092 kB
MemFree:        22655268 kB
MemAvailable:   23063548 kB
Buffers:          150000 kB
Cached:          1250000 kB
SwapCached:            0 kB
SwapTotal:       2097152 kB
SwapFree:        2000000 kB
Shmem:            900000 kB
HugePages_Total:       0
"""
CPU = b"some avg10=4.01 avg60=0.82 avg300=0.17 total=119000254\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
IO = b"some avg10=0.00 avg60=0.00 avg300=0.00 total=78922\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=34710\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node that counts pressure, in a control group with limits."""
    for name, text in (
        ("proc/meminfo", MEMINFO),
        ("proc/pressure/cpu", CPU),
        ("proc/pressure/io", IO),
        ("proc/pressure/memory", IO),
        ("proc/self/cgroup", b"0::/job\n"),
        ("proc/self/mountinfo", b"30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"),
        ("sys/fs/cgroup/job/memory.max", b"1000000\n"),
        ("sys/fs/cgroup/job/memory.current", b"900000\n"),
        ("sys/fs/cgroup/job/memory.stat", b"active_file 100000\ninactive_file 200000\n"),
        ("sys/fs/cgroup/job/cpu.max", b"150000 100000\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def test_everything_that_the_ranks_share(root: Path) -> None:
    reading = HostSampler(root=root).read(time.monotonic())
    host = reading.values

    assert reading.errors == ()
    assert host.memory_total_bytes == 24684092 * 1024
    assert host.page_cache_bytes == 500000 * 1024
    assert host.swap_used_bytes == 97152 * 1024
    assert host.pressure_s == {
        ("cpu", "some"): 119.000254,
        ("io", "some"): 0.078922,
        ("io", "full"): 0.03471,
        ("memory", "some"): 0.078922,
        ("memory", "full"): 0.03471,
    }
    assert (host.cgroup_limit_bytes, host.cgroup_used_bytes) == (1000000, 600000)
    assert host.cpu_quota_cores == 1.5
    assert host.cores == len(os.sched_getaffinity(0))
    assert host.loop_ns is not None
    assert host.loop_ns > 0


def test_the_real_node_has_memory_and_shared_memory() -> None:
    sampler = HostSampler()
    reading = sampler.read(time.monotonic())
    host = reading.values
    assert [error for error in reading.errors if "pressure" not in error] == []  # not every kernel counts that
    assert reading.late_s >= 0
    assert 0 <= (host.shm_used_bytes or 0) <= (host.shm_size_bytes or -1)
    assert 0 < (host.memory_available_bytes or 0) <= (host.memory_total_bytes or -1)
    assert 0 <= (host.page_cache_bytes or 0) < (host.memory_total_bytes or -1)
    assert set(host.pressure_s) <= set(PRESSURES)
    later = sampler.read(time.monotonic())
    assert later.errors == ()
    assert all(later.values.pressure_s[pressure] >= total_s for pressure, total_s in host.pressure_s.items())


def test_what_is_missing_is_none_and_named(tmp_path: Path) -> None:
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_bytes(b"MemTotal:       24684092 kB\n")
    (tmp_path / "proc/pressure/cpu").write_bytes(CPU)
    reading = HostSampler(root=tmp_path).read(time.monotonic())
    host = reading.values

    assert reading.errors == (
        "shared memory: No such file or directory",
        "io pressure: No such file or directory",
        "memory pressure: No such file or directory",
    )
    assert host.shm_size_bytes is None
    assert host.memory_total_bytes == 24684092 * 1024
    assert (host.page_cache_bytes, host.swap_used_bytes) == (None, None)
    assert (host.cgroup_limit_bytes, host.cgroup_used_bytes, host.cpu_quota_cores) == (None, None, None)
    assert list(host.pressure_s) == [("cpu", "some")]


def test_a_kernel_that_does_not_count_pressure_is_told_of_once(root: Path) -> None:
    """It never will; counted as an error each second, it would drown what does go wrong."""
    for file in (root / "proc/pressure").iterdir():
        file.unlink()
    sampler = HostSampler(root=root)

    assert len(sampler.read(0.0).errors) == 3
    assert sampler.read(1.0).errors == ()
    (root / "proc/pressure/io").write_bytes(IO)
    assert sampler.read(2.0).values.pressure_s[("io", "full")] == 0.03471


def test_meminfo_is_given_in_bytes() -> None:
    assert parse_meminfo(b"MemTotal:       24684092 kB\nHugePages_Total:       0\nMemFree:  12 kB\n") == {
        "MemTotal": 24684092 * 1024,
        "MemFree": 12 * 1024,
    }


def test_shared_memory_is_no_page_cache() -> None:
    assert page_cache_bytes({"Cached": 1000, "Buffers": 50, "Shmem": 700}) == 350
    assert page_cache_bytes({"Cached": 1000}) == 1000
    assert page_cache_bytes({"Buffers": 50}) is None


def test_a_node_without_swap_has_none_in_use() -> None:
    assert swap_used_bytes({"SwapTotal": 0, "SwapFree": 0}) == 0
    assert swap_used_bytes({}) is None


@given(st.binary())
def test_meminfo_of_any_content_is_read_without_trouble(text: bytes) -> None:
    assert all(size >= 0 for size in parse_meminfo(text).values())


@given(st.binary() | st.binary().map(lambda tail: b"some avg10=0.00 total=" + tail))
def test_pressure_of_any_content_is_read_without_trouble(text: bytes) -> None:
    assert all(total_s >= 0 for total_s in parse_pressure(text).values())


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (IO, {"some": 0.078922, "full": 0.03471}),
        (b"some total=5\n", {"some": 5e-6}),
        (b"some avg10=1.00 total=\n", {}),
        (b"some\n\n", {}),
        (b"", {}),
    ],
)
def test_pressure_is_the_total_of_each_line(text: bytes, seconds: dict[str, float]) -> None:
    assert parse_pressure(text) == seconds
