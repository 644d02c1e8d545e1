"""The node's shared figures, from a fake root and from the real one."""

from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.host import HostSampler, parse_meminfo

MEMINFO = b"""MemTotal:       24684092 kB
MemFree:        22655268 kB
MemAvailable:   23063548 kB
HugePages_Total:       0
"""


def test_meminfo_is_given_in_bytes() -> None:
    assert parse_meminfo(MEMINFO) == {
        "MemTotal": 24684092 * 1024,
        "MemFree": 22655268 * 1024,
        "MemAvailable": 23063548 * 1024,
    }


@given(st.binary())
def test_meminfo_of_any_content_is_read_without_trouble(text: bytes) -> None:
    assert all(size >= 0 for size in parse_meminfo(text).values())


def test_the_real_node_has_memory_and_shared_memory() -> None:
    reading = HostSampler().read(time.monotonic())
    host = reading.values
    assert reading.errors == ()
    assert reading.late_s >= 0
    assert 0 <= (host.shm_used_bytes or 0) <= (host.shm_size_bytes or -1)
    assert 0 < (host.memory_available_bytes or 0) <= (host.memory_total_bytes or -1)


def test_what_is_missing_is_none_and_named(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_bytes(MEMINFO)
    reading = HostSampler(root=tmp_path).read(time.monotonic())

    assert reading.errors == ("shared memory: No such file or directory",)
    assert reading.values.shm_size_bytes is None
    assert reading.values.memory_total_bytes == 24684092 * 1024
