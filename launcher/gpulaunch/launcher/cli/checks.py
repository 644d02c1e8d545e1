"""The checks of `gpulaunch doctor`: each function checks one thing, and reports what it found and what to do.

A check reads, binds or creates something for a moment and undoes it. Only name resolution can block; it runs in a
thread that is not waited for beyond its deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from gpulaunch.launcher.job.host_info import HostInfo
from gpulaunch.launcher.job.spec import METRICS_HOST, METRICS_PORT_BASE, STATIC_MASTER_PORT

_MIB = 1 << 20
_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - the tmpfs itself, by its fixed name


class Status(Enum):
    """The severity of a finding for jobs: none, some loss, or they will not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    status: Status
    value: str
    advice: str = ""


def _ok(name: str, value: str) -> Finding:
    return Finding(name=name, status=Status.OK, value=value)


def _warn(name: str, value: str, advice: str) -> Finding:
    return Finding(name=name, status=Status.WARN, value=value, advice=advice)


def _fail(name: str, value: str, advice: str) -> Finding:
    return Finding(name=name, status=Status.FAIL, value=value, advice=advice)


# -- versions and installation

_PACKAGES = (
    ("torch", Status.FAIL, "nothing can be trained without it: pip install torch"),
    ("psutil", Status.WARN, "the sidecar cannot read processes: pip install psutil"),
    ("nvidia-ml-py", Status.WARN, "GPUs cannot be found or measured: pip install nvidia-ml-py"),
    ("prometheus-client", Status.WARN, "pip install prometheus-client"),
    ("py-spy", Status.WARN, "fewer stacks of ranks, none with another Python: pip install py-spy"),
)


TESTED_TORCH = ("2.6", "2.13", "2.14", "2.15")
"""The versions that the tests have run with, oldest first (docs/tested.md says how much of them)."""


def versions() -> Iterator[Finding]:
    """Python and the packages, by their metadata: torch is not imported."""
    from importlib import metadata

    yield _ok("python", f"{sys.version.split()[0]} ({sys.executable})")
    for package, status, advice in _PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(name=package, status=status, value="not installed", advice=advice)
        else:
            yield _torch(version) if package == "torch" else _ok(package, version)


def _torch(version: str) -> Finding:
    """A version that is too old fails; an untested one is reported, but is no failure."""
    number = re.match(r"(\d+)\.(\d+)", version)
    known = number is not None and number[0] in TESTED_TORCH
    value = f"{version} ({'' if known else 'not '}one of those tested: {', '.join(TESTED_TORCH)})"
    if number is not None and (int(number[1]), int(number[2])) < tuple(map(int, TESTED_TORCH[0].split("."))):
        return _fail("torch", value, f"torch {TESTED_TORCH[0]} or newer is needed: pip install --upgrade torch")
    return _ok("torch", value)


def entry_point(environ: Mapping[str, str]) -> Iterator[Finding]:
    """torch loads the probe through an entry point when it is imported."""
    from importlib import metadata

    name = "torch.backends entry"
    found = [each.value for each in metadata.entry_points(group="torch.backends") if each.name == "gpulaunch"]
    if not found:
        yield _warn(name, "not registered", "the profiler sees no steps: install gpulaunch again (pip install .)")
    elif environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        off = "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        yield _warn(name, f"disabled by {off}", f"spawned ranks are not profiled; unset {off.partition('=')[0]}")
    else:
        yield _ok(name, found[0])


# -- what the machine offers


def gpus(host: HostInfo) -> Iterator[Finding]:
    """GPUs and driver through NVML."""
    if host.gpus:
        names = ", ".join(sorted({gpu.name for gpu in host.gpus}))
        yield _ok("GPUs", f"{len(host.gpus)}: {names} ({host.gpus_why})")
        yield _ok("driver", _driver())
    elif os.path.exists("/dev/nvidiactl"):
        advice = "the driver is loaded but reports no GPU: compare with `nvidia-smi -L`, and check CUDA_VISIBLE_DEVICES"
        yield _warn("GPUs", f"none: {host.gpus_why}", advice)
    else:
        yield _ok("GPUs", f"none: {host.gpus_why}; ranks run on CPU with gloo")


def _driver() -> str:
    from gpulaunch.profiler.samplers.nvml import driver

    with driver.session() as nvml:
        version = driver.text(nvml.nvmlSystemGetDriverVersion())
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
    return f"{version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def cores_and_memory(host: HostInfo) -> Iterator[Finding]:
    """Cores and the limits of the control group."""
    yield _ok("cores", f"{host.cores} ({host.cores_why})")
    if host.memory_limit_bytes is None:
        yield _ok("memory limit", host.memory_why)
        return
    value = f"{host.memory_limit_bytes / _GIB:.1f} GiB ({host.memory_why})"
    if host.memory_limit_bytes < 2 * _GIB:
        yield _warn(
            "memory limit", value, "one process with torch needs at least 0.3 GiB; raise the container's memory limit"
        )
    else:
        yield _ok("memory limit", value)


