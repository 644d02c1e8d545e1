"""The leader's side of the protocol: admits the followers, sends them the group's decisions, detects lost nodes."""

from __future__ import annotations

import socket
from collections.abc import Callable

from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.launcher.rendezvous import rounds
from gpulaunch.launcher.rendezvous.base import unset
from gpulaunch.launcher.rendezvous.connection import Connection, Pace
from gpulaunch.launcher.rendezvous.listen import listen, where
from gpulaunch.launcher.rendezvous.messages import Beat, Ended, Hello, Message, Ready, Refused, Welcome

_MAX_NOTES = 50
_ACCEPT_AGAIN_S = 1.0


class Leader:
    """Listens on the port where the ranks will meet later, and gathers the nodes there first."""

    def __init__(self, loop: Loop, hello: Hello, *, addr: str, port: int, timeout_s: float, pace: Pace) -> None:
        self.on_message: Callable[[Message], None] = unset
        self.on_failed: Callable[[str], None] = unset
        self.on_note: Callable[[str], None] = unset
        self._loop = loop
        self._hello = hello
        self._timeout_s = timeout_s
        self._pace = pace
        self._group = rounds.gather(
            run_id=hello.run_id, nnodes=hello.nnodes, leader=rounds.Node(nproc=hello.nproc, host=hello.host)
        )
        self._listener = listen(addr, port, others=hello.nnodes > 1)
        self.port: int = self._listener.getsockname()[1]
        self._where = where(addr, self.port)
        # Any number of strangers may connect; the followers must still get in.
        self._max_guests = 64 + hello.nnodes
        self._guests: dict[Connection, Timer] = {}  # connected but not registered yet; oldest first
        self._followers: dict[Connection, int] = {}
        self._connections: dict[int, Connection] = {}
        self._waiting: list[Timer] = []  # only while nodes are gathered
        self._leaving: Timer | None = None
        self._noted: dict[str, None] = {}
        self._closed = False

    @property
    def store_fd(self) -> int | None:
        """The listening socket: handed to the store once all nodes have joined."""
        return self._listener.fileno()

    def open(self) -> None:
        """Start gathering nodes."""
        if self._group.stage is not rounds.Stage.GATHERING:
            return
        now = self._loop.now()
        self._waiting = [
            self._loop.call_at(now + self._timeout_s, self._give_up),
            self._loop.call_at(now + self._pace.note_s, self._note_waiting),
        ]
        self._loop.watch_read(self._listener.fileno(), self._accept)
        self._beat_at(now + self._pace.beat_s)

    def send(self, message: Ready | Ended) -> None:
        """Handle a message from node 0 itself; never answers from within this call."""
        self._apply(rounds.hear(self._group, rounds.LEADER, message))

    def close(self) -> None:
        """Leave; messages sent before are still delivered."""
        self._closed = True
        self._stop_gathering()
        for connection in self._followers:
            connection.close()
        self._listener.close()

    # -- arrivals

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as err:
            # E.g. out of descriptors. The listener stays readable, so pause for a moment instead of spinning.
            self._note(f"cannot accept a connection: {err.strerror}")
            self._loop.unwatch_read(self._listener.fileno())
            self._waiting.append(self._loop.call_at(self._loop.now() + _ACCEPT_AGAIN_S, self._accept_again))
            return
        if len(self._guests) >= self._max_guests:
            self._dismiss(next(iter(self._guests)))
        self._admit(sock, str(address[0]))

    def _accept_again(self) -> None:
        self._loop.watch_read(self._listener.fileno(), self._accept)

    def _admit(self, sock: socket.socket, address: str) -> None:
        def heard(message: Message) -> None:
            self._heard(connection, message)

        def ended(why: str) -> None:
            self._ended(connection, why, address)

        connection = Connection(self._loop, sock, on_message=heard, on_end=ended)
        # A connection that sends nothing, or too slowly, is closed.
        patience_s = self._loop.now() + self._pace.lost_s
        self._guests[connection] = self._loop.call_at(patience_s, lambda: self._dismiss(connection))

    def _dismiss(self, connection: Connection) -> None:
        self._guests.pop(connection).cancel()
        connection.close()

    def _heard(self, connection: Connection, message: Message) -> None:
        rank = self._followers.get(connection)
        if rank is not None:
            if not isinstance(message, Beat):
                self._apply(rounds.hear(self._group, rank, message))
        elif isinstance(message, Hello):
            self._greet(connection, message)
        else:
            self._dismiss(connection)

    def _greet(self, connection: Connection, hello: Hello) -> None:
        why = rounds.refusal(self._group, hello)
        if why is not None:
            self._refuse(connection, why)
            self._dismiss(connection)
            return
        self._guests.pop(connection).cancel()
        self._followers[connection] = hello.node_rank
        self._connections[hello.node_rank] = connection
        connection.send(Welcome(host=self._hello.host))
        if hello.max_restarts != self._hello.max_restarts:
            least = min(hello.max_restarts, self._hello.max_restarts)
            self._note(f"--max-restarts differs between node 0 and node {hello.node_rank}; the least rules ({least})")
        self._apply(rounds.arrive(self._group, hello.node_rank, rounds.Node(nproc=hello.nproc, host=hello.host)))
        if self._group.stage is not rounds.Stage.GATHERING:
            self._stop_gathering()

    def _refuse(self, connection: Connection, why: str) -> None:
        connection.send(Refused(why=why))
        self._note(f"refused: {why}")

    def _ended(self, connection: Connection, why: str, address: str) -> None:
        rank = self._followers.pop(connection, None)
        if rank is not None:
            del self._connections[rank]
            self._apply(rounds.gone(self._group, rank, why))
            return
        guest = self._guests.pop(connection, None)
        if guest is None:
            return
        guest.cancel()
        if connection.version_error is not None:
            self._refuse(connection, f"{address} {connection.version_error}; install the same gpulaunch on all nodes")
        elif why == "not gpulaunch":
            self._note(f"refused: what connected from {address} is not gpulaunch; start gpulaunch on every node")

    def _stop_gathering(self) -> None:
        """From now on the listening socket belongs to the attempts' stores."""
        if not self._waiting:
            return
        for timer in self._waiting:
            timer.cancel()
        self._waiting.clear()
        self._loop.unwatch_read(self._listener.fileno())
        for connection in list(self._guests):
            self._dismiss(connection)

    # -- decisions

    def _apply(self, result: rounds.Result) -> None:
        self._group, sends = result
        for rank, message in sends:
            if rank == rounds.LEADER:
                self._deliver(message)
            else:
                self._connections[rank].send(message)
        if self._group.stage is rounds.Stage.LEAVING and self._leaving is None:
            # The others leave at once after reading that all is done; one that does not is not waited for long.
            self._leaving = self._loop.call_at(
                self._loop.now() + self._pace.lost_s, lambda: self._apply(rounds.leave(self._group))
            )

    def _deliver(self, message: Message) -> None:
        self._loop.call_at(self._loop.now(), lambda: None if self._closed else self.on_message(message))

    def _give_up(self) -> None:
        """Nodes are missing when the rendezvous timeout expires."""
        why = f"waited {self._timeout_s:g} s for {self._missing()} at {self._where}"
        advice = "start gpulaunch there with this --master-addr and --master-port, or give --rdzv-conf timeout=SECONDS"
        self._stop_gathering()
        for connection in self._followers:
            connection.send(Refused(why=f"node 0 ({self._hello.host}) gave up: {why}"))
        seen = "".join(f"; {note}" for note in list(self._noted)[:3])
        self.on_failed(f"{why}{seen}; {advice}")

    # -- time

    def _beat_at(self, due_s: float) -> None:
        self._loop.call_at(due_s, lambda: self._beat(due_s))

    def _beat(self, due_s: float) -> None:
        if self._closed:
            return
        now = self._loop.now()
        for connection in list(self._followers):
            connection.excuse(now - due_s)
            if now - connection.heard_s > self._pace.lost_s:
                connection.close()
                self._ended(connection, f"no word from it for {self._pace.lost_s:g} s", "")
            connection.send(Beat())
        self._beat_at(now + self._pace.beat_s)

    def _note_waiting(self) -> None:
        self.on_note(f"waiting for {self._missing()} at {self._where}")
        self._waiting.append(self._loop.call_at(self._loop.now() + 6 * self._pace.note_s, self._note_waiting))

    def _missing(self) -> str:
        missing = self._group.missing
        ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"node{'s' if len(missing) > 1 else ''} {ranks} of {self._group.nnodes}"

    def _note(self, text: str) -> None:
        """Tell the user each thing once: a connection attempt every second must not fill the screen."""
        if text not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted[text] = None
            self.on_note(text)
