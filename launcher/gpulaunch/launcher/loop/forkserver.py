"""The agent's side of the fork server: starts it, reads what it preloaded, has it fork an attempt's ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpulaunch.launcher.loop import child
from gpulaunch.launcher.loop.forkserver_main import INHERITED, receive, send
from gpulaunch.launcher.loop.loop import Loop

# Forked ranks write their own command line over the fork server's, so that must be long enough (linux.set_cmdline).
_CMDLINE_BYTES = 2048


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """A fork server that was started before the agent, and has imported what it needs: see `launcher.tune`."""

    sock: socket.socket
    pid: int


def take_inherited(environ: MutableMapping[str, str]) -> Inherited | None:
    """Return the fork server that this process has inherited, and remove it from the environment."""
    with contextlib.suppress(ValueError, OSError):
        fd, pid = map(int, environ.pop(INHERITED, "").split(","))
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return Inherited(sock=sock, pid=pid)
    return None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What the fork server reported after preloading."""

    pid: int
    torch: bool
    problem: str
    """Why ranks should not be forked from it, or "". """
    loaded: tuple[str, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The processes of an attempt, in the order requested; `error` says why some are missing."""

    pids: tuple[int, ...]
    store_pid: int | None
    error: str


@dataclass(frozen=True, kw_only=True)
class ForkedRank:
    """One rank to fork: its variables, CPUs (empty: all), command line to show, program and stdio descriptors."""

    env: Mapping[str, str]
    affinity: Sequence[int]
    title: Sequence[str]
    program: Mapping[str, Any]
    stdout_fd: int
    stderr_fd: int
    restart_notice_fd: int
    """A pipe for one line of JSON: that the rank restarts as a plain interpreter, and why (restart_plain.py)."""


@dataclass(frozen=True, kw_only=True)
class Imports:
    """What a fork server imports."""

    torch: bool
    """If not, a store imports it when somebody connects."""
    dynamo: bool
    """What DistributedDataParallel imports, too."""
    packages: list[str]
    """Third-party packages to try."""
    refused: dict[str, str]
    """Of those, the ones that an earlier run found unsafe, and why."""
    environment: dict[str, str]
    """What the program sets before it imports torch; in force during the imports only."""
    before_torch: list[str]
    """Of the packages, those that the program imports before torch."""
    of_a_rank: list[str]
    """Variables that every rank has, but that are missing or different in the fork server's environment."""


def start_server(file: str, env: Mapping[str, str], *, stdout_fd: int) -> Inherited:
    """Start a server of a file like `forkserver_main`. Raises OSError if the interpreter cannot be executed."""
    ours, theirs = socket.socketpair()
    try:
        argv = [sys.executable, "-u", file, str(theirs.fileno()).ljust(_CMDLINE_BYTES)]
        return Inherited(sock=ours, pid=child.start(argv, env, stdout_fd=stdout_fd, pass_fds=[theirs.fileno()]))
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


@dataclass
class ForkServer:
    """One fork server process. Callbacks: `on_ready` once, `on_started` per request, `on_lost` when it has exited."""

    loop: Loop
    on_ready: Callable[[Ready], None]
    on_started: Callable[[Started], None]
    on_lost: Callable[[], None]
    pid: int = -1
    ready: Ready | None = None
    _sock: socket.socket | None = field(default=None, repr=False)

    def start(self, env: Mapping[str, str], imports: Imports, inherited: Inherited | None = None) -> None:
        """Start it; it begins to import at once. Raises OSError if the interpreter cannot be executed.

        Args:
            env: its environment, from which the ranks' environments are made.
            imports: what to import.
            inherited: one that has done so already; if it has imported something else, it ends: `on_lost`.
        """
        setup = {"agent_pid": os.getpid(), **asdict(imports)}
        if inherited is not None:
            setup["env"] = dict(env)
        else:
            from gpulaunch.launcher.loop import forkserver_main

            # Its output is what imports print; to stderr, so that the ranks' stdout stays theirs.
            inherited = start_server(forkserver_main.__file__, env, stdout_fd=2)
        self.pid, self._sock = inherited.pid, inherited.sock
        # Not in its arguments, which every user can read: the environment may hold secrets.
        try:
            send(self._sock, setup)
        except OSError:
            # It has already died, or cannot be reached: the loop reads the end of the stream, and `on_lost` is called.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self.loop.watch_read(self._sock.fileno(), self._hear)

    def fork(self, ranks: Sequence[ForkedRank], *, store: tuple[str, int, int] | None, tracer_pid: int = 0) -> None:
        """Request an attempt: its store (host, port, listening descriptor), then its ranks. `on_started` answers.

        `tracer_pid`: as in `child.start`, for the ranks.
        """
        if self._sock is None:
            self.on_lost()
            return
        fds = [] if store is None else [store[2]]
        for rank in ranks:
            fds += [rank.stdout_fd, rank.stderr_fd, rank.restart_notice_fd]
        request = {
            "op": "start",
            "agent_pid": os.getpid(),
            "tracer_pid": tracer_pid,
            "num_fds": len(fds),
            "store": None if store is None else {"host": store[0], "port": store[1]},
            "ranks": [
                {
                    "env": dict(rank.env),
                    "affinity": list(rank.affinity),
                    "title": list(rank.title),
                    "program": dict(rank.program),
                }
                for rank in ranks
            ],
        }
        try:
            send(self._sock, request, fds)
        except OSError:
            self._lose()

    def close(self) -> None:
        """Release it; it exits when its socket closes."""
        if self._sock is not None:
            self.loop.unwatch_read(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _hear(self) -> None:
        assert self._sock is not None, "a closed fork server is not watched"
        try:
            message = receive(self._sock)
        except OSError:
            message = None
        if message is None:
            self._lose()
        elif message["op"] == "ready":
            self.pid = message["pid"]
            self.ready = Ready(
                pid=message["pid"],
                torch=message["torch"],
                problem=message["problem"],
                loaded=tuple(message["loaded"]),
                refused=message["refused"],
            )
            self.on_ready(self.ready)
        else:
            self.on_started(
                Started(
                    pids=tuple(message.get("pids", ())), store_pid=message.get("store"), error=message.get("error", "")
                )
            )

    def _lose(self) -> None:
        # The end of the stream, not the exit of a process, means that it is lost: after a trial import another process
        # serves the same stream (forkserver_main), and the exit of the first one means nothing.
        self.close()
        self.on_lost()
