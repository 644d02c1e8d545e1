"""Nodes as processes of their own, which can be killed, stopped, and cut off."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOY = Path(__file__).with_name("toy_agent.py")
LIMIT_S = 60.0


class Process:
    """One toy agent: lines in, events out, every wait bounded."""

    def __init__(self, rank: int, *, prefix: tuple[str, ...] = (), **options: Any) -> None:
        said = json.dumps({"run_id": "test", "node_rank": rank, "host": f"host-{rank}", **options})
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, str(TOY), said], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self._buffer = b""

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()

    def hear(self) -> list[Any]:
        """Its next event."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + LIMIT_S
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            assert left > 0, f"nothing more after {self._buffer!r}"
            if select.select([self.popen.stdout], [], [], left)[0]:
                chunk = os.read(self.popen.stdout.fileno(), 65536)
                assert chunk, "it has ended"
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        heard: list[Any] = json.loads(line)
        return heard

    def end(self) -> None:
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()
        self.popen.send_signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def make(rank: int, **options: Any) -> Process:
        process = Process(rank, **options)
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.end()


@pytest.fixture
def job(start: Callable[..., Process]) -> Callable[..., list[Process]]:
    """All nodes of a job on one address of this machine, in attempt 0; the last one comes late."""

    def make(nnodes: int, addr: str = "127.0.0.1", **options: Any) -> list[Process]:
        shared = {"nnodes": nnodes, "nproc": 2, "master_addr": addr, **options}
        leader = start(0, master_port=0, **shared)
        leader.tell("join 0")
        port = leader.hear()[1]
        processes = [leader]
        for rank in range(1, nnodes):
            process = start(rank, master_port=port, **shared)
            assert process.hear() == ["listening", port]
            process.tell("join 0")
            processes.append(process)
        for rank, process in enumerate(processes):
            assert process.hear() == ["joined", 0, 2 * rank, 2 * nnodes]
        return processes

    return make


@pytest.mark.parametrize(("nnodes", "addr"), [(2, "127.0.0.1"), (3, "127.0.0.2"), (2, "localhost")])
def test_a_job_of_several_nodes_from_start_over_restart_to_end(
    job: Callable[..., list[Process]], nnodes: int, addr: str
) -> None:
    processes = job(nnodes, addr)
    for process in processes[1:-1]:
        process.tell("ok")
    processes[-1].tell("fail")
    processes[-1].tell("join 1")
    for process in processes[:-1]:
        last = nnodes - 1
        assert process.hear() == ["peer failed", False, f"node {last} (host-{last}): rank 5 failed"]
        process.tell("fail")
        process.tell("join 1")
    for rank, process in enumerate(processes):
        assert process.hear() == ["joined", 1, 2 * rank, 2 * nnodes]
    for process in processes:
        process.tell("ok")
    for process in processes:
        assert process.hear() == ["done"]
    for process in processes:
        process.tell("leave")
        assert process.popen.wait(LIMIT_S) == 0


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_killed_agent_is_noticed_without_waiting_for_a_beat(job: Callable[..., list[Process]], killed: int) -> None:
    """The kernel tells: with a beat every hour the loss is still seen, on every other node."""
    processes = job(3, pace={"beat_s": 3600.0, "lost_s": 7200.0})
    processes[killed].popen.kill()

    for rank, process in enumerate(processes):
        if rank != killed:
            word, final, why = process.hear()
            assert (word, final) == ("peer failed", True)
            gone = f"node {killed} (host-{killed}) is gone: "
            assert why.startswith(gone)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_agent_is_noticed_by_its_silence(job: Callable[..., list[Process]], stopped: int) -> None:
    processes = job(2, pace={"beat_s": 0.1, "lost_s": 1.5})
    processes[stopped].popen.send_signal(signal.SIGSTOP)

    expected = f"node {stopped} (host-{stopped}) is gone: no word from it for 1.5 s"
    assert processes[1 - stopped].hear() == ["peer failed", True, expected]


def test_a_port_in_use_is_one_line(start: Callable[..., Process]) -> None:
    first = start(0, master_port=0, nnodes=2, nproc=1, master_addr="127.0.0.1")
    port = first.hear()[1]
    second = start(0, master_port=port, nnodes=2, nproc=1, master_addr="127.0.0.1")
    word, why = second.hear()

    assert word == "error"
    assert why.startswith(f"port {port} on 127.0.0.1 is in use by process {first.popen.pid} (")


# -- a cable


class Cables:
    """Hosts as network namespaces on one bridge, each with a cable that can be cut. The machine's own net is left."""

    def __init__(self, num_hosts: int) -> None:
        self._tag = f"gl{os.getpid()}"
        self._num_hosts = num_hosts
        switch = self._space("sw")
        self._ip("netns", "add", switch)
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        for host in range(num_hosts):
            space, cable = self._space(f"h{host}"), f"v{host}"
            self._ip("netns", "add", space)
            self._ip("-n", switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("-n", switch, "link", "set", cable, "master", "br0", "up")
            self._ip("-n", space, "addr", "add", f"10.77.0.{10 + host}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")

    def _space(self, name: str) -> str:
        return f"{self._tag}{name}"

    def _ip(self, *args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True, text=True)

    def on(self, host: int) -> tuple[str, ...]:
        """What to put before a command so that it runs on this host."""
        return ("ip", "netns", "exec", self._space(f"h{host}"))

    def cut(self, host: int) -> None:
        self._ip("-n", self._space("sw"), "link", "set", f"v{host}", "down")

    def mend(self, host: int) -> None:
        self._ip("-n", self._space("sw"), "link", "set", f"v{host}", "up")

    def close(self) -> None:
        for name in ("sw", *(f"h{host}" for host in range(self._num_hosts))):
            subprocess.run(["ip", "netns", "del", self._space(name)], check=False, capture_output=True)


@pytest.fixture
def cables() -> Iterator[Cables]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip (Debian package iproute2)")
    probe = f"gl{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"cannot make a network namespace here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", probe], check=True, capture_output=True)
    cables = Cables(3)
    yield cables
    cables.close()


@pytest.fixture
def cabled(cables: Cables, start: Callable[..., Process]) -> list[Process]:
    """Three hosts in attempt 0, 4 s of silence being a loss."""
    shared = {"nnodes": 3, "nproc": 2, "master_addr": "10.77.0.10", "pace": {"beat_s": 0.5, "lost_s": 4.0}}
    processes = [start(rank, prefix=cables.on(rank), master_port=29500, **shared) for rank in range(3)]
    for process in processes:
        assert process.hear() == ["listening", 29500]
        process.tell("join 0")
    for rank, process in enumerate(processes):
        assert process.hear() == ["joined", 0, 2 * rank, 6]
    return processes


@pytest.mark.root
def test_a_cut_cable_is_noticed_on_both_sides_of_it(cables: Cables, cabled: list[Process]) -> None:
    cables.cut(2)

    lost = ["peer failed", True, "node 2 (host-2) is gone: no word from it for 4 s"]
    assert cabled[0].hear() == lost
    assert cabled[1].hear() == lost
    assert cabled[2].hear() == ["peer failed", True, "node 0 (host-0) is gone: no word from it for 4 s"]


@pytest.mark.root
def test_a_cable_that_is_out_for_a_moment_is_no_loss(cables: Cables, cabled: list[Process]) -> None:
    """Negative control: TCP repeats what was lost."""
    cables.cut(2)
    time.sleep(1.0)
    cables.mend(2)
    for process in cabled:
        process.tell("ok")

    assert [process.hear() for process in cabled] == [["done"]] * 3
