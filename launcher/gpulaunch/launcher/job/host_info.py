"""Detects the host: cores, GPUs, memory limit and what launched us, each with the reason.

Files are read under a root that tests replace. Nothing is decided here: the environment of Slurm and Kubernetes is
reported; what shapes the job is read by `load`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpulaunch.launcher.job import slurm
from gpulaunch.profiler.cgroup import Cgroups


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU that we may use, as NVML names it."""

    index: int
    """NVML's index, which counts cards in PCI order."""
    uuid: str
    name: str
    memory_bytes: int
    pci_bus_id: str
    """As in sysfs: 0000:3b:00.0."""


@dataclass(frozen=True, kw_only=True)
class HostInfo:
    """What this machine offers, with the reasons."""

    cores: int
    """Cores to plan with: the affinity mask, capped by the cgroup's CPU quota."""
    cores_why: str
    gpus: tuple[Gpu, ...]
    """The GPUs that CUDA_VISIBLE_DEVICES selects, in its order."""
    gpus_why: str
    launched_by: str
    hostname: str
    memory_limit_bytes: int | None
    memory_why: str
    root: str = "/"


def detect(environ: Mapping[str, str], *, root: str = "/") -> HostInfo:
    """Read /proc, /sys and the cgroup under `root`, and NVML if there is an NVIDIA driver. Starts nothing."""
    cores, cores_why = _cores(root)
    gpus, gpus_why = _gpus(environ, root)
    limit, memory_why = Cgroups(root).memory_limit()
    return HostInfo(
        cores=cores,
        cores_why=cores_why,
        gpus=gpus,
        gpus_why=gpus_why,
        launched_by=_launched_by(environ),
        hostname=os.uname().nodename,
        memory_limit_bytes=limit,
        memory_why=memory_why,
        root=root,
    )


def cpus_allowed(root: str) -> frozenset[int]:
    """The affinity mask of this process."""
    try:
        with open(os.path.join(root, "proc/self/status"), encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Cpus_allowed_list:"):
                    return parse_cpu_list(line.partition(":")[2])
    except (OSError, ValueError):
        pass  # no /proc: ask the kernel directly
    return frozenset(os.sched_getaffinity(0))


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-2,4` as the kernel writes it -> {0, 1, 2, 4}."""
    cpus: set[int] = set()
    for part in text.split(","):
        if part.strip():
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _cores(root: str) -> tuple[int, str]:
    allowed = len(cpus_allowed(root))
    try:
        with open(os.path.join(root, "sys/devices/system/cpu/online"), encoding="ascii") as file:
            online = len(parse_cpu_list(file.read()))
    except (OSError, ValueError):
        online = allowed
    quota = Cgroups(root).cpu_quota_cores()
    if quota is not None and quota < allowed:
        # Rounded down: one thread more than the quota gets throttled together with all others.
        return max(1, int(quota)), f"{max(1, int(quota))} of {online}: cgroup quota {quota:.1f}"
    if allowed < online:
        return allowed, f"{allowed} of {online}: affinity mask"
    return allowed, f"all {online}"


def _gpus(environ: Mapping[str, str], root: str) -> tuple[tuple[Gpu, ...], str]:
    if not os.path.exists(os.path.join(root, "dev/nvidiactl")):
        return (), "no NVIDIA driver (/dev/nvidiactl does not exist)"
    # Loading NVML costs time and memory: only where there is a driver.
    try:
        found = _nvml_gpus()
    except Exception as err:  # NVML raises its own family of errors; any of them means that no GPU is known
        return (), f"NVML: {err}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found, f"{len(found)} through NVML"
    kept = select(found, visible)
    return kept, f"{len(kept)} of {len(found)}: CUDA_VISIBLE_DEVICES={visible}"


def select(gpus: Sequence[Gpu], visible: str) -> tuple[Gpu, ...]:
    """The GPUs that a CUDA_VISIBLE_DEVICES value selects: CUDA stops at the first entry that names no GPU."""
    kept: list[Gpu] = []
    for entry in visible.split(","):
        gpu = find(gpus, entry.strip())
        if gpu is None or gpu in kept:
            break
        kept.append(gpu)
    return tuple(kept)


def find(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """The GPU with this index or (abbreviated) UUID, if any."""
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry)), None)
    return next((gpu for gpu in gpus if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)), None)


def _nvml_gpus() -> tuple[Gpu, ...]:
    from gpulaunch.profiler.samplers.nvml import driver

    with driver.session() as nvml:
        return tuple(gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _nvml_gpu(nvml, index, driver.text))


def _nvml_gpu(nvml: Any, index: int, text: Callable[[bytes | str], str]) -> list[Gpu]:
    """The card, or its instances if MIG is enabled: CUDA can use only those."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    bus_id = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    handles = [handle]
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            handles = []
            for instance in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                try:
                    handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance))
                except nvml.NVMLError:
                    continue  # instance numbers have gaps
    except nvml.NVMLError:
        pass  # a card without MIG
    return [
        Gpu(
            index=index,
            uuid=text(nvml.nvmlDeviceGetUUID(each)),
            name=text(nvml.nvmlDeviceGetName(each)),
            memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(each).total),
            pci_bus_id=bus_id,
        )
        for each in handles
    ]


def _launched_by(environ: Mapping[str, str]) -> str:
    reasons: list[str] = []
    torchrun = sorted(name for name in environ if name.startswith("PET_"))
    if torchrun:
        reasons.append(f"torchrun-style PET_ variables ({', '.join(torchrun)})")
    job = environ.get("SLURM_JOB_ID")
    if job and slurm.in_step(environ):
        task = f"task {environ.get('SLURM_PROCID', '?')} of {environ.get('SLURM_NTASKS', '?')}"
        reasons.append(f"Slurm step {job}.{environ['SLURM_STEP_ID']}, {task} (SLURM_STEP_ID)")
    elif job:
        nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
        others = "" if nodes == "1" else f"; `srun gpulaunch` uses all {nodes} nodes of the job"
        reasons.append(f"one host (Slurm job {job}, but no step of srun: its rank variables mean nothing here{others})")
    if "KUBERNETES_SERVICE_HOST" in environ:
        reasons.append("Kubernetes (KUBERNETES_SERVICE_HOST)")
    return "; ".join(reasons) or "one host"
