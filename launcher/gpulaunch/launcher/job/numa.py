"""The CPUs near each rank's GPU: the four modes of --numa-binding, read from /sys, without numactl and torch.

Like torch, rank r is assumed to use GPU r of those it sees, and only CPUs of our affinity mask count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from gpulaunch.launcher.job.host_info import parse_cpu_list

Cpus = frozenset[int]


class NumaError(Exception):
    """The binding cannot be computed; `str()` says why."""


def cpu_sets(mode: str, pci_bus_ids: Sequence[str], *, allowed: Cpus, root: str = "/") -> tuple[Cpus, ...]:
    """The CPU set of each GPU, in order.

    Args:
        mode: node, socket, exclusive or core-complex.
        pci_bus_ids: of every GPU that the job sees, in sysfs notation.
        allowed: the affinity mask.
        root: the parent directory of /sys.

    Raises:
        NumaError: a set would be empty, or /sys lacks the data.
    """
    sysfs = _Sysfs(root, allowed)
    try:
        nodes = [sysfs.node_of_gpu(bus_id) for bus_id in pci_bus_ids]
        sets: list[Cpus] = []
        for gpu, node in enumerate(nodes):
            neighbours = [other for other, its_node in enumerate(nodes) if its_node == node]
            sets.append(_MODES[mode](sysfs, node, neighbours.index(gpu), len(neighbours)))
    except OSError as err:
        raise NumaError(f"cannot read {err.filename}: {err.strerror}") from err
    except ValueError as err:
        raise NumaError(f"/sys is not as expected: {err}") from err
    for gpu, cpus in enumerate(sets):
        if not cpus:
            raise NumaError(f"no core near GPU {gpu} (NUMA node {nodes[gpu]}) is in our affinity mask")
    return tuple(sets)


class _Sysfs:
    """The facts of /sys that the modes need."""

    def __init__(self, root: str, allowed: Cpus) -> None:
        self._sys = os.path.join(root, "sys")
        self._allowed = allowed

    def _read(self, path: str) -> str:
        with open(os.path.join(self._sys, path), encoding="ascii") as file:
            return file.read().strip()

    def node_of_gpu(self, pci_bus_id: str) -> int:
        # -1 on machines with one node only
        return max(0, int(self._read(f"bus/pci/devices/{pci_bus_id}/numa_node")))

    def nodes(self) -> Cpus:
        return parse_cpu_list(self._read("devices/system/node/possible"))

    def cpus_of_node(self, node: int) -> Cpus:
        return parse_cpu_list(self._read(f"devices/system/node/node{node}/cpulist")) & self._allowed

    def socket_of(self, cpu: int) -> int:
        return int(self._read(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"))

    def core_of(self, cpu: int) -> int:
        """The physical core of a CPU, represented by its lowest CPU."""
        return min(parse_cpu_list(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")))

    def cache_of(self, cpu: int) -> int:
        """The last-level data cache of a CPU, represented by the lowest CPU that shares it."""
        directory = f"devices/system/cpu/cpu{cpu}/cache"
        caches = [
            (int(self._read(f"{directory}/{entry}/level")), f"{directory}/{entry}/shared_cpu_list")
            for entry in os.listdir(os.path.join(self._sys, directory))
            if entry.startswith("index") and self._read(f"{directory}/{entry}/type") in ("Unified", "Data")
        ]
        if not caches:
            raise ValueError(f"CPU {cpu} lists no data cache")
        return min(parse_cpu_list(self._read(max(caches)[1])))


def _node(sysfs: _Sysfs, node: int, index: int, count: int) -> Cpus:
    del index, count
    return sysfs.cpus_of_node(node)


def _socket(sysfs: _Sysfs, node: int, index: int, count: int) -> Cpus:
    del index, count
    by_node = {each: cpus for each in sysfs.nodes() if (cpus := sysfs.cpus_of_node(each))}
    if node not in by_node:
        return frozenset()
    socket = sysfs.socket_of(min(by_node[node]))
    return frozenset().union(*(cpus for cpus in by_node.values() if sysfs.socket_of(min(cpus)) == socket))


def _exclusive(sysfs: _Sysfs, node: int, index: int, count: int) -> Cpus:
    cores = [cpus for _, cpus in sorted(_group(sysfs.cpus_of_node(node), sysfs.core_of).items())]
    if len(cores) < count:
        raise NumaError(f"NUMA node {node} has {len(cores)} usable cores for {count} GPUs: none would be exclusive")
    share, extra = divmod(len(cores), count)  # the first `extra` GPUs get one core more
    start = index * share + min(index, extra)
    return frozenset().union(*cores[start : start + share + (index < extra)])


def _core_complex(sysfs: _Sysfs, node: int, index: int, count: int) -> Cpus:
    del count
    groups = _group(sysfs.cpus_of_node(node), sysfs.cache_of)
    ordered = [cpus for _, cpus in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))]
    return ordered[index % len(ordered)] if ordered else frozenset()


def _group(cpus: Cpus, key: Callable[[int], int]) -> dict[int, Cpus]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return {each: frozenset(members) for each, members in groups.items()}


_MODES: dict[str, Callable[[_Sysfs, int, int, int], Cpus]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}
