"""Messages between the agents of one job: JSON lines over TCP, bounded in length, in number and in time.

Every line is one object with the protocol's version and a type: `{"gpulaunch": 2, "say": "ready", "attempt": 0}`.

    follower -> leader   hello, ready, ended
    leader -> follower   welcome or refused, go, failed, done
    both ways            beat

Any process may connect, so input is data: checked field by field, cleaned before it is shown, and the connection ends
at the first line that is not a valid message.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from gpulaunch.launcher.loop.loop import Loop

VERSION = 2  # 2: checkpoints are offered with an identity, not by name alone
MAX_TEXT = 500
# At most two texts per message, and JSON writes a character in up to 12 bytes.
MAX_LINE_BYTES = 16 * 1024
_MAX_UNSENT_BYTES = 256 * 1024
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The heartbeat intervals of a connection."""

    beat_s: float = 2.0
    lost_s: float = 10.0
    """Silence after which a node counts as lost. Not lower than 6 s outside tests: TCP survives a link that flaps for
    5 s, and a training job should too (measured)."""
    note_s: float = 10.0
    """How long the user gets no message while nodes are missing; then once in six times that."""


class WireError(Exception):
    """The input is not a gpulaunch message."""


class VersionError(WireError):
    """The input is a message of another version of gpulaunch."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A follower registers."""

    run_id: str
    nnodes: int
    node_rank: int
    nproc: int
    host: str
    max_restarts: int


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The leader has admitted this follower, which now waits for the others."""

    host: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The leader refuses this follower, and a retry is pointless."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """No rank of an earlier attempt is alive here."""

    attempt: int
    offers: str = ""
    """Identities of the checkpoints readable here (`step 200 manifest 6f1c..:step-000000000200`), the best first, each
    ended by a bar. All nodes resume from one that they identify in the same way."""


@dataclass(frozen=True, kw_only=True)
class Go:
    """All are ready: start the ranks of this attempt."""

    attempt: int
    first_rank: int
    world_size: int
    resume: str = ""
    """The checkpoint that all resume from, as it was offered."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the attempt ended on the sender's node."""

    attempt: int
    ok: bool
    final: bool
    why: str
    preempted: bool = False
    """Not a failure: it was asked to save and end."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The attempt failed on another node; `final`: there will not be another."""

    attempt: int
    final: bool
    why: str
    preempted: bool = False
    lost: bool = False
    """A node is gone: this node cannot repair that."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The ranks of every node have ended successfully."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Still here."""


Message = Hello | Welcome | Refused | Ready | Go | Ended | Failed | Done | Beat
_WORDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind for kind in (Hello, Welcome, Refused, Ready, Go, Ended, Failed, Done, Beat)
}


def clean(text: str) -> str:
    """`text` made safe to show and compare: bounded, and without control characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


def encode(message: Message) -> bytes:
    """One line, newline included."""
    said = {name: clean(value) if isinstance(value, str) else value for name, value in vars(message).items()}
    return json.dumps({"gpulaunch": VERSION, "say": type(message).__name__.lower(), **said}).encode("ascii") + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`. Raises WireError for anything else; unknown fields are ignored."""
    try:
        said: object = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise WireError("not JSON") from err
    if not isinstance(said, dict) or "gpulaunch" not in said:
        raise WireError("not a message of gpulaunch")
    if said["gpulaunch"] != VERSION:
        spoken = clean(str(said["gpulaunch"]))[:20]
        raise VersionError(f"speaks version {spoken} of the protocol, not {VERSION}")
    word = said.get("say")
    kind = _WORDS.get(word) if isinstance(word, str) else None
    if kind is None:
        raise WireError("an unknown word")
    values: dict[str, Any] = {
        field.name: _checked(said.get(field.name, field.default), str(field.type)) for field in fields(kind)
    }
    return kind(**values)


def _checked(value: object, kind: str) -> object:
    """`value`, if it is of the type that the field's annotation names; bool is not int here."""
    if type(value).__name__ != kind:
        raise WireError(f"{kind} expected")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int) and not 0 <= value <= _MAX_INT:
        raise WireError("number out of range")
    return value


class Wire:
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
        except WireError:
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
