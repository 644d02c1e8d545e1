"""Members of etcd for a test: real ones, on ports of this machine, or one on each of several hosts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hosts import Host

from needed import program
from ports import free_port

PORT = 2379
PEERS_S = 20.0


class Etcd:
    """One member."""

    def __init__(self, name: str, address: str, port: int, peer_port: int, directory: Path, tls: Sequence[str]) -> None:
        self.name = name
        self.address = address
        self.port = port
        self.peer_url = f"http://{address}:{peer_port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._directory = directory
        self._tls = tls

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.address}:{self.port}"

    def start(self, cluster: str, host: Host | None = None) -> None:
        """Start it, or start it again with what it has on disk."""
        argv = [
            *(program("etcd", package="etcd-server"), "--name", self.name),
            *("--data-dir", str(self._directory / self.name), "--initial-cluster", cluster),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--unsafe-no-fsync", "--log-level", "warn"),
            *self._tls,
        ]
        output = self._directory / f"{self.name}.log"
        if host is not None:
            self.process = host.run(argv, env=os.environ, cwd=self._directory, output=output)
        else:
            with output.open("ab") as out:
                self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def signal(self, signum: signal.Signals, host: Host | None = None) -> None:
        """Send it a signal."""
        assert self.process is not None
        os.kill(self.process.pid if host is None else host.pid_of(self.process), signum)
        if signum is signal.SIGKILL:
            self.process.wait()

    def status(self) -> dict[str, Any]:
        """What it says of itself; {} if it does not answer. Only on this machine, without TLS."""
        with contextlib.suppress(OSError):
            request = urllib.request.Request(self.url + "/v3/maintenance/status", b"{}")
            with urllib.request.urlopen(request, timeout=2) as answer:
                said: dict[str, Any] = json.load(answer)
                return said
        return {}


class Members:
    """The members of one cluster."""

    def __init__(self, members: list[Etcd]) -> None:
        self.all = members
        self.initial = ",".join(f"{each.name}={each.peer_url}" for each in members)

    @property
    def endpoints(self) -> tuple[tuple[str, int], ...]:
        return tuple((each.address, each.port) for each in self.all)

    def leader(self) -> Etcd:
        """The one that leads now. Only on this machine."""
        until_s = time.monotonic() + PEERS_S
        while time.monotonic() < until_s:
            for each in self.all:
                said = each.status()
                if said.get("leader", "0") == said.get("header", {}).get("member_id"):
                    return each
            time.sleep(0.05)
        raise AssertionError("etcd has no leader")


@contextlib.contextmanager
def members(number: int, directory: Path, *, tls: Sequence[str] = ()) -> Iterator[Members]:
    """So many on ports of this machine; `tls`: options with certificates for clients."""
    program("etcd", package="etcd-server")
    ports = [free_port() for _ in range(2 * number)]
    made = Members(
        [Etcd(f"m{at}", "127.0.0.1", ports[2 * at], ports[2 * at + 1], directory, tls) for at in range(number)]
    )
    try:
        for each in made.all:
            each.start(made.initial)
        if not tls:
            made.leader()
        yield made
    finally:
        for each in made.all:
            if each.process is not None:
                each.process.kill()
                each.process.wait()


def on_hosts(hosts: Sequence[Host], directory: Path) -> Members:
    """One on each of these hosts; they end with the hosts."""
    program("etcd", package="etcd-server")
    made = Members([Etcd(host.name, host.address, PORT, PORT + 1, directory, ()) for host in hosts])
    for each, host in zip(made.all, hosts, strict=True):
        each.start(made.initial, host)
    return made


def decider(host: Host, members: Members, run_id: str = "job") -> str:
    """The name of the host whose agent decides, asked from a host."""
    code = """if True:
        import json, sys
        from gpulaunch.launcher.rendezvous.etcd_access import Access
        from gpulaunch.launcher.rendezvous.etcd_client import EtcdClient, decoded, encoded
        client = EtcdClient(Access(endpoints=tuple((each, 2379) for each in sys.argv[2:])))
        def value(key):
            kvs = client.call("kv/range", {"key": encoded(sys.argv[1] + key)}).get("kvs", [])
            return decoded(kvs[0]["value"]).decode() if kvs else ""
        node = value("decider")
        print(json.loads(value(f"reports/{node}") or '{"report": {"host": ""}}')["report"]["host"])
    """
    argv = [sys.executable, "-c", code, f"/gpulaunch/{run_id}/", *(each.address for each in members.all)]
    said = subprocess.run(
        ["ip", "netns", "exec", host.namespace, *argv], check=True, capture_output=True, text=True, timeout=30
    )
    return said.stdout.strip()


def etcd_leader(host: Host, members: Members) -> int:
    """The number of the member that leads, asked from a host."""
    code = """if True:
        import sys
        from gpulaunch.launcher.rendezvous.etcd_access import Access
        from gpulaunch.launcher.rendezvous.etcd_client import EtcdClient
        for number, address in enumerate(sys.argv[1:]):
            said = EtcdClient(Access(endpoints=((address, 2379),))).call("maintenance/status", {})
            if said.get("leader") == said["header"]["member_id"]:
                print(number)
    """
    argv = [sys.executable, "-c", code, *(each.address for each in members.all)]
    said = subprocess.run(
        ["ip", "netns", "exec", host.namespace, *argv], check=True, capture_output=True, text=True, timeout=30
    )
    return int(said.stdout)
