"""CPU sets near GPUs over fake /sys trees, compared with torch's own four modes on the same trees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulaunch.launcher.job.describe import ranges
from gpulaunch.launcher.job.numa import NumaError, cpu_sets

MODES = ("node", "socket", "exclusive", "core-complex")


def build(
    root: Path,
    *,
    sockets: int = 2,
    nodes_per_socket: int = 2,
    cores_per_node: int = 4,
    threads: int = 2,
    cores_per_cache: int = 2,
    gpu_nodes: tuple[int, ...],
) -> tuple[list[str], frozenset[int]]:
    """A machine in /sys; hyper-threads are numbered after all cores, as x86 does. Gives the GPUs and all CPUs."""
    sys_ = root / "sys"

    def write(name: str, text: object) -> None:
        path = sys_ / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    nodes = sockets * nodes_per_socket
    cores = nodes * cores_per_node
    write("devices/system/node/possible", ranges(range(nodes)))
    for node in range(nodes):
        first = node * cores_per_node
        cpus = [core + thread * cores for thread in range(threads) for core in range(first, first + cores_per_node)]
        write(f"devices/system/node/node{node}/cpulist", ranges(cpus))
    for cpu in range(cores * threads):
        core = cpu % cores
        node = core // cores_per_node
        siblings = [core + thread * cores for thread in range(threads)]
        cache = node * cores_per_node + (core % cores_per_node) // cores_per_cache * cores_per_cache
        sharing_cores = range(cache, min(cache + cores_per_cache, (node + 1) * cores_per_node))
        sharing = [each + thread * cores for thread in range(threads) for each in sharing_cores]
        base = f"devices/system/cpu/cpu{cpu}"
        write(f"{base}/topology/physical_package_id", node // nodes_per_socket)
        write(f"{base}/topology/thread_siblings_list", ranges(siblings))
        for index, (kind, level, shared) in enumerate(
            [("Data", 1, siblings), ("Instruction", 4, range(cores)), ("Unified", 3, sharing)]
        ):
            write(f"{base}/cache/index{index}/type", kind)
            write(f"{base}/cache/index{index}/level", level)
            write(f"{base}/cache/index{index}/shared_cpu_list", ranges(shared))
    gpus = [f"0000:{0x10 + index:02x}:00.0" for index in range(len(gpu_nodes))]
    for gpu, node in zip(gpus, gpu_nodes, strict=True):
        write(f"bus/pci/devices/{gpu}/numa_node", node)
    return gpus, frozenset(range(cores * threads))


def sets(tmp_path: Path, mode: str, *, allowed: frozenset[int] | None = None, **machine: Any) -> list[str]:
    gpus, cpus = build(tmp_path, **machine)
    return [ranges(each) for each in cpu_sets(mode, gpus, allowed=allowed or cpus, root=str(tmp_path))]


def test_node_is_all_cpus_of_the_gpus_node(tmp_path: Path) -> None:
    assert sets(tmp_path, "node", gpu_nodes=(0, 3)) == ["0-3,16-19", "12-15,28-31"]


def test_socket_is_all_nodes_of_the_gpus_socket(tmp_path: Path) -> None:
    assert sets(tmp_path, "socket", gpu_nodes=(0, 3)) == ["0-7,16-23", "8-15,24-31"]


def test_exclusive_divides_the_cores_of_a_node_and_gives_the_rest_to_the_first(tmp_path: Path) -> None:
    assert sets(tmp_path, "exclusive", gpu_nodes=(1, 1, 0, 1)) == ["4-5,20-21", "6,22", "0-3,16-19", "7,23"]


def test_core_complex_gives_each_gpu_a_cache_of_its_own_while_there_are_some(tmp_path: Path) -> None:
    assert sets(tmp_path, "core-complex", gpu_nodes=(0, 0, 0)) == ["0-1,16-17", "2-3,18-19", "0-1,16-17"]


def test_the_fuller_cache_comes_first_when_the_mask_cuts_one(tmp_path: Path) -> None:
    assert sets(tmp_path, "core-complex", gpu_nodes=(0,), allowed=frozenset({0, 2, 3})) == ["2-3"]


def test_a_machine_with_one_node_says_minus_one(tmp_path: Path) -> None:
    assert sets(tmp_path, "node", sockets=1, nodes_per_socket=1, gpu_nodes=(-1,)) == ["0-7"]


def test_only_cpus_of_our_mask_count(tmp_path: Path) -> None:
    assert sets(tmp_path, "node", gpu_nodes=(0,), allowed=frozenset({1, 2, 9})) == ["1-2"]


@pytest.mark.parametrize("mode", MODES)
def test_no_cpu_left_near_a_gpu_is_an_error(tmp_path: Path, mode: str) -> None:
    with pytest.raises(NumaError):
        sets(tmp_path, mode, gpu_nodes=(0, 1), allowed=frozenset({0, 1}))


def test_fewer_cores_than_gpus_cannot_be_exclusive(tmp_path: Path) -> None:
    with pytest.raises(NumaError, match="NUMA node 0 has 4 usable cores for 5 GPUs"):
        sets(tmp_path, "exclusive", gpu_nodes=(0,) * 5)


def test_a_gpu_that_sysfs_does_not_know(tmp_path: Path) -> None:
    build(tmp_path, gpu_nodes=(0,))
    with pytest.raises(NumaError, match=r"cannot read .*0000:ff:00\.0"):
        cpu_sets("node", ["0000:ff:00.0"], allowed=frozenset({0}), root=str(tmp_path))


# -- the same trees through torch


SERVER = """
import builtins, inspect, json, os, shutil, sys
from unittest import mock
import torch
from torch.numa import binding

