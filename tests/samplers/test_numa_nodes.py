"""NUMA nodes of a process and of a GPU, over the /proc and /sys of made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.numa import gpu_node, nodes_of, parse_cpu_list


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two nodes of four cores; process 7 may run on cores 4 and 5, process 8 everywhere."""
    for pid, cpus in ((7, "4-5"), (8, "0-7"), (9, "none")):
        status = tmp_path / f"proc/{pid}/status"
        status.parent.mkdir(parents=True)
        status.write_text(f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n")
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        cpulist = tmp_path / f"sys/devices/system/node/node{node}/cpulist"
        cpulist.parent.mkdir(parents=True)
        cpulist.write_text(f"{cpus}\n")
    (tmp_path / "sys/devices/system/node/possible").write_text("0-1\n")
    for bus_id, node in (("0000:3b:00.0", 1), ("0000:5e:00.0", -1), ("10000:01:00.0", 0)):
        file = tmp_path / f"sys/bus/pci/devices/{bus_id}/numa_node"
        file.parent.mkdir(parents=True)
        file.write_text(f"{node}\n")
    return tmp_path


@pytest.mark.parametrize(("pid", "nodes"), [(7, {1}), (8, {0, 1}), (9, set()), (10, set())])
def test_a_process_may_run_on_the_nodes_of_its_cores(root: Path, pid: int, nodes: set[int]) -> None:
    assert nodes_of(pid, root=root) == nodes


def test_a_machine_that_does_not_tell_has_no_nodes(tmp_path: Path) -> None:
    assert nodes_of(7, root=tmp_path) == frozenset()
    assert gpu_node("0000:3b:00.0", root=tmp_path) is None


@pytest.mark.parametrize(
    ("bus_id", "node"),
    [
        ("0000:3b:00.0", 1),
        ("00000000:3B:00.0", 1),
        ("00010000:01:00.0", 0),  # a domain that the kernel has made, as for a controller that hides a bus
        ("0000:5e:00.0", None),
        ("0000:99:00.0", None),
        ("x:99:00.0", None),
        ("", None),
    ],
)
def test_a_gpu_is_on_the_node_of_its_slot(root: Path, bus_id: str, node: int | None) -> None:
    assert gpu_node(bus_id, root=root) == node


@given(st.sets(st.integers(0, 300)))
def test_a_list_of_cores_is_read_as_the_kernel_writes_it(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(map(str, sorted(cpus)))) == cpus
    assert parse_cpu_list("0-3,8") == {0, 1, 2, 3, 8}
