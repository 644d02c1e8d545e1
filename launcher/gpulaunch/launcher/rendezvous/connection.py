"""A connection between two agents of one job: messages over TCP, bounded in length, in number and in time.

Any process may connect: the connection ends at the first line that is not a valid message.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.messages import MAX_LINE_BYTES, Message, MessageError, VersionError, decode, encode

_MAX_UNSENT_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The heartbeat intervals of a connection."""

    beat_s: float = 2.0
    lost_s: float = 10.0
    """Silence after which a node counts as lost. Not lower than 6 s outside tests: TCP survives a link that flaps for
    5 s, and a training job should too (measured)."""
    note_s: float = 10.0
    """How long the user gets no message while nodes are missing; then once in six times that."""


class Connection:
    """One connection, lines in and lines out, never blocking.

    `on_end` is called once, with the reason, when the other side closed the connection or sent an invalid message; not
    after `close`, and never from within `send`: a broken connection shows when reading, after all data sent before.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._received = b""
        self._unsent = b""
        self._open = True
        self.heard_s = loop.now()
        """When data last arrived, but see `excuse`."""
        self.version_error: str | None = None
        """Set if the other side is another version of gpulaunch."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # already reset: reading will show it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # In addition to the heartbeats: the kernel ends a connection whose peer does not respond.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        loop.watch_read(sock.fileno(), self._read)

    def excuse(self, late_s: float) -> None:
        """Do not count as the peer's silence `late_s` seconds in which this process itself was suspended (SIGSTOP, a
        paused virtual machine): its messages may lie in the buffer, or it was suspended as well."""
        self.heard_s += late_s

    def send(self, message: Message) -> None:
        """Send now or as soon as the other side reads."""
        if self._open and len(self._unsent) < _MAX_UNSENT_BYTES:  # a peer that does not read soon counts as lost
            self._unsent += encode(message)
            self._flush()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self._unsent)  # broken: reading will show it
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.watch_write(self._sock.fileno(), self._flush)
        else:
            self._loop.unwatch_write(self._sock.fileno())

    def _read(self) -> None:
        try:
            chunk = self._sock.recv(64 * 1024)
        except BlockingIOError:
            return
        except OSError as err:
            self._end(err.strerror or str(err))
            return
        if not chunk:
            self._end("connection closed")
            return
        self.heard_s = self._loop.now()
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            if not self._take(line):
                return
        # A stranger is detected by the first byte, not by a line that never ends.
        if len(self._received) > MAX_LINE_BYTES or self._received[:1] not in (b"", b"{"):
            self._end("not gpulaunch")

    def _take(self, line: bytes) -> bool:
        """Handle one line; False when the connection is over."""
        try:
            message = decode(line) if len(line) <= MAX_LINE_BYTES else None
        except VersionError as err:
            self.version_error = str(err)
            message = None
        except MessageError:
            message = None
        if message is None:
            self._end(self.version_error or "not gpulaunch")
        else:
            self._on_message(message)
        return self._open

    def _end(self, why: str) -> None:
        # The owner may still answer (a refusal), so it closes; but it is notified only once.
        on_end, self._on_end = self._on_end, _nothing
        self._loop.unwatch_read(self._sock.fileno())
        on_end(why)
        self.close()

    def close(self) -> None:
        """End the connection; data sent before is still delivered. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.unwatch_read(self._sock.fileno())
        self._loop.unwatch_write(self._sock.fileno())
        with contextlib.suppress(OSError):
            # Closing with unread data makes the kernel reset the connection and drop data in flight.
            self._sock.recv(64 * 1024)
        self._sock.close()


def _nothing(why: str) -> None:
    """The default callback."""
