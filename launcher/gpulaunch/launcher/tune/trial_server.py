"""Tune's side of the trial server: starts it, waits until it has imported, and has it start trials."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.forkserver import Imports, start_server
from gpulaunch.launcher.loop.forkserver_main import receive, send

_LOOK_S: Final = 0.1
_END_S: Final = 1.0
_ANSWER_S: Final = 30.0
"""For a fork, on a machine that is busy."""


class TrialServer:
    """Starts trials whose imports are made: `import torch` alone takes longer than the steps that a trial measures.

    Args:
        imports: what the job's ranks import.
        env: its environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, imports: Imports, env: Mapping[str, str]) -> None:
        from gpulaunch.launcher.tune import trial_server_main

        linux.become_subreaper()  # trials are its children's children, and are to be ours
        server = start_server(trial_server_main.__file__, env, stdout_fd=2)
        self._sock, self._is_ready = server.sock, False
        self._group = server.pid
        """Its process group; other processes in it try what can be imported, and the last one becomes the server."""
        self._is_open = True
        with contextlib.suppress(OSError):  # it has died: `start` says so
            send(self._sock, {"agent_pid": os.getpid(), **asdict(imports)})

    def wait(self, longest_s: float, is_interrupted: Callable[[], bool]) -> None:
        """Wait until it has imported everything; if it cannot, it is closed.

        Args:
            longest_s: for this time at most.
            is_interrupted: asked all the time.
        """
        until_s = time.monotonic() + longest_s
        while self._is_open and not self._is_ready:
            if time.monotonic() > until_s or is_interrupted():
                self.close()
            elif select.select([self._sock], [], [], _LOOK_S)[0]:
                ready = self._receive()
                self._is_ready = ready is not None and not ready["problem"]
                if not self._is_ready:
                    self.close()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], *, directory: str, view: str, fds: tuple[int, int, int]
    ) -> int:
        """Start a trial, and return its pid, a child of this process; 0 if it cannot be, and then this is closed.

        Args:
            argv: the command of the agent.
            env: its environment.
            directory: what it is to have a throw-away view of.
            view: where what it writes goes; "": no view.
            fds: its stdin, stdout and stderr.
        """
        if not self._is_ready:
            return 0
        with contextlib.suppress(OSError):
            self._sock.settimeout(_ANSWER_S)
            send(self._sock, {"argv": list(argv), "env": dict(env), "directory": directory, "view": view}, list(fds))
            if (told := self._receive()) is not None and told["pid"]:
                return int(told["pid"])
        self.close()
        return 0

    def close(self) -> None:
        """Have it end, and wait for that."""
        if not self._is_open:
            return
        if self._is_ready:  # it has files to remove, and no end of the socket is left when it has ended
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
                select.select([self._sock], [], [], _END_S)
        self._sock.close()
        self._is_open = self._is_ready = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self._group, 0)

    def _receive(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            return receive(self._sock)
        return None
