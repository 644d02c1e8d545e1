"""A node for benchmarks of the endpoint: simulated ranks, perhaps a real one, and a sidecar over them as in a job."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil

from gpulaunch.profiler.channel import segment, segment_writer
from gpulaunch.profiler.channel.workers import create as create_workers

__all__ = ["BOUND_S", "Node", "ask", "machine", "node", "spread"]

HERE = Path(__file__).resolve().parent
BOUND_S = 120.0
"""Whatever takes longer than this will not come."""
AS_PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
}
"""What Prometheus 2.42 sends."""


@dataclass(frozen=True)
class Node:
    """What can be asked of it."""

    directory: Path
    address: tuple[str, int]
    sidecar: psutil.Process
    crowd: subprocess.Popen[str]
    rank: subprocess.Popen[bytes] | None

    def settle(self) -> dict[int, int]:
        """End the simulated training; give the steps that were made, by rank."""
        assert self.crowd.stdin is not None, "it was started with one"
        assert self.crowd.stdout is not None, "it was started with one"
        self.crowd.stdin.write("enough\n")
        self.crowd.stdin.flush()
        made: dict[str, int] = json.loads(self.crowd.stdout.readline())
        return {int(rank): steps for rank, steps in made.items()}

    def sidecar_cpu_s(self) -> float:
        """Of the sidecar so far."""
        return sum(self.sidecar.cpu_times()[:2])


@contextlib.contextmanager
def node(directory: Path, ranks: int, *, hz: float = 10.0, program: str | None = None) -> Generator[Node]:
    """So many ranks that make so many steps a second; rank 0 is this program, if there is one, at its own pace."""
    run_dir = directory / "run"
    run_dir.mkdir()
    first = int(program is not None)
    argv = [sys.executable, str(HERE / "_crowd.py"), str(directory), str(first), str(ranks - first), str(hz)]
    with contextlib.ExitStack() as stack:
        crowd = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stack.callback(crowd.terminate)  # its ranks end with it
        assert crowd.stdout is not None, "it was started with one"
        pids = [int(pid) for pid in crowd.stdout.readline().split()]
        rank = None
        if program is not None:
            rank = stack.enter_context(_rank(directory, program))
            pids.insert(0, rank.pid)
        places = [{"rank": rank, "local_rank": rank, "pid": pid} for rank, pid in enumerate(pids)]
        group = {"version": 1, "run_id": "0123456789abcdef", "name": "simulated", "attempt": 0, "ranks": places}
        group |= {"world_size": ranks, "node_rank": 0, "run_dir": str(run_dir)}
        (directory / "group.json").write_text(json.dumps(group))
        # As the agent's.
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN))
        argv = [sys.executable, "-P", "-m", "gpulaunch.launcher.cli.sidecar", "--channel-dir", str(directory)]
        argv += ["--listen-fd", str(listener.fileno()), "--parent-pid", str(os.getpid())]
        sidecar = stack.enter_context(subprocess.Popen(argv, pass_fds=[listener.fileno()]))
        stack.callback(sidecar.terminate)
        address = listener.getsockname()[:2]
        _begun(address, sidecar)
        yield Node(directory, address, psutil.Process(sidecar.pid), crowd, rank)


@contextlib.contextmanager
def _rank(directory: Path, program: str) -> Generator[subprocess.Popen[bytes]]:
    """Rank 0, observed as in any job; it has made a step."""
    path = str(directory / "rank-0.bin")
    segment_writer.create(path, rank=0, local_rank=0, attempt=0)
    create_workers(str(directory / "workers-0.bin"))
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"GPULAUNCH_CHANNEL_DIR": str(directory), "GPULAUNCH_PROFILE_BUDGET": "0"}
    with subprocess.Popen([sys.executable, str(HERE / program)], env=env) as process:
        try:
            until_s = time.monotonic() + BOUND_S
            while not segment.read(path).steps:
                assert time.monotonic() < until_s, "the rank has made no step"
                assert process.poll() is None, "the rank has ended"
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()


def _begun(address: tuple[str, int], sidecar: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + BOUND_S
    while True:
        with contextlib.suppress(TimeoutError):
            ask(address, "/healthz", timeout_s=5.0)
            return
        if sidecar.poll() is not None or time.monotonic() > until_s:
            sys.exit("the sidecar does not answer")


def ask(address: tuple[str, int], path: str, *, timeout_s: float = BOUND_S, **headers: str) -> tuple[float, bytes]:
    """Milliseconds from the connection to the last byte, and the body."""
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    request = "\r\n".join([*lines, "", ""]).encode()
    began_s = time.perf_counter()
    with socket.create_connection(address, timeout=timeout_s) as client:
        client.sendall(request)
        parts: list[bytes] = []
        while part := client.recv(1 << 18):
            parts.append(part)
    taken_ms = (time.perf_counter() - began_s) * 1e3
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        sys.exit(f"{path}: {head.splitlines()[0].decode() if head else 'no answer'}")
    return taken_ms, body


def spread(values: list[float]) -> dict[str, float]:
    """How they lie."""
    ordered = sorted(values)
    at = {"median": len(ordered) // 2, "p99": min(len(ordered) - 1, int(0.99 * len(ordered))), "max": -1}
    return {"scrapes": len(ordered), **{name: round(ordered[index], 2) for name, index in at.items()}}


def machine() -> dict[str, object]:
    """What the figures were measured on, and a yardstick: how long it counts to a million, in milliseconds."""
    taken_s: list[float] = []
    for _ in range(9):
        began_s = time.perf_counter()
        for _ in range(1_000_000):
            pass
        taken_s.append(time.perf_counter() - began_s)
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "counts_to_a_million_ms": round(min(taken_s) * 1e3, 1),
    }
