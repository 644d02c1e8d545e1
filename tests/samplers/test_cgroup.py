"""The limits of control groups: over a fake root for both versions, and in a real group of version 1."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.cgroup import Cgroups, GroupMemory, parse_stat

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)


class Root:
    """A fake root of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> Root:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def group(self, path: str, *, limit: object = "max", usage: int = 0, active: int = 0, inactive: int = 0) -> Root:
        """A group of version 2."""
        home = f"sys/fs/cgroup{path}"
        self.write(f"{home}/memory.max", f"{limit}\n").write(f"{home}/memory.current", f"{usage}\n")
        return self.write(f"{home}/memory.stat", f"anon 1\nactive_file {active}\ninactive_file {inactive}\n")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A container of version 2 that is in the group /kube/pod."""
    return Root(tmp_path).write("proc/self/cgroup", "0::/kube/pod\n").write("proc/self/mountinfo", V2_MOUNT)


def test_page_cache_of_files_does_not_count_as_used(root: Root) -> None:
    """A group that reads its dataset again and again is always full, and never killed for it."""
    root.group("/kube/pod", limit=1000, usage=990, active=300, inactive=400)
    memory = Cgroups(root.path).memory()

    assert memory == GroupMemory(limit_bytes=1000, used_bytes=290)
    assert memory.headroom_bytes == 710


def test_the_group_with_the_least_room_counts_not_the_one_with_the_lowest_limit(root: Root) -> None:
    root.group("/kube/pod", limit=1000, usage=100).group("/kube", limit=5000, usage=4900)

    assert Cgroups(root.path).memory() == GroupMemory(limit_bytes=5000, used_bytes=4900)


def test_without_a_limit_there_is_nothing_to_tell(root: Root) -> None:
    root.group("/kube/pod", usage=100)

    assert Cgroups(root.path).memory() is None
    assert Cgroups(root.path).cpu_quota_cores() is None


def test_a_limit_that_is_changed_is_seen(root: Root) -> None:
    cgroups = Cgroups(root.path)
    seen: list[GroupMemory | None] = []
    for limit in ("max", 2000, 3000):
        root.group("/kube/pod", limit=limit, usage=7)
        seen.append(cgroups.memory())

    assert seen == [None, GroupMemory(limit_bytes=2000, used_bytes=7), GroupMemory(limit_bytes=3000, used_bytes=7)]


def test_a_limit_without_a_usage_is_left_out(root: Root) -> None:
    root.write("sys/fs/cgroup/kube/pod/memory.max", "1000\n")

    assert Cgroups(root.path).memory() is None


def test_version_1_counts_the_groups_below_too(tmp_path: Path) -> None:
    root = Root(tmp_path).write("proc/self/cgroup", "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n")
    root.write("proc/self/mountinfo", V1_MOUNTS)
    home = "sys/fs/cgroup/memory"
    root.write(f"{home}/memory.limit_in_bytes", "9223372036854771712").write(f"{home}/memory.usage_in_bytes", "9")
    root.write(f"{home}/job/memory.limit_in_bytes", "8000").write(f"{home}/job/memory.usage_in_bytes", "7000")
    root.write(
        f"{home}/job/memory.stat",
        "active_file 1\ninactive_file 1\ntotal_active_file 2000\ntotal_inactive_file 1000\n",
    )
    root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "250000")
    root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")

    assert Cgroups(tmp_path).memory() == GroupMemory(limit_bytes=8000, used_bytes=4000)
    assert Cgroups(tmp_path).cpu_quota_cores() == 2.5


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("1600000 100000", 16.0), ("50000 100000", 0.5), ("max 100000", None), ("100000 0", None), ("", None)],
)
def test_a_quota_of_version_2(root: Root, quota: str, cores: float | None) -> None:
    root.write("sys/fs/cgroup/kube/pod/cpu.max", quota + "\n")

    assert Cgroups(root.path).cpu_quota_cores() == cores


def test_the_tightest_quota_on_the_way_up_counts(root: Root) -> None:
    root.write("sys/fs/cgroup/kube/cpu.max", "200000 100000").write("sys/fs/cgroup/kube/pod/cpu.max", "400000 100000")

    assert Cgroups(root.path).cpu_quota_cores() == 2.0


def test_a_container_without_a_cgroup_namespace(root: Root) -> None:
    """The path is the host's and does not exist below the mount: the mount is our group."""
    root.group("", limit=1000, usage=10).write("sys/fs/cgroup/cpu.max", "300000 100000")

    assert Cgroups(root.path).memory() == GroupMemory(limit_bytes=1000, used_bytes=10)
    assert Cgroups(root.path).cpu_quota_cores() == 3.0


