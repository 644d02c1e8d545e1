"""Keeps the plan of a job in the memory of one agent, the leader; every node reports to it over TCP.

It listens for the whole job: nodes come, go and come back. Where a fixed group has met, its ranks meet as well, as
under torchrun: that port goes to the store of each attempt once all nodes are there, and those that dial anew find the
leader at another one, of which it has told them before. Traffic is linear in the number of nodes: a node reports when
something changes, is sent its own slice of the plan when that changes, and beats once a second.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.launcher.policy.restart import REQUEUE
from gpulaunch.launcher.rendezvous import admission, decide, membership
from gpulaunch.launcher.rendezvous.auth import Authenticator
from gpulaunch.launcher.rendezvous.base import KeeperCallbacks
from gpulaunch.launcher.rendezvous.connection import Connection
from gpulaunch.launcher.rendezvous.dial import Probe
from gpulaunch.launcher.rendezvous.listen import format_address, is_loopback
from gpulaunch.launcher.rendezvous.messages import Beat, Bye, Message, Planned, Refused, Register, Reported
from gpulaunch.launcher.rendezvous.plan import Keeper, Member, Plan, Report, Settings, Stage

NOTE_S = 10.0
"""How long the user gets no message while nodes are missing; then once in six times that."""
_MAX_GUESTS = 64
_MAX_NOTES = 50
_ACCEPT_AGAIN_S = 1.0
_MAX_RANKS = 1 << 16
"""Of one node."""
_MAX_GENERATION = 1 << 30
_DECIDE_PART = 0.2
"""At most this part of the time is spent on decisions: each looks at every node."""
_PROBE_S = 1.0
"""After a connection has ended: by then a live node has dialled anew, and the ranks of a dead agent are dead."""
_STOPPED_S = 2.0
"""A timer later than this shows that this process was stopped, and could not hear anybody."""


class PlanServer(KeeperCallbacks):
    """The leader's side: its own node's report and those of all others go in, slices of the plan come out."""

    def __init__(
        self,
        loop: Loop,
        listener: socket.socket,
        register: Register,
        settings: Settings,
        host: str,
        address: str,
        token: bytes | None = None,
        redial: socket.socket | None = None,
    ) -> None:
        """`listener`: listens at `address`, the endpoint's; this closes it. `host`: this machine's name for users.
        `redial`: of a fixed group, the socket that listens where the nodes dial later; None: at the endpoint."""
        super().__init__()
        self._token = token
        self._address = address
        self._loop = loop
        self._listener = listener
        self._redial = redial
        self._listeners = [each for each in (listener, redial) if each is not None]
        self._redial_port: int = redial.getsockname()[1] if redial is not None else 0
        self._register = register
        self._settings = settings
        self._host = host
        self._plan = Plan(job=os.urandom(8).hex(), since_s=loop.now())
        self._members: dict[str, Member] = {}
        self._own = ""
        self._by_order: dict[int, str] = {}
        """The nodes of a fixed group, by their ranks."""
        self._guests: dict[Connection, Timer] = {}  # connected, but not registered yet; the oldest first
        self._registered: set[Connection] = set()
        self._unreported: dict[Connection, Timer] = {}
        self._nodes: dict[Connection, str] = {}
        self._connections: dict[str, Connection] = {}
        self._addresses: dict[Connection, tuple[str, str]] = {}
        """The address of the other side, and the one at which it has reached this one."""
        self._looked_for: set[str] = set()
        """Leaders before this one."""
        self._deciding: Timer | None = None
        self._due_s = 0.0
        self._free_s = 0.0
        self._noted: dict[str, None] = {}
        self._is_told = False
        self._closed = False

    @property
    def where(self) -> str:
        """The address at which it listens."""
        address = self._listener.getsockname()
        return format_address(str(address[0]), int(address[1]))

    def open(self) -> None:
        """Begin to listen."""
        self._plan = replace(self._plan, since_s=self._loop.now())
        for listener in self._listeners:
            self._watch(listener)
        self._loop.call_at(self._loop.now() + NOTE_S, self._note_waiting)
        self._decide_at(self._loop.now())

    def publish(self, report: Report) -> None:
        """What the leader's own node says of itself; never answers from within this call."""
        self._own = report.node
        if report.order is not None:
            self._by_order[report.order] = report.node
        if report.cause is not None and report.cause.leaves:  # without the leader no other group can begin
            report = replace(report, cause=replace(report.cause, leaves=False))
        self._take(report)

    def leave(self) -> bool:
        """The leader has ended: without it no other group can begin. Whether all others know, or are lost."""
        if self._closed:
            return True
        now_s = self._loop.now()
        if self._plan.stage is not Stage.OVER:
            own = self._members.get(self._own)
            cause = own.report.cause if own is not None else None
            why = f"the leader ({self._host}) has left" + (f": {cause.text}" if cause is not None else "")
            code = REQUEUE if cause is None or cause.preempted else cause.exit_code
            preempted = cause is not None and cause.preempted
            over = replace(self._plan, stage=Stage.OVER, why=why, exit_code=code, preempted=preempted, blamed=self._own)
            self._plan = replace(over, since_s=now_s)
            self._send_all()
        return not self._others(now_s)

    def close(self) -> None:
        """Leave; messages sent before are still delivered."""
        self._closed = True
        if self._deciding is not None:
            self._deciding.cancel()
        for listener in self._listeners:
            self._unwatch(listener)
        for connection in [*self._guests, *self._registered]:
            connection.close()
        self._listener.close()

    # -- arrivals

    def _watch(self, listener: socket.socket) -> None:
        self._loop.watch_read(listener.fileno(), lambda: self._accept(listener))

    def _unwatch(self, listener: socket.socket) -> None:
        self._loop.unwatch_read(listener.fileno())

    @property
    def _listens_at_endpoint(self) -> bool:
        """Not once the socket belongs to the stores of a fixed group."""
        return self._redial is None or not self._plan.generation

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as err:
            # E.g. out of descriptors. The listener stays readable, so pause for a moment instead of spinning.
            self._note(f"cannot accept a connection: {err.strerror}")
            self._unwatch(listener)
            self._loop.call_at(self._loop.now() + _ACCEPT_AGAIN_S, lambda: self._accept_again(listener))
            return
        if len(self._guests) >= _MAX_GUESTS + self._settings.max_nodes:  # strangers must not keep nodes out
            self._dismiss(next(iter(self._guests)))

        def heard(message: Message) -> None:
            self._heard(connection, message)

        def ended(why: str) -> None:
            self._ended(connection, why)

        auth = Authenticator(self._token, dialled=False) if self._token else None
        connection = Connection(self._loop, sock, on_message=heard, on_end=ended, auth=auth)
        self._addresses[connection] = str(address[0]), str(sock.getsockname()[0])
        due_s = self._loop.now() + self._settings.silent_s
        self._guests[connection] = self._loop.call_at(due_s, lambda: self._dismiss(connection))

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._closed and (listener is self._redial or self._listens_at_endpoint):
            self._watch(listener)

    def _dismiss(self, connection: Connection) -> None:
        if connection in self._unreported:
            self._end(connection)
            return
        self._guests.pop(connection).cancel()
        del self._addresses[connection]
        connection.close()

    def _heard(self, connection: Connection, message: Message) -> None:
        if connection in self._guests:
            self._greet(connection, message)
            return
        node = self._nodes.get(connection, "")
        if isinstance(message, Reported):
            self._report(connection, message.report)
        elif isinstance(message, Beat):
            known = self._members.get(node)
            if known is not None:
                self._members[node] = replace(known, heard_s=self._loop.now())
                connection.send(message)
            else:  # it was forgotten in a long silence: it dials anew, and reports
                self._end(connection)
        elif isinstance(message, Bye):
            if node in self._members:
                self._members[node] = replace(self._members[node], gone=True)
            self._end(connection)
            self._decide_soon()
        else:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        self._forget(connection)
        connection.close()

    def _greet(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Beat):  # a node proves that it has the token; `gpulaunch doctor` asks for no more
            if message.number:
                connection.send(replace(message, unix_s=time.time()))
            return
        if not isinstance(message, Register):
            self._dismiss(connection)
            return
        ours, who = self._register, self._addresses[connection][0]
        leader = f"{self._settings.leader} ({self._host})"
        why = admission.mismatch(ours, message, who=who, leader=leader)
        if why:
            self._refuse(connection, why)
            self._dismiss(connection)
            return
        if message.max_restarts != ours.max_restarts:
            theirs = f"{message.max_restarts} on {who}"
            self._note(f"--max-restarts differs: {theirs}, {ours.max_restarts} on {leader}, whose number is used")
        self._unreported[connection] = self._guests.pop(connection)
        self._registered.add(connection)

    def _refuse(self, connection: Connection, why: str) -> None:
        connection.send(Refused(why=why))
        self._note(f"refused: {why}")

    def _report(self, connection: Connection, report: Report) -> None:
        if self._plan.stage is Stage.OVER and report.node not in self._members and not report.generation:
            # It comes for the next job that meets here, which begins when this leader has left: it tries again.
            self._end(connection)
            return
        address, _ = self._addresses[connection]
        is_sound = 1 <= report.nproc <= _MAX_RANKS and report.newest <= _MAX_GENERATION and report.node
        if not is_sound or self._nodes.get(connection, report.node) != report.node:
            self._note(f"refused: {address} reports what cannot be")
            self._end(connection)
            return
        misplaced = self._place(report) if self._settings.fixed else ""
        if misplaced:
            self._refuse(connection, misplaced)
            self._end(connection)
            return
        timer = self._unreported.pop(connection, None)
        if timer is not None:
            timer.cancel()
        before = self._connections.get(report.node)
        if before is not None and before is not connection:  # the node has dialled anew
            self._end(before)
        is_new = before is not connection
        self._nodes[connection] = report.node
        self._connections[report.node] = connection
        self._take(replace(report, address=address.removeprefix("::ffff:")))
        if report.plan is not None and report.plan.keeper is not None:
            self._look_for(report.plan.keeper)
        if is_new:
            self._send(report.node, connection)

    def _place(self, report: Report) -> str:
        """Give a node its place in a fixed group; why it has none, or ""."""
        order = -1 if report.order is None else report.order
        twin = self._by_order.get(order, report.node)
        member = self._members.get(twin) if twin != report.node else None
        is_alive = member is not None and membership.lost_at_s(self._settings, member) > self._loop.now()
        is_there = is_alive and (twin == self._own or twin in self._connections)
        is_late = self._plan.generation > 0 and report.node not in self._members
        host = member.report.host if member is not None and is_there else ""
        why = admission.misplaced(self._settings, report, twin=host, is_late=is_late)
        if not why:
            self._by_order[order] = report.node
            if member is not None:
                self._members[twin] = replace(member, gone=True)
            if twin != report.node and twin in self._connections:  # it has been silent for too long
                self._end(self._connections[twin])
        return why

    def _ended(self, connection: Connection, why: str) -> None:
        if connection in self._guests:
            address, _ = self._addresses[connection]
            if connection.version_error is not None:
                self._refuse(
                    connection, f"{address} {connection.version_error}; install the same gpulaunch on all nodes"
                )
            elif connection.auth_error is not None:
                self._note(f"refused: {address} {connection.auth_error}")
            elif why == "not gpulaunch":
                self._note(f"refused: what connected from {address} is not gpulaunch; start gpulaunch on every node")
            self._dismiss(connection)
        elif connection in self._registered:
            node = self._nodes.get(connection)
            self._forget(connection)
            if node in self._members:
                self._loop.call_at(self._loop.now() + _PROBE_S, lambda: self._probe(node))

    def _probe(self, node: str) -> None:
        """A node is not connected any more. If its host answers that nothing listens where its agent did, the agent is
        dead, and so are its ranks; a host that does not answer may only be out of reach for a moment."""
        member = self._members.get(node)
        if self._closed or member is None or node in self._connections or not member.report.agent_port:
            return
        report = member.report

        def refused() -> None:
            if node in self._members and node not in self._connections:
                self._members[node] = replace(self._members[node], gone=True)
                self._decide_soon()

        Probe(self._loop, report.address, report.agent_port, on_refused=refused)

    def _look_for(self, before: Keeper) -> None:
        """A node knows of a leader before this one, whose ranks may be alive: they are not if its agent is dead.

        Only this host is asked, where there is one leader at a time: an address may have moved here from another one.
        """
        node = before.seat.node
        if node == self._own or node in self._members or node in self._looked_for or not before.agent_port:
            return
        if before.seat.host != self._host or len(self._looked_for) >= _MAX_NOTES:
            return
        self._looked_for.add(node)

        def refused() -> None:
            if not self._closed and node not in self._members:
                dead = membership.unheard(before.seat, self._plan, self._loop.now())
                self._members[node] = replace(dead, gone=True)
                self._decide_soon()

        Probe(self._loop, before.address, before.agent_port, on_refused=refused)

    def _forget(self, connection: Connection) -> None:
        self._registered.discard(connection)
        timer = self._unreported.pop(connection, None)
        if timer is not None:
            timer.cancel()
        self._addresses.pop(connection, None)
        node = self._nodes.pop(connection, None)
        if node is not None and self._connections.get(node) is connection:
            del self._connections[node]

    # -- decisions

    def _take(self, report: Report) -> None:
        known = self._members.get(report.node)
        self._members[report.node] = membership.heard(known, report, self._loop.now())
        self._decide_soon()

    def _decide_soon(self) -> None:
        """Once for everything that arrives in one turn of the loop."""
        due_s = max(self._loop.now(), self._free_s)
        if self._due_s > due_s:
            self._decide_at(due_s)

    def _decide_at(self, due_s: float) -> None:
        if self._deciding is not None:
            self._deciding.cancel()
        self._due_s = due_s
        self._deciding = self._loop.call_at(due_s, self._decide)

    def _decide(self) -> None:
        now_s = self._loop.now()
        late_s = now_s - self._due_s
        if late_s > _STOPPED_S:  # what has arrived meanwhile is read first
            self._members = {
                node: replace(member, heard_s=member.heard_s + late_s) for node, member in self._members.items()
            }
        own = self._members.get(self._own)
        if own is not None:
            report = replace(own.report, address=self.local_addr or own.report.address or self._address)
            self._members[self._own] = replace(own, report=report, heard_s=now_s)
        before, self._plan = self._plan, decide.decide(self._settings, self._plan, self._members, now_s)
        if self._plan is not before:
            self._plan = replace(self._plan, keeper=self._keeper())
            if not self._listens_at_endpoint:
                self._unwatch(self._listener)
            self._send_all()
        if self._plan.stage is Stage.OVER and not self._others(now_s) and not self._is_told:
            self._is_told = True  # the leader is the last to leave
            self._deliver(self._plan.for_node(self._own))
        self._members = membership.remembered(self._plan, self._members, now_s)
        due_s = decide.next_s(self._settings, self._plan, self._members, now_s)
        ended_s = self._loop.now()
        self._free_s = ended_s + (ended_s - now_s) * (1 / _DECIDE_PART - 1)
        self._decide_at(max(min(due_s, now_s + 1.0), self._free_s))

    def _keeper(self) -> Keeper | None:
        own = self._members.get(self._own)
        seat = next((seat for seat in self._plan.seats if seat.node == self._own), None)
        if own is None or seat is None:
            return None
        return Keeper(seat=seat, address=own.report.address, agent_port=own.report.agent_port)

    def _others(self, now_s: float) -> bool:
        """Whether there is a node that may not know of the end yet."""
        others = (member for node, member in self._members.items() if node != self._own)
        return any(membership.lost_at_s(self._settings, member) > now_s for member in others)

    def _send_all(self) -> None:
        seats = {seat.node: seat for seat in self._plan.seats}
        for node, connection in self._connections.items():
            plan = self._plan.for_seat(seats.get(node))
            connection.send(Planned(host=self._host, plan=plan, port=self._redial_port))
        if self._plan.stage is not Stage.OVER:
            self._deliver(self._plan.for_seat(seats.get(self._own)))

    def _send(self, node: str, connection: Connection) -> None:
        connection.send(Planned(host=self._host, plan=self._plan.for_node(node), port=self._redial_port))

    def _deliver(self, plan: Plan) -> None:
        self._loop.call_at(self._loop.now(), lambda: None if self._closed else self.on_plan(plan))

    @property
    def local_addr(self) -> str:
        """The address of this node at which the others have reached it, if it can be another host's way; "" if none
        has."""
        own = [self._addresses[connection][1].removeprefix("::ffff:") for connection in self._connections.values()]
        return min(own, key=is_loopback, default="")

    # -- for the user

    def _note_waiting(self) -> None:
        if self._closed or self._plan.stage is not Stage.FORMING:
            return
        there = membership.alive(self._settings, self._members, self._loop.now())
        self.on_note(f"waiting for {membership.missing_text(self._settings, there)}, at {self.where}")
        self._loop.call_at(self._loop.now() + 6 * NOTE_S, self._note_waiting)

    def _note(self, text: str) -> None:
        """Tell the user each thing once: a connection attempt every second must not fill the screen."""
        if text not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted[text] = None
            self.on_note(text)