find = binding._get_validated_logical_cpus_to_bind_to
first = next(iter(inspect.signature(find).parameters))  # gpu_index; from torch 2.14 on device_index
real_open, real_listdir = builtins.open, os.listdir
for line in sys.stdin:
    root, mode, gpus, allowed = json.loads(line)
    def moved(path):
        return root + path if isinstance(path, str) and path.startswith("/sys") else path
    def properties(index):
        bus = int(gpus[index].split(":")[1], 16)
        return mock.Mock(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    with (
        mock.patch.object(builtins, "open", lambda path, *a, **k: real_open(moved(path), *a, **k)),
        mock.patch.object(os, "listdir", lambda path=".": real_listdir(moved(path))),
        mock.patch.object(os, "sched_getaffinity", lambda pid: set(allowed)),
        mock.patch.object(shutil, "which", lambda name: "/bin/" + name),
        mock.patch.object(torch.cuda, "get_device_properties", properties),
        mock.patch.object(torch.cuda, "device_count", lambda: len(gpus)),
        mock.patch.object(torch.accelerator, "device_count", lambda: len(gpus)),
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cuda")),
    ):
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
        try:
            answer = [sorted(find(**{first: index}, numa_options=options)) for index in range(len(gpus))]
        except Exception as err:
            answer = None
    print(json.dumps(answer), flush=True)
"""

Torch = Callable[[Path, str, list[str], frozenset[int]], Any]


@pytest.fixture(scope="module")
def torchs() -> Iterator[Torch]:
    """torch's own computation, in a process of its own."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(root: Path, mode: str, gpus: list[str], allowed: frozenset[int]) -> Any:
        server.stdin.write(json.dumps([str(root), mode, gpus, sorted(allowed)]).encode() + b"\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield ask
    server.communicate()


@pytest.mark.torch
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_the_sets_are_torchs(tmp_path_factory: pytest.TempPathFactory, torchs: Torch, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("machine")
    shape = {
        "sockets": data.draw(st.integers(1, 2)),
        "nodes_per_socket": data.draw(st.integers(1, 2)),
        "cores_per_node": data.draw(st.integers(1, 5)),
        "threads": data.draw(st.integers(1, 2)),
        "cores_per_cache": data.draw(st.integers(1, 3)),
    }
    nodes = shape["sockets"] * shape["nodes_per_socket"]
    gpu_nodes = tuple(data.draw(st.lists(st.integers(-1, nodes - 1), min_size=1, max_size=5)))
    gpus, cpus = build(root, gpu_nodes=gpu_nodes, **shape)
    allowed = cpus - data.draw(st.frozensets(st.sampled_from(sorted(cpus)), max_size=3))
    for mode in MODES:
        theirs = torchs(root, mode, gpus, allowed)
        try:
            mine = [sorted(each) for each in cpu_sets(mode, gpus, allowed=allowed, root=str(root))]
        except NumaError:
            mine = None
        # torch gives up on "socket" when any node of the machine has no CPU for us, even one in another socket.
        if theirs is None and mode == "socket" and mine is not None:
            continue

        assert mine == theirs, mode