def test_a_mount_of_a_part_of_the_tree(root: Root) -> None:
    root.write("proc/self/mountinfo", V2_MOUNT.replace(" / /sys", " /kube /sys")).group("/pod", limit=1000, usage=10)

    assert Cgroups(root.path).memory() == GroupMemory(limit_bytes=1000, used_bytes=10)


def test_a_node_without_control_groups(tmp_path: Path) -> None:
    assert Cgroups(tmp_path).memory() is None
    assert Cgroups(tmp_path).cpu_quota_cores() is None


@given(
    mountinfo=st.text(st.characters(exclude_categories=["Cs"])), own=st.text(st.characters(exclude_categories=["Cs"]))
)
def test_lines_that_mean_nothing_to_us_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, mountinfo: str, own: str
) -> None:
    root = Root(tmp_path_factory.getbasetemp() / "any").write("proc/self/mountinfo", f"{mountinfo}\n{V2_MOUNT}")
    root.write("proc/self/cgroup", f"{own}\n0::/kube\n").group("/kube", limit=1000, usage=10)

    assert Cgroups(root.path).memory() == GroupMemory(limit_bytes=1000, used_bytes=10)
    assert Cgroups(root.path).cpu_quota_cores() is None


@given(st.text())
def test_a_stat_of_any_content_is_read_without_trouble(text: str) -> None:
    assert all(number >= 0 for number in parse_stat(text).values())


def test_a_stat_is_lines_of_a_name_and_a_number() -> None:
    assert parse_stat("anon 12\nfile 7\nodd\n three words 3\nhigh -1\n") == {"anon": 12, "file": 7}


# -- the kernel's own

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 256 << 20
SHARE_BYTES = 32 << 20
# Takes memory of its own and writes a file, which stays in the page cache; then says what a sidecar here would see.
MEMBER = f"""
import sys
from gpulaunch.profiler.cgroup import Cgroups
print("ready", flush=True)
sys.stdin.readline()
own = bytearray(b"x") * {SHARE_BYTES}
before = Cgroups().memory()
with open(sys.argv[1], "wb") as file:
    file.write(own)
after = Cgroups().memory()
print(before.limit_bytes, before.used_bytes, after.used_bytes, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def real_group() -> Iterator[Path]:
    top = MEMORY / f"gpulaunch-test-{secrets.token_hex(4)}"
    try:
        top.mkdir()
        (top / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as err:
        pytest.skip(f"no memory cgroup of version 1 to be made here: {err.strerror}")
    yield top
    top.rmdir()


@pytest.mark.root
def test_a_real_group_of_version_1(real_group: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", MEMBER, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as member:
        assert member.stdin is not None
        assert member.stdout is not None
        try:
            assert member.stdout.readline() == "ready\n"
            (real_group / "cgroup.procs").write_text(str(member.pid))
            member.stdin.write("\n")
            member.stdin.flush()
            limit, before, after = (int(word) for word in member.stdout.readline().split())
            usage = int((real_group / "memory.usage_in_bytes").read_text())
        finally:
            member.kill()

    assert limit == LIMIT_BYTES
    assert before >= SHARE_BYTES  # its own memory counts
    assert after - before < SHARE_BYTES // 2  # the file does not
    assert usage - after > SHARE_BYTES // 2  # though the kernel has it in the group's usage
