"""Real connections over loopback, seen from /proc."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

import pytest

from gpulaunch.launcher.hang import proc, sockets

CONNECTS = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    "print(flush=True); sys.stdin.read()"
)


@pytest.mark.parametrize(
    ("family", "bound_to", "asked_at"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::", "127.0.0.1")],
    ids=["ipv4", "mapped"],
)
def test_a_connection_counts_by_the_processes_at_its_ends(
    family: socket.AddressFamily, bound_to: str, asked_at: str
) -> None:
    """torch's store listens on IPv6 and is asked by IPv4."""
    with closing(
        socket.create_server((bound_to, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
    ) as server:
        argv = [sys.executable, "-c", CONNECTS, asked_at, str(server.getsockname()[1])]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            rank.stdout.readline()
            connection, _ = server.accept()
            with closing(connection):
                assert sockets.among_themselves([rank.pid, os.getpid()])
                assert not sockets.among_themselves([rank.pid]), "what is at the other end is outside"
                assert rank.stdin is not None
                rank.stdin.close()


def test_what_cannot_be_seen_is_not_within() -> None:
    assert not sockets.among_themselves([2**22 - 7])


@pytest.mark.parametrize(("error", "gpu"), [(PermissionError, True), (FileNotFoundError, False)])
def test_what_may_not_be_read_may_have_a_gpu(monkeypatch: pytest.MonkeyPatch, error: type[OSError], gpu: bool) -> None:
    listdir: Callable[[str], list[str]] = os.listdir

    def refuse(path: str) -> list[str]:
        if path.endswith("/fd"):
            raise error(path)
        return listdir(path)

    assert not proc.read(os.getpid(), {}).gpu, "the control"
    monkeypatch.setattr(os, "listdir", refuse)
    assert proc.read(os.getpid(), {}).gpu is gpu


@pytest.mark.parametrize("device", ["/dev/accel/accel0", "/dev/davinci1", "/dev/neuron0", "/dev/dxg", "/dev/nvidia0"])
def test_an_accelerator_that_is_open_is_seen(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    readlink: Callable[[str], str] = lambda _: device  # noqa: E731
    monkeypatch.setattr(os, "readlink", readlink)
    assert proc.read(os.getpid(), {}).gpu


MOVES = """
import socket, sys, time
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
while data := s.recv(4096) if sys.argv[2] == "receives" else s.send(bytes(4096)):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("way", ["receives", "sends", "waits"])
def test_what_a_rank_receives_or_sends_slowly_is_work(way: str) -> None:
    """recv(2) and send(2) are not in /proc/PID/io; a second, no torch."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        argv = [sys.executable, "-c", MOVES, str(server.getsockname()[1]), way.replace("waits", "receives")]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as rank:
            assert rank.stdout is not None
            rank.stdout.readline()
            connection, _ = server.accept()
            with closing(connection):
                first = proc.read(rank.pid, sockets.bytes_by_socket())
                for _ in range(50):
                    if way == "receives":
                        connection.sendall(bytes(4096))
                    elif way == "sends":
                        connection.recv(65536)
                    time.sleep(0.01)
                second = proc.read(rank.pid, sockets.bytes_by_socket())
                rank.kill()
    moved_bytes = second.io_bytes - first.io_bytes
    assert moved_bytes < 65536 if way == "waits" else moved_bytes > 65536, moved_bytes
