"""A node's connection to the leader of a job: found, kept, and made anew for as long as the job lasts.

A node must know whether the leader still counts it. Each beat has a number, which the leader sends back: a node whose
beats are not answered for `member.FENCE_S` ends its ranks, before the leader forms a group without it. Where the
leader's host answers that nothing listens there, no other group can begin, and the ranks train on until it is back; a
fixed group ends then.
"""

from __future__ import annotations

import socket

from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.launcher.rendezvous import member
from gpulaunch.launcher.rendezvous.auth import Authenticator
from gpulaunch.launcher.rendezvous.base import KeeperCallbacks
from gpulaunch.launcher.rendezvous.connection import Connection
from gpulaunch.launcher.rendezvous.dial import Dialer
from gpulaunch.launcher.rendezvous.listen import format_address
from gpulaunch.launcher.rendezvous.messages import Beat, Bye, Message, Planned, Refused, Register, Reported
from gpulaunch.launcher.rendezvous.plan import Report, Settings

BEAT_S = 1.0
DIAL_S = 2.0
"""After this silence a new connection is tried: over a link that was cut for 5 s, one that was open stays silent for up
to 7.9 s, and a new one works after 6.0 s (measured)."""
NOTE_S = 10.0
_MUTE = "it takes connections, but does not answer as gpulaunch; the job may run already"
_CLOSES = "it closes the connection: the job runs already, or another program listens there"


