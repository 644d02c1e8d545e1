"""Connects to the leader: resolves the name, connects, and retries until stopped. Nothing here blocks the loop."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.launcher.rendezvous.listen import Address, resolve

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_GROWTH = 1.6
_PROBE_TIMEOUT_S = 3.0


class Dialer:
    """Connects to `host:port` by every address of the name, with growing pauses between the rounds.

    A leader that starts later than its followers is normal, and so is a name that is not yet in the DNS.
    """

    def __init__(
        self, loop: Loop, host: str, port: int, *, try_s: float, on_connected: Callable[[socket.socket], None]
    ) -> None:
        self.trouble = "no answer yet"
        """Why it has failed so far, in a few words."""
        self.is_refused = False
        """Whether the last round was answered, by every address: nothing listens there."""
        self._loop = loop
        self._host = host
        self.port = port
        """May change between two rounds."""
        self._try_s = try_s
        self._on_connected = on_connected
        self._pause_s = _FIRST_PAUSE_S
        self._refusals: list[bool] = []
        """Of the addresses tried in this round."""
        self._addresses: list[Address] = []
        self._sock: socket.socket | None = None
        self._timer: Timer | None = None
        self._resolving: _Resolving | None = None

    def start(self) -> None:
        """Start a round now."""
        self.stop()
        self._refusals = []
        try:
            self._addresses = resolve(self._host, self.port, numeric=True)
        except OSError:
            self._resolving = _Resolving(self._loop, self._host, self.port, self._resolved)
        else:
            self._next_address()

    def again(self, trouble: str) -> None:
        """The connection was unusable: try again after a pause."""
        self.stop()
        self.trouble = trouble
        self._timer = self._loop.call_at(self._loop.now() + self._pause_s, self.start)
        self._pause_s = min(self._pause_s * _GROWTH, _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """The connection has proven usable: the next search begins without pauses."""
        self._pause_s = _FIRST_PAUSE_S
        self.trouble = "no answer"

    def stop(self) -> None:
        """Give up; idempotent."""
        self._drop()
        if self._timer is not None:
            self._timer.cancel()
        if self._resolving is not None:
            self._resolving.cancel()
            self._resolving = None

    def _resolved(self, addresses: list[Address] | OSError) -> None:
        self._resolving = None
        if isinstance(addresses, OSError):
            self.again(f"name not resolved: {addresses.strerror}")
        else:
            self._addresses = addresses
            self._next_address()

    def _next_address(self) -> None:
        if not self._addresses:
            self.is_refused = bool(self._refusals) and all(self._refusals)
            self.again(self.trouble)
            return
        family, address = self._addresses.pop(0)
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as err:  # e.g. no IPv6 in this kernel
            self._failed(err.strerror or str(err))
            return
        self._sock = sock
        failed = sock.connect_ex(address)
        if failed not in (0, errno.EINPROGRESS):
            self._failed(os.strerror(failed))
            return
        self._loop.watch_write(sock.fileno(), self._answered)
        self._timer = self._loop.call_at(self._loop.now() + self._try_s, lambda: self._failed("no answer"))

    def _answered(self) -> None:
        sock = self._sock
        assert sock is not None, "watched while connecting"
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            self._failed(os.strerror(failed))
        elif is_itself(sock):
            self._failed(os.strerror(errno.ECONNREFUSED))
        else:
            self._forget()
            self.is_refused = False
            self._on_connected(sock)

    def _failed(self, trouble: str) -> None:
        self.trouble = trouble
        self._refusals.append(trouble == os.strerror(errno.ECONNREFUSED))
        self._drop()
        self._next_address()

    def _drop(self) -> None:
        sock = self._sock
        self._forget()
        if sock is not None:
            sock.close()

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sock is not None:
            self._loop.unwatch_write(self._sock.fileno())
            self._sock = None


def is_itself(sock: socket.socket) -> bool:
    """Whether the kernel has connected the socket to itself.

    It does so if there is no listener on a local port and the connection's own port is chosen to be that very one; such
    a connection would also keep the leader from binding its port.
    """
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # reset meanwhile: not connected to itself
        return False


class Probe:
    """One attempt to connect, only to learn whether the host answers that nothing listens there."""

    def __init__(self, loop: Loop, address: str, port: int, *, on_refused: Callable[[], None]) -> None:
        self._loop = loop
        self._on_refused = on_refused
        try:
            ((family, where), *_) = resolve(address, port, numeric=True)
        except (OSError, ValueError):  # no address is known
            return
        self._sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._timer = loop.call_at(loop.now() + _PROBE_TIMEOUT_S, self._end)
        loop.watch_write(self._sock.fileno(), self._answered)
        self._sock.connect_ex(where)

    def _answered(self) -> None:
        is_refused = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
        self._end()
        if is_refused:
            self._on_refused()

    def _end(self) -> None:
        self._timer.cancel()
        self._loop.unwatch_write(self._sock.fileno())
        self._sock.close()


class _Resolving:
    """One look-up in a thread of its own, because the C library's only blocks.

    The thread owns the write end of a pipe and closes it when the answer is there; that wakes the loop.
    """

    def __init__(
        self, loop: Loop, host: str, port: int, on_resolved: Callable[[list[Address] | OSError], None]
    ) -> None:
        import threading  # only for names

        self._loop = loop
        self._on_resolved = on_resolved
        self._answer: list[Address] | OSError = OSError(errno.EIO, "no answer")
        self._fd, write_fd = os.pipe()
        loop.watch_read(self._fd, self._done)
        thread = threading.Thread(target=self._look_up, args=(host, port, write_fd), daemon=True, name="resolve")
        thread.start()

    def _look_up(self, host: str, port: int, write_fd: int) -> None:
        try:
            self._answer = resolve(host, port)
        except OSError as err:
            self._answer = err
        finally:
            os.close(write_fd)

    def _done(self) -> None:
        self.cancel()
        self._on_resolved(self._answer)

    def cancel(self) -> None:
        """Do not answer."""
        if self._fd >= 0:
            self._loop.unwatch_read(self._fd)
            os.close(self._fd)
            self._fd = -1
