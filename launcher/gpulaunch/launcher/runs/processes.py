"""The processes of a run: read from its run directory, and checked before anything is done to them.

A pid in a file may be stale, and the number may now belong to another process. So a process is opened as a pidfd first
and then checked for the run's mark in its environment; from then on the pidfd means this process and no other. The
agent does not have the mark (it gives it to others): it is identified by the run directory that it holds open.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpulaunch.exporters.store.bounded import sound
from gpulaunch.launcher.loop import linux
from gpulaunch.profiler.files import regular

AGENT, STORE, FORK_SERVER, SIDECAR = "agent", "store", "fork server", "sidecar"
_LARGEST_BYTES = 32 << 20
_PID_FIELDS = {AGENT: "agent_pid", STORE: "store_pid", FORK_SERVER: "fork_server_pid", SIDECAR: "sidecar_pid"}


class RunError(Exception):
    """The request for a run is impossible; one line for the user."""


@dataclass(frozen=True, kw_only=True)
class RunProcesses:
    """The processes of one attempt on this node, as recorded by the agent."""

    run_dir: str
    run_id: str
    attempt: int
    ranks: Mapping[int, int]
    """Pid by global rank, of the ranks of this node."""
    helpers: Mapping[str, int]
    """Pid by name, of those that run."""
    checkpoint_dirs: tuple[str, ...]
    channel_dir: str = ""
    """The directory of its ranks' segments; "" if the agent does not give it."""


class Process:
    """One process of a run, held by a pidfd: a signal cannot reach another one that got its number."""

    def __init__(self, pid: int, group: RunProcesses, *, is_agent: bool = False) -> None:
        """Raises RunError if there is no such process, or it does not belong to this run."""
        self.pid = pid
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError as err:
            raise RunError(f"process {pid} no longer exists: {err.strerror}") from None
        mine = _holds(pid, group.run_dir) if is_agent else linux.is_of_run(pid, group.run_id)
        if not mine or linux.state_of(pid) in ("Z", "X", ""):
            os.close(self.pidfd)
            raise RunError(f"process {pid} does not belong to this run, or has ended: no action was taken")

    def send(self, signum: int) -> None:
        """Send a signal. Raises RunError if it has ended or may not be signalled."""
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except OSError as err:
            raise RunError(f"cannot signal process {self.pid}: {err.strerror}") from None

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.pidfd)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def agent_of(run_dir: str) -> int | None:
    """The pid of the agent that runs in this directory, or None.

    Its lock is not tried: holding it, even for a moment, would keep an agent that starts just then from starting.
    """
    for name, field in (("group.json", "agent_pid"), ("job.json", "gpulaunch_pid")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            pid = _pid(_load(os.path.join(run_dir, name))[field])
            if _holds(pid, run_dir):
                return pid
    return None


def read_group(run_dir: str) -> RunProcesses | None:
    """The processes that run now; None if no attempt has been started.

    Raises:
        RunError: the file exists but this version does not understand it.
    """
    path = os.path.join(run_dir, "group.json")
    try:
        content = _load(path)
        pids = {name: content.get(field) for name, field in _PID_FIELDS.items()}
        return RunProcesses(
            run_dir=os.path.abspath(run_dir),
            run_id=str(content["run_id"]),
            attempt=int(content["attempt"]),
            ranks={int(each["rank"]): _pid(each["pid"]) for each in content["ranks"]},
            helpers={name: _pid(pid) for name, pid in pids.items() if pid},
            checkpoint_dirs=tuple(map(str, content.get("checkpoint_dirs", ()))),
            channel_dir=str(content.get("channel_dir") or ""),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise RunError(f"cannot read {path}: {type(err).__name__}: {err}") from None


def take_rank(group: RunProcesses, rank: int) -> Process:
    """Open one rank of this node."""
    if rank not in group.ranks:
        known = ", ".join(map(str, sorted(group.ranks)))
        raise RunError(f"rank {rank} is not on this node; its ranks are {known or 'not started'}")
    return Process(group.ranks[rank], group)


def take_helper(group: RunProcesses, name: str) -> Process:
    """Open the agent, or one of the processes alongside the ranks."""
    if name not in group.helpers:
        raise RunError(f"this run has no {name}")
    return Process(group.helpers[name], group, is_agent=name == AGENT)


def loaders_of(group: RunProcesses, rank: int) -> list[int]:
    """The pids of the DataLoader workers of one rank."""
    with take_rank(group, rank) as process:
        return [pid for pid in linux.descendants_of(process.pid) if linux.comm_of(pid) == linux.LOADER_WORKER]


def _holds(pid: int, directory: str) -> bool:
    """Whether a process has this directory open, as an agent has its run directory, which it keeps locked."""
    with contextlib.suppress(OSError):
        wanted = os.stat(directory)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    return False


def _pid(value: Any) -> int:
    """Check that a value is a process's number, not a group's or 0."""
    pid = int(value)
    if not 0 < pid < 1 << 31:
        raise ValueError(f"{str(pid)[:20]} is not a pid")
    return pid


def _load(path: str) -> dict[str, Any]:
    with open(path, "rb", opener=regular) as file:
        try:
            content: dict[str, Any] = sound(json.loads(file.read(_LARGEST_BYTES)))
        except RecursionError:
            raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError("not an object")
    return content
