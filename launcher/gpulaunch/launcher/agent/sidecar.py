"""The agent's side of the sidecar: its process, and its restarts. Its death never affects training."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from gpulaunch.launcher.loop import child
from gpulaunch.launcher.loop.loop import Exit, Loop, Timer

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 60.0
_NICE = 10
# `-P`: the user's directory must not shadow what the sidecar imports.
ENTRY = "import sys; from gpulaunch.launcher.cli.sidecar import run; sys.exit(run(sys.argv[1:]))"
"""The program of the sidecar's process."""


class SidecarProcess:
    """Keeps one sidecar running over the segments in `channel_dir`."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        channel_dir: str,
        env: Mapping[str, str],
        say: Callable[[str], None],
        *,
        sinks: Sequence[str] = (),
        end_s: float = 0.0,
    ) -> None:
        """`sinks`: additional sidecar arguments; `end_s`: how much longer it may take to exit because of them."""
        self._outlets = sinks
        self.end_s = end_s
        self._loop = loop
        self._sock = sock
        self._channel_dir = channel_dir
        self._env = env
        self._say = say
        self._pause_s = _FIRST_PAUSE_S
        self._timer: Timer | None = None
        self._closing = False
        self._is_last = False
        self.pid: int | None = None
        self.on_pid: Callable[[], None] = _nothing
        """Called when `pid` has changed."""
        self.num_deaths = 0
        self.max_rss_bytes = 0

    def start(self) -> None:
        """Start it. If that fails, the failure is reported and the job continues without metrics."""
        argv = [sys.executable, "-P", "-c", ENTRY, "--channel-dir", self._channel_dir]
        argv += ["--listen-fd", str(self._sock.fileno()), "--parent-pid", str(os.getpid())]
        argv += self._outlets
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # Asked to end while it is still loading, it first does its final work.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        try:
            self.pid = child.start(
                argv, self._env, stdin_fd=null, stdout_fd=null, pass_fds=[self._sock.fileno()], nice=_NICE
            )
        except OSError as err:
            self._say(f"no metrics: cannot start the sidecar: {err.strerror}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(null)
        self._loop.watch_pid(self.pid, self._ended)
        self.on_pid()

    def _ended(self, exit_: Exit) -> None:
        self.max_rss_bytes = max(self.max_rss_bytes, exit_.max_rss_bytes)
        self.pid = None
        if self._closing:
            self._finish(died=exit_.signal is not None)
            return
        self.num_deaths += 1
        if self.num_deaths == 1:
            how = f"signal {exit_.signal}" if exit_.signal is not None else f"code {exit_.code}"
            self._say(f"the metrics sidecar ended ({how}); training continues, and the sidecar is restarted")
        self._timer = self._loop.call_at(self._loop.now() + self._pause_s, self.start)
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Ask it to end; `pid` becomes None when it has. If it dies first, or has just died, its successor removes the
        announcement, and writes and pushes the last values."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._finish(died=self._timer is not None)

    def _finish(self, *, died: bool) -> None:
        """`died`: one has, and if it was not a successor itself, the final work is still to be done."""
        if self.pid is None and died and not self._is_last:
            self._is_last = True
            with contextlib.suppress(OSError):  # e.g. out of descriptors: the shutdown must not wait
                self.start()
        if self.pid is None:
            self._sock.close()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def _nothing() -> None:
    """The default callback."""
