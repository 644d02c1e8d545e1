"""Puts the file of a run into a directory that Prometheus watches, and takes it away again.

Whole or not at all: its draft has a name that file_sd does not look for. The directory is the user's: it is not made
(a typing mistake would make one that nobody watches), and readable by others the file must be, because Prometheus is
another user. There is nothing in it that /metrics does not say.
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
    """Say what is wrong with a directory to announce in, as one line; None: nothing. For before a job is started."""
    if not directory.is_dir():
        return f"there is no directory {directory}; make it, and name it in file_sd_configs of prometheus.yml"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"cannot write to {directory}; Prometheus reads it, and you must be able to write there"
    return None


class Announcement:
    """One node of a run in a directory: there from `tell` until `close`.

    A disk that is full or a directory that goes away is no reason to stop: `fault` says so, the next `tell` tries
    again. A directory that hangs holds up its caller: see `target_file`.
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
            bound: host and port that the page is bound to.
            scheme: http, or https.
            run: what all nodes of the run have in common; "" for the run's own token.
            pid: of the agent.
            node: the host's name, if it is not what the kernel says.
            kernel: which boot and pid namespace this is, if it is not what /proc says.
            alive: whether a process of this host lives.
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
        """Why the file is not there, as one line; "" if it is, or is not due."""

    def tell(self, state: NodeState) -> None:
        """Announce the run of this state, if it has begun and is not announced as it is."""
        if (group := state.group) is None:
            return
        target = self._target(group)
        if target == self._told:
            return
        if self._told is None:
            self._sweep()
        try:
            # Readable by others whatever the umask: Prometheus is another user.
            write_file(self.directory / file_name(target), [document(target)], mode=0o644)
        except OSError as error:
            self.fault = f"cannot announce this run in {self.directory}: {error.strerror}"
        else:
            self._told, self.fault = target, ""

    def close(self, newest: NodeState | None = None) -> None:
        """Take the file away: the job has ended. Of a state that was not told it is the file of a sidecar before."""
        last = self._target(newest.group) if newest is not None and newest.group is not None else self._told
        if last is not None:
            with contextlib.suppress(OSError):  # gone already, or the directory is: nobody is told of it any more
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
        """Remove files of runs whose agent was killed, as far as that can be seen from here: nobody else would."""
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
    except (OSError, OverflowError):  # another user's: it lives
        return True
    return True
