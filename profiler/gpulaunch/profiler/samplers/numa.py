"""Reads which NUMA nodes a process may run on, and which one a GPU is attached to, from /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path


def nodes_of(pid: int, *, root: Path = Path("/")) -> frozenset[int]:
    """Return the nodes with a core on which the process may run; empty where the kernel does not report them."""
    try:
        allowed = _allowed((root / f"proc/{pid}/status").read_text("ascii", "replace"))
        nodes = root / "sys/devices/system/node"
        found = {
            int(name.removeprefix("node")): parse_cpu_list((nodes / name / "cpulist").read_text("ascii", "replace"))
            for name in os.listdir(nodes)
            if name.startswith("node") and name.removeprefix("node").isdigit()
        }
    except (OSError, ValueError):
        return frozenset()
    return frozenset(node for node, cpus in found.items() if cpus & allowed)


def gpu_node(pci_bus_id: str, *, root: Path = Path("/")) -> int | None:
    """Return the node of a GPU's slot; None where the machine does not report it, or has only one node.

    Args:
        pci_bus_id: as NVML writes it, `00000000:3B:00.0`, or as sysfs does, `0000:3b:00.0`.
        root: where /sys is found.
    """
    domain, _, rest = pci_bus_id.lower().partition(":")  # eight digits of it in NVML, four or more in sysfs
    try:
        slot = root / f"sys/bus/pci/devices/{int(domain, 16):04x}:{rest}"
        node = int((slot / "numa_node").read_text("ascii", "replace"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list such as `0-2,4`, as the kernel writes it. Raises ValueError if it is invalid."""
    cpus: set[int] = set()
    for part in text.split(","):
        if part.strip():
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _allowed(status: str) -> frozenset[int]:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return parse_cpu_list(value)
    return frozenset()
