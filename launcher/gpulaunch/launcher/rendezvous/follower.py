"""A follower's side of the protocol: finds the leader, registers the node, detects when the leader is gone."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.launcher.rendezvous.base import unset
from gpulaunch.launcher.rendezvous.connection import Connection, Pace
from gpulaunch.launcher.rendezvous.dial import Dialer
from gpulaunch.launcher.rendezvous.listen import where
from gpulaunch.launcher.rendezvous.messages import (
    Beat,
    Done,
    Ended,
    Failed,
    Go,
    Hello,
    Message,
    Ready,
    Refused,
    Welcome,
)

_MUTE = "it takes connections, but does not answer as gpulaunch; the job may run already"


class Follower:
    """The only connection to the leader: renewed as often as needed until the first `go`, and never after it."""

    def __init__(self, loop: Loop, hello: Hello, *, addr: str, port: int, timeout_s: float, pace: Pace) -> None:
        self.on_message: Callable[[Message], None] = unset
        self.on_failed: Callable[[str], None] = unset
        self.on_note: Callable[[str], None] = unset
        self.port = port
        self.store_fd: int | None = None
        self._loop = loop
        self._hello = hello
        self._where = where(addr, port)
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        self._pace = pace
        self._dialer = Dialer(loop, addr, port, try_s=pace.lost_s, on_connected=self._connected)
        self._connection: Connection | None = None
        self._leader = "node 0"
        self._welcome = False
        self._settled = False  # all nodes had joined, or the job was given up: no more new connections
        self._ready: Ready | None = None
        self._giving_up: Timer | None = None
        self._showing_out: Timer | None = None
        self._closed = False

    def open(self) -> None:
        """Start looking for the leader."""
        now = self._loop.now()
        self._deadline_s = now + self._timeout_s
        self._giving_up = self._loop.call_at(self._deadline_s, self._give_up)
        self._loop.call_at(now + self._pace.note_s, self._note_waiting)
        self._beat_at(now + self._pace.beat_s)
        self._dialer.start()

    def send(self, message: Ready | Ended) -> None:
        """Send to the leader; readiness is kept until there is a connection."""
        if isinstance(message, Ready):
            self._ready = message
        if self._connection is not None:
            self._connection.send(message)

    def close(self) -> None:
        """Leave; messages sent before are still delivered."""
        self._closed = True
        self._dialer.stop()
        for timer in (self._giving_up, self._showing_out):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, sock: socket.socket) -> None:
        self._connection = connection = Connection(self._loop, sock, on_message=self._heard, on_end=self._ended)
        self._welcome = False
        connection.send(self._hello)
        if self._ready is not None:
            connection.send(self._ready)
        self._dialer.trouble = _MUTE  # until it answers: torch's store, for one, accepts our data and waits for more
        self._showing_out = self._loop.call_at(self._loop.now() + self._pace.lost_s, lambda: self._lost(_MUTE))

    def _heard(self, message: Message) -> None:
        if isinstance(message, Beat):
            return
        if isinstance(message, Welcome):
            self._welcome = True
            self._leader = f"node 0 ({message.host})"
            # From here on the leader decides how long to wait for the others, and its heartbeat shows that it does.
            for timer in (self._giving_up, self._showing_out):
                if timer is not None:
                    timer.cancel()
        elif isinstance(message, Refused):
            self._fail(message.why)
        else:
            self._settled = self._settled or isinstance(message, Go | Failed)
            if isinstance(message, Done):
                self.close()  # the leader waits for this
            self.on_message(message)

    def _ended(self, why: str) -> None:
        if self._connection is not None and self._connection.version_error is not None:
            self._fail(
                f"node 0 at {self._where} {self._connection.version_error}; install the same gpulaunch on all nodes"
            )
        elif self._welcome or why != "connection closed":
            self._lost(f"what answers there is {why}" if why == "not gpulaunch" else why)
        else:
            self._lost("it closes the connection: the job runs already, or another program listens there")

    def _lost(self, why: str) -> None:
        """There is no leader at the other end, or no longer."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._showing_out is not None:
            self._showing_out.cancel()
        if self._settled:
            self.on_message(Failed(attempt=0, final=True, why=f"{self._leader} is gone: {why}", lost=True))
            return
        if self._welcome:  # the leader was there: give it time to come back, as before
            self._welcome = False
            again_until_s = max(self._deadline_s, self._loop.now() + self._pace.lost_s)
            self._giving_up = self._loop.call_at(again_until_s, self._give_up)
        self._dialer.again(why)

    def _give_up(self) -> None:
        trouble = self._dialer.trouble
        self._fail(
            f"could not reach node 0 at {self._where} in {self._timeout_s:g} s ({trouble}); check that gpulaunch runs "
            "there, --master-addr and --master-port, and the firewall"
        )

    def _fail(self, why: str) -> None:
        self.close()
        self.on_failed(why)

    def _beat_at(self, due_s: float) -> None:
        self._loop.call_at(due_s, lambda: self._beat(due_s))

    def _beat(self, due_s: float) -> None:
        if self._closed:
            return
        now = self._loop.now()
        connection = self._connection
        if connection is not None and self._welcome:
            connection.excuse(now - due_s)
            if now - connection.heard_s > self._pace.lost_s:
                self._lost(f"no word from it for {self._pace.lost_s:g} s")
            connection.send(Beat())
        self._beat_at(now + self._pace.beat_s)

    def _note_waiting(self) -> None:
        if self._closed or self._settled:
            return
        if self._welcome:
            self.on_note(f"connected to {self._leader}; waiting for the other nodes")
        else:
            self.on_note(f"waiting for node 0 at {self._where} ({self._dialer.trouble})")
        self._loop.call_at(self._loop.now() + 6 * self._pace.note_s, self._note_waiting)
