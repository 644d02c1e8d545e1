"""A connection between two agents of one job: messages over TCP, bounded in length, in number and in time.

Any process may connect: the connection ends at the first line that is not a valid message.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.auth import Authenticator, AuthError
from gpulaunch.launcher.rendezvous.codec import MessageError
from gpulaunch.launcher.rendezvous.messages import (
    MAX_LINE_BYTES,
    Beat,
    Challenge,
    Message,
    VersionError,
    decode,
    encode,
)

_MAX_UNSENT_BYTES = 256 * 1024
_MAX_HELD = 64
"""Messages that wait for the other side's challenge."""


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
        auth: Authenticator | None = None,
    ) -> None:
        """`auth`: nothing is heard from, nor sent to, somebody without its token; None: from and to anybody."""
        self._auth = auth
        self._held: list[Message] = []  # until the other side's challenge has come
        self._loop = loop
        self._sock = sock
        self._on_message = on_message
        self._on_end = on_end
        self._received = b""
        self._unsent = b""
        self._open = True
        self.version_error: str | None = None
        """Set if the other side is another version of gpulaunch."""
        self.auth_error: str | None = None
        """Set if the other side has another token, or only one side has one; completes a sentence about it."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # already reset: reading will show it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # In addition to the heartbeats: the kernel ends a connection whose peer does not respond.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        loop.watch_read(sock.fileno(), self._read)
        if auth is not None:
            self._unsent = encode(Challenge(nonce=auth.nonce))
            self._flush()

    @property
    def is_challenged(self) -> bool:
        """Whether the other side's challenge has come: it may still have another token."""
        return self._auth is not None and self._auth.is_ready

    @property
    def local_addr(self) -> str:
        """This side's address."""
        with contextlib.suppress(OSError):
            return str(self._sock.getsockname()[0]).removeprefix("::ffff:")
        return ""

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent the other side has not taken yet."""
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Send now or as soon as the other side reads."""
        if self._open and self.unsent_bytes >= _MAX_UNSENT_BYTES:  # a peer that does not read for so long
            self.close()
            self._loop.call_at(self._loop.now(), lambda: self._end("it does not read"))
        elif self._open:
            if self._auth is None:
                self._unsent += encode(message)
            elif self._auth.is_ready:
                self._unsent += self._auth.seal(encode(message)[:-1]) + b"\n"
            elif len(self._held) < _MAX_HELD:
                self._held.append(message)
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
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            if not self._take(line):
                return
        # A stranger is detected by the first byte, not by a line that never ends.
        if len(self._received) > MAX_LINE_BYTES or self._received[:1] not in (b"", b"{"):
            self._end("not gpulaunch")

    def _take(self, line: bytes) -> bool:
        """Handle one line; False when the connection is over."""
        message: Message | None = None
        try:
            if len(line) <= MAX_LINE_BYTES:
                message = self._authenticated(line)
        except AuthError as err:
            self.auth_error = str(err)
        except VersionError as err:
            self.version_error = str(err)
        except MessageError:
            pass
        if message is None:
            self._end(self.version_error or self.auth_error or "not gpulaunch")
        elif isinstance(message, Challenge):
            self._challenged(message)
        else:
            self._on_message(message)
        return self._open

    def _authenticated(self, line: bytes) -> Message:
        auth = self._auth
        if auth is not None and auth.is_ready:
            return decode(auth.open(line))
        if auth is not None:  # nothing else is looked at before
            try:
                return decode(line, Challenge)
            except VersionError:
                raise
            except MessageError as err:
                raise AuthError("gives no token; give --token-file on every node") from err
        message = decode(line)
        if isinstance(message, Challenge):
            raise AuthError("asks for a token; give --token-file on every node")
        return message

    def _challenged(self, challenge: Challenge) -> None:
        assert self._auth is not None, "else it was not accepted"
        self._auth.begin(challenge.nonce)
        held, self._held = self._held, []
        for message in (Beat(), *held):  # something to prove each side to the other at once
            self.send(message)

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