def shared_memory() -> Iterator[Finding]:
    """The tmpfs of the profiler's segments and of everything that dataloader workers pass on."""
    name = _SHM
    try:
        stat = os.statvfs(_SHM)
    except OSError as err:
        yield _fail(name, str(err.strerror), "mount a tmpfs there: dataloader workers and the profiler need it")
        return
    size, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    value = f"{size / _MIB:.0f} MiB, {free / _MIB:.0f} MiB free"
    if not os.access(_SHM, os.W_OK):
        yield _fail(name, f"{value}, not writable", "chmod 1777 /dev/shm, or run without --read-only")
    elif free < 16 * _MIB:
        yield _fail(name, value, "full: remove leftover files, or enlarge it (docker run --shm-size=8g)")
    elif size < 512 * _MIB:
        advice = (
            "small for DataLoader workers (bus errors): docker run --shm-size=8g, or a Memory emptyDir in Kubernetes"
        )
        yield _warn(name, value, advice)
    else:
        yield _ok(name, value)


def limits() -> Iterator[Finding]:
    """Resource limits that affect training."""
    import resource

    def text(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

    def below(limit: int, least: int) -> bool:
        return limit not in (resource.RLIM_INFINITY, -1) and limit < least

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{text(soft)} (hard {text(hard)})"
    if below(soft, 1024):
        yield _fail("open files", value, "too few for several ranks: ulimit -n 65536")
    elif below(soft, 4096):
        yield _warn("open files", value, "too few for DataLoader workers, which pass descriptors: ulimit -n 65536")
    else:
        yield _ok("open files", value)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    value = f"{text(soft)} (hard {text(hard)})"
    if below(soft, 2048):
        yield _warn("processes", value, "threads count too: ulimit -u 16384")
    else:
        yield _ok("processes", value)
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    value = f"{text(soft)} (hard {text(hard)})"
    if below(soft, 64 * _MIB) and os.path.exists("/dev/infiniband"):
        yield _warn("locked memory", value, "InfiniBand needs it: ulimit -l unlimited")
    else:
        yield _ok("locked memory", value)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    yield _ok("core dumps", "off" if soft == 0 else f"{text(soft)} (hard {text(hard)})")


def run_directory() -> Iterator[Finding]:
    """The default run directory is created in the current directory."""
    import tempfile

    here = os.getcwd()
    try:
        with tempfile.TemporaryDirectory(prefix=".gpulaunch-doctor-", dir=here):
            pass
    except OSError as err:
        yield _warn("run directory", f"{here}: {err.strerror}", "use --job-dir with a writable directory")
        return
    stat = os.statvfs(here)
    free = stat.f_frsize * stat.f_bavail
    value = f"{here}, {free / _GIB:.1f} GiB free"
    if free < _GIB:
        yield _warn("run directory", value, "little space for logs and checkpoints: use --job-dir on another disk")
    else:
        yield _ok("run directory", value)


# -- kernel


def kernel() -> Iterator[Finding]:
    """The system calls that the launcher needs."""
    import ctypes

    value = os.uname().release
    missing: list[str] = []
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as err:
        missing.append(f"pidfd_open ({err.strerror})")
    try:
        os.close(os.memfd_create("gpulaunch-doctor"))
    except OSError as err:
        missing.append(f"memfd_create ({err.strerror})")
    get_child_subreaper = 37  # PR_GET_CHILD_SUBREAPER of linux/prctl.h
    answer = ctypes.c_int()
    if ctypes.CDLL(None, use_errno=True).prctl(get_child_subreaper, ctypes.byref(answer), 0, 0, 0) != 0:
        missing.append(f"child subreaper ({os.strerror(ctypes.get_errno())})")
    if missing:
        advice = "Linux 5.4 or newer is required; in a container, the seccomp profile must allow these calls"
        yield _fail("kernel", f"{value}; missing: {', '.join(missing)}", advice)
    else:
        yield _ok("kernel", f"{value}; pidfd, memfd, child subreaper")


_CAP_SYS_PTRACE = 19
_PTRACE_SCOPES = {"0": "any process of the user", "1": "descendants only", "2": "root only", "3": "no process"}


def tracing(root: str = "/") -> Iterator[Finding]:
    """Stacks are read from outside: Yama and CAP_SYS_PTRACE decide which processes may do that."""
    fields = (line.partition(":") for line in _read(os.path.join(root, "proc/self/status")).splitlines())
    status = {name: value.strip() for name, _, value in fields}
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_SYS_PTRACE & 1
    scope = _read(os.path.join(root, "proc/sys/kernel/yama/ptrace_scope"))
    value = "no Yama" if not scope else f"Yama scope {scope} ({_PTRACE_SCOPES.get(scope, 'unknown')})"
    value += ", CAP_SYS_PTRACE" if capable else ", no CAP_SYS_PTRACE"
    if status.get("Seccomp") == "2":
        value += ", seccomp filter"
    if scope == "3" or (scope == "2" and not capable):
        advice = "no stacks of other processes: sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE"
        yield _warn("ptrace", value, advice)
    elif "seccomp" in value and not capable:
        advice = (
            "the filter may forbid reading stacks: docker run --cap-add SYS_PTRACE lets its default profile allow it"
        )
        yield _warn("ptrace", value, advice)
    else:
        yield _ok("ptrace", value)


_FAST_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen")


def clock(root: str = "/") -> Iterator[Finding]:
    """The probe reads the clock several times per step."""
    rounds = 2000
    begin = time.perf_counter_ns()
    for _ in range(rounds):
        time.monotonic_ns()
    cost_ns = (time.perf_counter_ns() - begin) / rounds
    source = _read(os.path.join(root, "sys/devices/system/clocksource/clocksource0/current_clocksource")) or "unknown"
    value = f"{source}, {cost_ns:.0f} ns per reading, {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
    if time.gmtime().tm_year < 2025:
        yield _warn("clock", value, "the date is wrong, reports and TLS need it: enable NTP")
    elif source not in (*_FAST_CLOCKS, "unknown"):
        yield _warn("clock", value, f"{source} is a slow clock source: prefer tsc (boot option clocksource=tsc)")
    else:
        yield _ok("clock", value)


# -- network


def ports() -> Iterator[Finding]:
    """Whether the default ports are free now."""
    if _is_free(METRICS_HOST, METRICS_PORT_BASE):
        yield _ok("metrics port", f"{METRICS_HOST}:{METRICS_PORT_BASE} is free")
    else:
        following = range(METRICS_PORT_BASE + 1, METRICS_PORT_BASE + 100)
        free = next((port for port in following if _is_free(METRICS_HOST, port)), None)
        advice = f"{free} would be used; the address is printed at the start" if free else "use --metrics-addr"
        yield _warn("metrics port", f"{METRICS_HOST}:{METRICS_PORT_BASE} is in use", advice)
    if _is_free("", STATIC_MASTER_PORT):
        yield _ok("master port", f"{STATIC_MASTER_PORT} is free")
    else:
        advice = "not needed for one node; for several, set another --master-port, the same on every node"
        yield _warn("master port", f"{STATIC_MASTER_PORT} is in use", advice)


def _is_free(host: str, port: int) -> bool:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # Bind as our servers do: connections of the last run in TIME_WAIT do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


_DNS_TIMEOUT_S = 2.0
_DNS_SLOW_S = 0.5


def names() -> Iterator[Finding]:
    """localhost must be this machine; the hostname should resolve quickly: gloo looks it up."""
    addresses, took_s = resolve("localhost", _DNS_TIMEOUT_S)
    loopback = all(each.startswith("127.") or each == "::1" for each in addresses)
    value = f"localhost is {', '.join(addresses)} ({took_s * 1e3:.0f} ms)"
    if not addresses:
        yield _fail("localhost", "does not resolve", "add `127.0.0.1 localhost` to /etc/hosts")
    elif not loopback:
        yield _fail("localhost", value, "it must resolve to this machine: correct /etc/hosts")
    else:
        yield _ok("localhost", value)
    hostname = os.uname().nodename
    addresses, took_s = resolve(hostname, _DNS_TIMEOUT_S)
    value = f"{hostname} is {', '.join(addresses) or 'unknown'} ({took_s * 1e3:.0f} ms)"
    if not addresses:
        advice = "gloo and several nodes need it: add this machine to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield _warn("hostname", value, advice)
    elif took_s > _DNS_SLOW_S:
        yield _warn("hostname", value, "slow name resolution delays every start: add this machine to /etc/hosts")
    else:
        yield _ok("hostname", value)


def resolve(name: str, timeout_s: float) -> tuple[list[str], float]:
    """Addresses of a name (none within the time: an empty list), and how long it took."""
    import socket
    import threading

    addresses: list[str] = []

    def ask() -> None:
        with contextlib.suppress(OSError):  # does not resolve: the list stays empty
            addresses.extend({str(info[4][0]): None for info in socket.getaddrinfo(name, None)})

    # getaddrinfo cannot be interrupted; a daemon thread that takes too long is abandoned.
    thread = threading.Thread(target=ask, name="resolve", daemon=True)
    begin = time.monotonic()
    thread.start()
    thread.join(timeout_s)
    return list(addresses), time.monotonic() - begin


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""  # missing on this kernel


def checks(environ: Mapping[str, str], host: HostInfo) -> dict[str, Callable[[], Iterable[Finding]]]:
    """Every check by name, ready to be called, in the order of the report."""
    return {
        "versions": versions,
        "entry point": lambda: entry_point(environ),
        "GPUs": lambda: gpus(host),
        "cores and memory": lambda: cores_and_memory(host),
        "shared memory": shared_memory,
        "limits": limits,
        "run directory": run_directory,
        "kernel": kernel,
        "tracing": tracing,
        "clock": clock,
        "ports": ports,
        "names": names,
    }
