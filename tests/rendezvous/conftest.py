"""A loop to turn by hand, and nodes whose agent only writes down what it is called with."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.policy.restart import Decision, Limits
from gpulaunch.launcher.rendezvous.base import Rendezvous, World
from gpulaunch.launcher.rendezvous.group import GroupRendezvous
from gpulaunch.launcher.rendezvous.plan import Settings

sys.path.insert(0, str(Path(__file__).parent))  # for what lies beside this, as `simulation`

LIMIT_S = 60.0
LIMITS = Limits(max_restarts=3, rate=None, backoff_max_s=30.0, no_progress=None)


class Turning:
    """A real loop, turned until something has happened."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._sockets: list[socket.socket] = []

    def until(self, happened: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert time.monotonic() < deadline, "did not happen"
            self.loop.turn(0.02)

    def for_s(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.loop.turn(0.02)

    def client(self, port: int, host: str = "127.0.0.1") -> socket.socket:
        """A stranger's connection."""
        sock = socket.create_connection((host, port), timeout=LIMIT_S)
        self._sockets.append(sock)
        return sock

    def adopt(self, sock: socket.socket) -> None:
        """Close it in the end."""
        self._sockets.append(sock)

    def ended_by_peer(self, sock: socket.socket) -> bool:
        """Whether the other side has closed; what it said before is thrown away."""
        sock.setblocking(False)
        try:
            while sock.recv(65536):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return True

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()
        self.loop.close()


class Recorder:
    """An agent that only writes down what it hears."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.worlds: list[World] = []
        self.failed: list[str] = []
        self.peer_failed: list[tuple[bool, str]] = []
        self.peer_preempted: list[str] = []
        self.done = 0
        self.notes: list[str] = []
        rendezvous.on_joined = self.worlds.append
        rendezvous.on_failed = self.failed.append
        rendezvous.on_peer_failed = lambda final, why: self.peer_failed.append((final, why))
        rendezvous.on_node_lost = lambda why: self.peer_failed.append((True, why))
        rendezvous.on_peer_preempted = lambda why: self.peer_preempted.append(why)
        rendezvous.on_peers_done = self._count_done
        self.judged: list[tuple[Decision, str]] = []
        self.over: list[tuple[int | None, str]] = []
        rendezvous.on_over = lambda decision, why: self.over.append((decision.code, why))
        rendezvous.on_judged = lambda decision, why: self.judged.append((decision, why))
        if isinstance(rendezvous, GroupRendezvous):
            rendezvous.on_note = self.notes.append

    def _count_done(self) -> None:
        self.done += 1

    @property
    def attempts(self) -> list[int]:
        return [world.attempt for world in self.worlds]

    def join(self, attempt: int = 0) -> None:
        self.rendezvous.join(attempt)

    def fail(self, text: str = "rank 5 failed", **more: Any) -> None:
        """Its ranks have failed, and have ended."""
        cause = Cause(text=text, tier=Tier.OWN, **more)
        self.rendezvous.failed(cause)
        self.rendezvous.judge(cause)

    def follow(self) -> None:
        """Its ranks have ended, because another node's failed."""
        self.rendezvous.judge(Cause(text="", tier=Tier.NONE))


@pytest.fixture
def turning() -> Iterator[Turning]:
    turning = Turning()
    yield turning
    turning.close()


@pytest.fixture
def record() -> Iterator[Callable[[Rendezvous], Recorder]]:
    recorders: list[Recorder] = []

    def make(rendezvous: Rendezvous) -> Recorder:
        recorders.append(Recorder(rendezvous))
        return recorders[-1]

    yield make
    for recorder in recorders:
        recorder.rendezvous.close()


@pytest.fixture
def node(turning: Turning, record: Callable[[Rendezvous], Recorder]) -> Callable[..., Recorder]:
    """One node of a fixed group on loopback, named host-R; node 0 chooses its port."""

    def make(
        rank: int,
        *,
        port: int = 0,
        nnodes: int = 2,
        nproc: int = 2,
        addr: str = "127.0.0.1",
        limits: Limits = LIMITS,
        timeout_s: float = 900.0,
        token: bytes | None = None,
        host: str = "",
        **settings: Any,
    ) -> Recorder:
        of_group = Settings.of_fixed(nnodes, limits, join_timeout_s=timeout_s)
        return record(
            GroupRendezvous(
                turning.loop,
                run_id="test",
                settings=replace(of_group, **settings),
                order=rank,
                nproc=nproc,
                addr=addr,
                port=port,
                token=token,
                host=host or f"host-{rank}",
            )
        )

    return make


@pytest.fixture
def nodes(node: Callable[..., Recorder]) -> Callable[..., list[Recorder]]:
    """All nodes of a fixed group; the leader first, so that the port is known."""

    def make(*nprocs: int, **options: Any) -> list[Recorder]:
        leader = node(0, nnodes=len(nprocs), nproc=nprocs[0], **options)
        assert isinstance(leader.rendezvous, GroupRendezvous)
        port = leader.rendezvous.port
        others = [
            node(rank, port=port, nnodes=len(nprocs), nproc=nproc, **options)
            for rank, nproc in enumerate(nprocs)
            if rank > 0
        ]
        return [leader, *others]

    return make


@pytest.fixture
def gathered(turning: Turning, nodes: Callable[..., list[Recorder]]) -> Callable[..., list[Recorder]]:
    """All nodes of a job, in attempt 0."""

    def make(*nprocs: int, **options: Any) -> list[Recorder]:
        made = nodes(*nprocs, **options)
        for each in made:
            each.join()
        turning.until(lambda: all(each.worlds for each in made))
        return made

    return make
