"""Where we are, read from fake roots: cores, quota, memory limit, GPUs, what launched us. Each with its reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.job.describe import ranges
from gpulaunch.launcher.job.host_info import Gpu, detect, parse_cpu_list, select
from gpulaunch.profiler.cgroup import Cgroups

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)


class Root:
    """A fake root of a file system."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def write(self, name: str, text: str) -> Root:
        file = Path(self.path, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A machine with 64 cores, all of them ours, and no limits."""
    return (
        Root(tmp_path)
        .write("proc/self/status", "Name:\tpython\nCpus_allowed:\tffff\nCpus_allowed_list:\t0-63\n")
        .write("sys/devices/system/cpu/online", "0-63\n")
    )


def test_a_plain_machine(root: Root) -> None:
    host = detect({}, root=root.path)

    assert (host.cores, host.cores_why) == (64, "all 64")
    assert (host.gpus, host.gpus_why) == ((), "no NVIDIA driver (/dev/nvidiactl does not exist)")
    assert (host.memory_limit_bytes, host.memory_why) == (None, "no cgroup limit")
    assert host.launched_by == "one host"


def test_an_affinity_mask_counts(root: Root) -> None:
    root.write("proc/self/status", "Cpus_allowed_list:\t0-3,8,10-11\n")

    assert (detect({}, root=root.path).cores, detect({}, root=root.path).cores_why) == (7, "7 of 64: affinity mask")


@pytest.mark.parametrize(
    ("quota", "cores", "why"),
    [
        ("1600000 100000", 16, "16 of 64: cgroup quota 16.0"),
        ("150000 100000", 1, "1 of 64: cgroup quota 1.5"),
        ("10000 100000", 1, "1 of 64: cgroup quota 0.1"),
        ("max 100000", 64, "all 64"),
        ("9900000 100000", 64, "all 64"),
        ("", 64, "all 64"),
    ],
)
def test_a_quota_of_cgroup_v2(root: Root, quota: str, cores: int, why: str) -> None:
    root.write("proc/self/cgroup", "0::/kube/pod1\n").write("proc/self/mountinfo", V2_MOUNT)
    root.write("sys/fs/cgroup/kube/pod1/cpu.max", quota + "\n")
    host = detect({}, root=root.path)

    assert (host.cores, host.cores_why) == (cores, why)


def test_the_tightest_limit_on_the_way_up_counts(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/a/b\n").write("proc/self/mountinfo", V2_MOUNT)
    root.write("sys/fs/cgroup/a/cpu.max", "200000 100000").write("sys/fs/cgroup/a/b/cpu.max", "400000 100000")
    root.write("sys/fs/cgroup/a/memory.max", "4096").write("sys/fs/cgroup/a/b/memory.max", "max")

    assert Cgroups(root.path).cpu_quota_cores() == 2.0
    assert Cgroups(root.path).memory_limit() == (4096, "cgroup v2 memory.max")


def test_limits_of_cgroup_v1(root: Root) -> None:
    root.write("proc/self/cgroup", "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n").write("proc/self/mountinfo", V1_MOUNTS)
    root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "400000")
    root.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000")
    root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    root.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    root.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(8 << 30))
    root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")

    assert Cgroups(root.path).cpu_quota_cores() == 4.0
    assert Cgroups(root.path).memory_limit() == (8 << 30, "cgroup v1 memory.limit_in_bytes")


def test_a_container_without_a_cgroup_namespace(root: Root) -> None:
    """The path is the host's and does not exist below the mount: the mount is our group."""
    root.write("proc/self/cgroup", "0::/docker/0123\n").write("proc/self/mountinfo", V2_MOUNT)
    root.write("sys/fs/cgroup/cpu.max", "300000 100000")

    assert Cgroups(root.path).cpu_quota_cores() == 3.0


def test_a_mount_of_a_part_of_the_tree(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/docker/0123/inner\n")
    root.write("proc/self/mountinfo", V2_MOUNT.replace(" / /sys", " /docker/0123 /sys"))
    root.write("sys/fs/cgroup/inner/cpu.max", "300000 100000")

    assert Cgroups(root.path).cpu_quota_cores() == 3.0


def test_without_proc_the_kernel_is_asked(tmp_path: Path) -> None:
    assert detect({}, root=str(tmp_path)).cores == len(os.sched_getaffinity(0))


def test_the_real_machine_is_read_without_complaint() -> None:
    assert detect(os.environ).cores >= 1


@given(st.frozensets(st.integers(0, 300), max_size=40))
def test_a_list_of_cpus_survives_writing_and_reading(cpus: frozenset[int]) -> None:
    assert parse_cpu_list(ranges(cpus)) == cpus


# -- what launched us


@pytest.mark.parametrize(
    ("environ", "launched_by"),
    [
        ({}, "one host"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "one host"),
        (
            {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "one host (Slurm job 12, but no step of srun: its rank variables mean nothing here)",
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"},
            "one host (Slurm job 12, but no step of srun: its rank variables mean nothing here)",
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"},
            (
                "one host (Slurm job 12, but no step of srun: its rank variables mean nothing here; `srun gpulaunch` "
                "uses all 2 nodes of the job)"
            ),
        ),
        (
            {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"},
            "Slurm step 12.0, task 1 of 4 (SLURM_STEP_ID)",
        ),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes (KUBERNETES_SERVICE_HOST)"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "2", "PET_NODE_RANK": "1"},
            "torchrun-style PET_ variables (PET_NNODES, PET_NODE_RANK); Kubernetes (KUBERNETES_SERVICE_HOST)",
        ),
    ],
)
def test_what_launched_us(root: Root, environ: dict[str, str], launched_by: str) -> None:
    assert detect(environ, root=root.path).launched_by == launched_by


# -- GPUs


class NVMLError(Exception):
    """As pynvml's."""


def fake_nvml(*, cards: int = 2, mig: int = 0, broken: str = "") -> ModuleType:
    """NVML with some cards, the first with MIG instances if asked for."""
    nvml = ModuleType("pynvml")

    def init() -> None:
        if broken:
            raise NVMLError(broken)

    def mig_handle(handle: int, instance: int) -> str:
        if instance == 1:  # instance numbers have gaps
            raise NVMLError("Not Found")
        return f"MIG-{handle}-{instance}"

    def mig_mode(handle: int) -> tuple[int, int]:
        if handle != 0:
            raise NVMLError("Not Supported")
        return (1 if mig else 0), 0

    vars(nvml).update(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: cards,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(domain=0, bus=0x3B + handle, device=0),
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: mig,
        nvmlDeviceGetMigDeviceHandleByIndex=mig_handle,
        nvmlDeviceGetUUID=lambda handle: handle if isinstance(handle, str) else f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=139 << 30),
    )
    return nvml


@pytest.fixture
def driver(root: Root, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], Root]:
    def install(nvml: ModuleType) -> Root:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return root.write("dev/nvidiactl", "")

    return install


def test_gpus_through_nvml(driver: Callable[[ModuleType], Root]) -> None:
    host = detect({}, root=driver(fake_nvml()).path)

    assert host.gpus_why == "2 through NVML"
    assert [(gpu.index, gpu.uuid, gpu.pci_bus_id) for gpu in host.gpus] == [
        (0, "GPU-0", "0000:3b:00.0"),
        (1, "GPU-1", "0000:3c:00.0"),
    ]
    assert host.gpus[0].name == "NVIDIA H200"


def test_mig_instances_stand_for_their_card(driver: Callable[[ModuleType], Root]) -> None:
    host = detect({}, root=driver(fake_nvml(mig=3)).path)

    assert [(gpu.index, gpu.uuid) for gpu in host.gpus] == [(0, "MIG-0-0"), (0, "MIG-0-2"), (1, "GPU-1")]


def test_a_broken_nvml_is_a_reason(driver: Callable[[ModuleType], Root]) -> None:
    host = detect({}, root=driver(fake_nvml(broken="Driver/library version mismatch")).path)

    assert (host.gpus, host.gpus_why) == ((), "NVML: Driver/library version mismatch")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("GPU-1", [1]),
        (" 1 , 0 ", [1, 0]),
        ("x", []),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(
    driver: Callable[[ModuleType], Root], visible: str, indices: list[int]
) -> None:
    host = detect({"CUDA_VISIBLE_DEVICES": visible}, root=driver(fake_nvml()).path)

    assert [gpu.index for gpu in host.gpus] == indices
    assert host.gpus_why == f"{len(indices)} of 2: CUDA_VISIBLE_DEVICES={visible}"


def test_selecting_stops_at_the_first_unknown(gpu: Callable[[int], Gpu]) -> None:
    gpus = (gpu(0), gpu(1), gpu(2))

    assert select(gpus, "2,GPU-00000001,nonsense,0") == (gpus[2], gpus[1])
