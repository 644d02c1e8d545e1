"""Hosts made of network, UTS and PID namespaces, on a switch that is a bridge in a namespace of its own.

Needs root. A host has a name and an address of its own and shares the file system. Nothing outside the namespaces is
changed but /etc/netns, where `ip netns exec` looks for each host's /etc/hosts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from needed import program

_NUMBERS = iter(range(1_000_000))


class Host:
    """One host; `run` starts programs on it."""

    def __init__(self, network: Network, number: int) -> None:
        self.name = f"host{number}"
        self.address = f"10.77.0.{10 + number}"
        self.namespace = f"{network.prefix}-{number}"
        self._port = f"port{number}"
        self._network = network
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, argv: list[str], *, env: Mapping[str, str], cwd: Path, output: Path) -> subprocess.Popen[bytes]:
        """Start a program; its process here is the host's init, which ends with it."""
        init = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        # Its shared memory goes with it: `ip netns exec` has given it mounts of its own.
        shell = ["sh", "-c", f'hostname {self.name}; mount -t tmpfs tmpfs /dev/shm; "$@"; exit $?', "sh"]
        with output.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *init, *shell, *argv],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def pid_of(self, process: subprocess.Popen[bytes]) -> int:
        """The program itself, below `ip`, `unshare` and the host's init."""
        unshare = process.pid  # `ip` has become `unshare`
        (init,) = _children(unshare)
        return _children(init)[0]

    def kill(self, pid: int, signum: signal.Signals) -> None:
        """Send a signal to a process of this host, by its pid outside."""
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{self._running[-1].pid}/ns/net")
        os.kill(pid, signum)

    def power_off(self) -> None:
        """Everything on the host dies at once, without a message: the cable goes first."""
        self.cut()
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def cut(self) -> None:
        """Pull its cable."""
        self._network.ip("-n", self._network.switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        """Plug its cable in."""
        self._network.ip("-n", self._network.switch, "link", "set", self._port, "up")

    def lose(self, part: float) -> None:
        """Drop this part of the packets that arrive at it."""
        rule = ["INPUT", "-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", str(part), "-j", "DROP"]
        self._network.ip("netns", "exec", self.namespace, "iptables", "-A", *rule)

    def black_hole(self, chain: str) -> None:
        """Drop all that arrives (INPUT) or leaves (OUTPUT)."""
        way = "-i" if chain == "INPUT" else "-o"
        self._network.ip("netns", "exec", self.namespace, "iptables", "-A", chain, way, "eth0", "-j", "DROP")

    def clear_rules(self) -> None:
        """Drop nothing any more."""
        self._network.ip("netns", "exec", self.namespace, "iptables", "-F")

    def _make(self) -> None:
        ip, switch = self._network.ip, self._network.switch
        ip("netns", "add", self.namespace)
        ip("link", "add", self._port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("-n", switch, "link", "set", self._port, "master", "br0", "up")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")

    def _name(self, hosts: Mapping[str, str], own: str) -> None:
        """Write its /etc/hosts; `own`: what its own name means, 127.0.1.1 on Debian."""
        lines = ["127.0.0.1 localhost", f"{own} {self.name}"]
        lines += [f"{address} {name}" for name, address in hosts.items() if name != self.name]
        directory = Path("/etc/netns") / self.namespace
        directory.mkdir(parents=True)
        (directory / "hosts").write_text("\n".join(lines) + "\n")


class Network:
    """The hosts and the switch between them."""

    def __init__(self, number_of_hosts: int, *, debian_names: bool = False) -> None:
        """`debian_names`: each host's own name means 127.0.1.1, as Debian's installer writes it."""
        self.prefix = f"gl{os.getpid()}-{next(_NUMBERS)}"
        self.switch = f"{self.prefix}-switch"
        self.hosts = [Host(self, number) for number in range(number_of_hosts)]
        self._debian_names = debian_names

    def __enter__(self) -> Network:
        try:
            self.ip("netns", "add", self.switch)
            self.ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            self.ip("-n", self.switch, "link", "set", "br0", "up")
            names = {host.name: host.address for host in self.hosts}
            for host in self.hosts:
                host._make()
                host._name(names, "127.0.1.1" if self._debian_names else host.address)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            for process in host._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for namespace in (*(host.namespace for host in self.hosts), self.switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
        with contextlib.suppress(OSError):  # another test has hosts
            Path("/etc/netns").rmdir()

    def ip(self, *words: str) -> None:
        """Run `ip` with these words."""
        subprocess.run([program("ip", package="iproute2"), *words], check=True, capture_output=True, timeout=30)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def hosts(number: int, *, debian_names: bool = False) -> Iterator[list[Host]]:
    """So many hosts on one switch."""
    with Network(number, debian_names=debian_names) as network:
        yield network.hosts
