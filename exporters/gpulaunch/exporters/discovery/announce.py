"""Writes the target file of a run into a directory that Prometheus watches, and removes it again.

The write is atomic: the temporary file has a name that file_sd does not match. The directory is the user's and is not
created (a typo would create one that is not watched). The file is world-readable, because Prometheus runs as another
user; it has nothing that /metrics does not have.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from gpulaunch.exporters.discovery.targets import (
    PREFIX,
    Target,
    address_of,
    document,
    file_name,
    is_left_over,
)
from gpulaunch.profiler.files import write_file
from gpulaunch.profiler.kernel import kernel as kernel_here
from gpulaunch.profiler.record import AttemptGroup, NodeState

_CAP_BYTES = 1 << 16


def complaint_about(directory: Path) -> str | None:
    """Return what is wrong with a directory to announce in, as one line, or None. Called before a job starts."""
    if not directory.is_dir():
        return f"there is no directory {directory}; make it, and name it in file_sd_configs of prometheus.yml"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"cannot write to {directory}; Prometheus reads it, and you must be able to write there"
    return None


class Announcement:
    """The target file of one node of a run, present from `tell` until `close`.

    A full disk or a missing directory is no reason to stop: `fault` reports it, and the next `tell` retries. A hanging
    directory blocks the caller: see `target_file`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        bound: tuple[str, int],
        scheme: str = "http",
        run: str = "",
        pid: int,
        node: str | None = None,
        kernel: str | None = None,
        alive: Callable[[int], bool] | None = None,
    ) -> None:
        """Prepare it.

        Args:
            directory: watched by Prometheus.
            bound: host and port that the endpoint is bound to.
            scheme: http, or https.
            run: id shared by all nodes of the run; "" for the run's own token.
            pid: of the agent.
            node: the host's name; default: from the kernel.
            kernel: the boot and pid namespace; default: from /proc.
            alive: returns whether a process of this host is alive.
        """
        self.directory = directory
        self._bound = bound
        self._scheme = scheme
        self._run = run
        self._pid = pid
        self._node = node if node is not None else socket.gethostname()
        self._kernel = kernel if kernel is not None else kernel_here()
        self._alive = alive if alive is not None else _lives
        self._told: Target | None = None
        self.fault = ""
        """Why the file is missing, as one line; "" if it exists, or is not due."""

    def tell(self, state: NodeState) -> None:
        """Announce the run of this state, if it has begun and its target is new or has changed."""
        if (group := state.group) is None:
            return
        target = self._target(group)
        if target == self._told:
            return
        if self._told is None:
            self._sweep()
        try:
            # World-readable whatever the umask: Prometheus runs as another user.
            write_file(self.directory / file_name(target), [document(target)], mode=0o644)
        except OSError as error:
            self.fault = f"cannot announce this run in {self.directory}: {error.strerror}"
        else:
            self._told, self.fault = target, ""

    def close(self, newest: NodeState | None = None) -> None:
        """Remove the file: the job has ended. If `newest` was never announced, remove an earlier sidecar's file."""
        last = self._target(newest.group) if newest is not None and newest.group is not None else self._told
        if last is not None:
            with contextlib.suppress(OSError):  # gone already, or the directory is: it is not discovered any more
                (self.directory / file_name(last)).unlink()
            self._told = None

    def _target(self, group: AttemptGroup) -> Target:
        host, port = self._bound
        return Target(
            address=address_of(host, port, self._node),
            run=self._run or group.run_id,
            node=self._node,
            name=group.name,
            token=group.run_id,
            pid=self._pid,
            kernel=self._kernel,
            scheme=self._scheme,
        )

    def _sweep(self) -> None:
        """Remove files of runs whose agent was killed, as far as visible from here: nothing else does."""
        for path in sorted(self.directory.glob(f"{PREFIX}*.json")):
            with contextlib.suppress(OSError):
                if path.is_symlink() or not path.is_file():
                    continue
                with path.open("rb") as file:
                    content = file.read(_CAP_BYTES)
                if is_left_over(content, kernel=self._kernel, alive=self._alive):
                    path.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process: it is alive
        return True
    return True