class PlanClient(KeeperCallbacks):
    """The side of every node but the leader's."""

    def __init__(
        self,
        loop: Loop,
        register: Register,
        settings: Settings,
        *,
        addr: str,
        port: int,
        token: bytes | None = None,
    ) -> None:
        """The leader listens at `addr` and `port`."""
        super().__init__()
        self._token = token
        self._loop = loop
        self._register = register
        self._where = format_address(addr, port)
        self._port = port
        self._settings = settings
        self._dialer = Dialer(loop, addr, port, try_s=DIAL_S, on_connected=self._connected)
        self._dialing = False
        self._connection: Connection | None = None
        self._leader = settings.leader
        """Its name for users; with its host once it was heard."""
        self._is_known = self._is_formed = False
        """Whether the leader was heard, and whether a group has been formed."""
        self._report: Report | None = None
        self._numbers: dict[int, float] = {}
        """Beats that are not answered yet, and when they were sent."""
        self._number = 0
        self._answered_s = 0.0
        """When the newest beat that was answered was sent."""
        self._present_s = 0.0
        """When the leader was last known to be there."""
        self._told_silence = False
        self._timer: Timer | None = None
        self._fence: Timer | None = None
        self._due_s = 0.0
        self._closed = False

    def open(self) -> None:
        """Start looking for the leader."""
        now_s = self._loop.now()
        self._answered_s = self._present_s = now_s
        self._dial()
        self._beat_at(now_s + BEAT_S)
        self._fence_at(now_s + member.FENCE_S)
        self._loop.call_at(now_s + NOTE_S, self._note_waiting)

    def publish(self, report: Report) -> None:
        """What this node says of itself; sent again over every new connection."""
        self._report = report
        if self._connection is not None:
            self._connection.send(Reported(report=report))

    def leave(self) -> bool:
        """At any time: the others go on."""
        return True

    def close(self) -> None:
        """Leave; messages sent before are still delivered."""
        self._closed = True
        self._dialer.stop()
        for timer in (self._timer, self._fence):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.send(Bye())
            self._connection.close()
            self._connection = None

    @property
    def local_addr(self) -> str:
        """The address of this node from which it reaches the leader; "" if it does not."""
        return self._connection.local_addr if self._connection is not None else ""

    # -- the connection

    def _dial(self) -> None:
        if not self._dialing:
            self._dialing = True
            self._dialer.start()

    def _connected(self, sock: socket.socket) -> None:
        self._dialing = False
        if self._connection is not None:
            self._connection.close()

        def ended(why: str) -> None:
            self._ended(connection, why)

        auth = Authenticator(self._token, dialled=True) if self._token else None
        connection = self._connection = Connection(self._loop, sock, on_message=self._heard, on_end=ended, auth=auth)
        self._dialer.trouble = _MUTE  # until it answers: torch's store, for one, takes the data and waits for more
        connection.send(self._register)
        if self._report is not None:
            connection.send(Reported(report=self._report))
        self._send_beat()

    def _heard(self, message: Message) -> None:
        now_s = self._loop.now()
        self._present_s = now_s
        if isinstance(message, Beat):
            self._answered_s = max(self._answered_s, self._numbers.pop(message.number, 0.0))
            self._numbers = {number: at_s for number, at_s in self._numbers.items() if number > message.number}
        elif isinstance(message, Planned):
            self._leader = f"{self._settings.leader} ({message.host})"
            self._is_known = True
            self._is_formed = message.plan.generation > 0
            if message.port:
                self._dialer.port = message.port
            self._dialer.succeeded()
            self.on_plan(message.plan)
        elif isinstance(message, Refused):
            self._fail(message.why)

    def _ended(self, connection: Connection, why: str) -> None:
        may_speak = self._token is None or connection.is_challenged
        if connection.version_error is not None and may_speak:
            self._fail(
                f"{self._leader} at {self._where} {connection.version_error}; install the same gpulaunch on all nodes"
            )
        elif self._connection is connection:
            self._connection = None
            prefix = {"not gpulaunch": "what answers there is ", connection.auth_error: "what answers there "}
            if not self._dialing:
                self._dialing = True
                closes = why == "connection closed" and not self._is_known
                self._dialer.again(_CLOSES if closes else prefix.get(why, "") + why)

    def _fail(self, why: str) -> None:
        if not self._closed:
            self.close()
            self.on_failed(why)

    # -- time

    def _beat_at(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._beat)

    def _beat(self) -> None:
        now_s = self._loop.now()
        late_s = now_s - self._due_s
        if late_s > BEAT_S:  # this process was stopped: what has arrived meanwhile is read first
            self._present_s += late_s
        # Its host has ended the connection, and answers: there is no leader that could form another group.
        is_dead = self._dialer.is_refused and self._connection is None
        if is_dead:
            self._answered_s = now_s
        if is_dead and not self._is_formed:  # it may have been started again, and listen elsewhere for those it knows
            self._dialer.port = self._port
        self._send_beat()
        if now_s - self._present_s > DIAL_S:
            self._dial()
        limit_s = self._settings.away_s if self._is_formed else self._settings.join_timeout_s
        if now_s - self._present_s > limit_s or (is_dead and self._is_formed and self._settings.fixed):
            self._fail(self._lost_text(limit_s))
            return
        self._beat_at(now_s + BEAT_S)

    def _fence_at(self, due_s: float) -> None:
        """Exactly then: the ranks must be dead 1.5 s later."""
        self._fence = self._loop.call_at(due_s, self._look_for_silence)

    def _look_for_silence(self) -> None:
        due_s = self._answered_s + member.FENCE_S
        if due_s > self._loop.now():
            self._told_silence = False
            self._fence_at(due_s)
            return
        if not self._told_silence:
            self._told_silence = True
            self.on_silence()
        self._fence_at(self._loop.now() + BEAT_S)

    def _send_beat(self) -> None:
        if self._connection is not None:
            self._number += 1
            self._numbers[self._number] = self._loop.now()
            self._connection.send(Beat(number=self._number))

    def _lost_text(self, limit_s: float) -> str:
        if self._is_formed and self._settings.fixed:
            return f"{self._leader} is gone: {self._dialer.trouble}"
        where = "--master-addr and --master-port" if self._settings.fixed else "--rdzv-endpoint"
        return (
            f"waited {limit_s:g} s for {self._leader} at {self._where}: {self._dialer.trouble}; check that gpulaunch "
            f"runs there, {where}, and the firewall"
        )

    def _note_waiting(self) -> None:
        if not self._closed and not self._is_formed:
            waits = f"waiting for {self._leader} at {self._where}: {self._dialer.trouble}"
            self.on_note(f"connected to {self._leader}; waiting for the other nodes" if self._is_known else waits)
            self._loop.call_at(self._loop.now() + 6 * NOTE_S, self._note_waiting)
