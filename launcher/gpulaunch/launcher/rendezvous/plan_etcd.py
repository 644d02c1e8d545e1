"""Keeps the plan of an elastic job in etcd: any node may be lost, also the one that decides, and any member of etcd.

Each node takes a turn each second, and when a key that concerns it has changed (`etcd_session`), in a thread of its
own: nothing here blocks the loop. One of the nodes decides, as the leader does elsewhere (`decide`). If it falls silent
for `TAKEOVER_S`, another takes its place and goes on with the plan in etcd; that alone disturbs no rank.

What may happen to a node that does not reach etcd, and what it does:

- The others may reach it: after `Settings.silent_s` they go on without this node. So it ends its ranks when no beat of
  its own that was written within the last `member.FENCE_S` has been acknowledged. This is also what it does where it
  cannot know: one member that says that it has no leader is no evidence, because the others may have one.
- No node can write, because etcd has no majority. Then there is no new generation, and the ranks train on. A node takes
  this for certain where so many members tell it that they have no leader, or that their process does not run, that the
  others are no majority, all through `OUTAGE_S`. As the decider cannot read all that time, either, it begins to count
  the silence of every node anew after a pause of `PAUSE_S`: who has trained on has its 9 s to be heard again.

When the ranks of such a node end, the rule is that of a lost leader: after `Settings.away_s` its agent ends with 75.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

from gpulaunch.launcher.loop.loop import Loop, Timer
from gpulaunch.launcher.rendezvous import decide, member, membership
from gpulaunch.launcher.rendezvous.base import KeeperCallbacks
from gpulaunch.launcher.rendezvous.codec import clean
from gpulaunch.launcher.rendezvous.dial import Probe
from gpulaunch.launcher.rendezvous.etcd_access import Access
from gpulaunch.launcher.rendezvous.etcd_client import EtcdAwayError, EtcdClient, EtcdError
from gpulaunch.launcher.rendezvous.etcd_session import Ask, EtcdSession, RefusedError, Told
from gpulaunch.launcher.rendezvous.etcd_threads import TURN_S, Watcher, Worker
from gpulaunch.launcher.rendezvous.messages import Register
from gpulaunch.launcher.rendezvous.plan import Member, NodeState, Plan, Report, Settings, Stage

TAKEOVER_S = 4.0
"""The decider has not been heard for so long: another node decides."""
PAUSE_S = 3.0
"""A pause between two turns that is longer than this shows that etcd, or this process, has stood still."""
OUTAGE_S = 4.0
"""Longer than PAUSE_S and a turn: for the decider the same outage is a pause."""
NOTE_S = 10.0
_SOONEST_S = 0.03
_PROBE_S = 2.5
"""After this silence the node's host is asked whether the agent still runs."""
_LEAVE_S = 2.0
_LOOK_S = 0.25
_MAX_NOTES = 20


class PlanEtcd(KeeperCallbacks):
    """This node's side, and that of the decider while it is the one."""

    def __init__(self, loop: Loop, access: Access, register: Register, settings: Settings, *, node: str) -> None:
        """`node`: the identity of this agent. Raises RendezvousError for files that cannot be used."""
        super().__init__()
        self._loop = loop
        self._access = access
        self._settings = settings
        self._node = node
        context = access.context()
        self._client = EtcdClient(access, context)
        self._session = EtcdSession(self._client, access.prefix, register, node)
        self._worker = Worker(loop, self._client.close)
        self._watcher = Watcher(loop, EtcdClient(access, context), self._client, self._soon)
        self._report: Report | None = None
        self._said: Report | None = None
        """The report that etcd has."""
        self._plan: Plan | None = None
        """With times of this node's clock."""
        self._written_s = self._offset_s = 0.0
        """When it was written, by the clock of who wrote it, and how far ahead this node's clock is."""
        self._pending: Plan | None = None
        """To be written."""
        self._local_addr = ""
        self._trouble = "no answer yet"
        self._noted: set[str] = set()
        self._turn_timer: Timer | None = None
        self._is_busy = self._again = self._closed = False
        self._told_silence = self._was_reached = self._takes_part = False
        self._turn_s = 0.0
        self._answered_s = self._present_s = self._reached_s = 0.0
        """When the newest beat that is acknowledged was sent; when etcd was known to be there; the last answer."""
        self._look_s = 0.0
        self._no_majority_s: float | None = None
        """Since when etcd is known to have no majority."""
        self._decider, self._decider_beat, self._decider_s = "", 0, 0.0
        self._former = ("", 0, 0.0)
        """The decider before this node, its last beat, and when that was heard."""
        self._members: dict[str, Member] = {}
        self._beats: dict[str, int] = {}
        self._next_s = 0.0

    def open(self) -> None:
        """Begin to look for etcd."""
        now_s = self._loop.now()
        self._answered_s = self._present_s = self._reached_s = self._decider_s = self._look_s = now_s
        self._worker.start()
        self._loop.call_at(now_s, self._look)
        self._loop.call_at(now_s + NOTE_S, self._note_waiting)
        self._soon()

    def publish(self, report: Report) -> None:
        """What this node says of itself; never answers from within this call."""
        self._report = report
        self._soon()

    def leave(self) -> bool:
        """At any time: the others go on."""
        return True

    def close(self) -> None:
        """Leave; what was said before is still written, if etcd answers."""
        if self._closed:
            return
        over = self._plan is not None and self._plan.stage is Stage.OVER
        ask = self._ask() if self._report is not None and self._report is not self._said and not over else None

        def leave() -> None:
            if ask is not None:
                self._session.turn(ask)
            self._session.leave(over=over)

        self._stop()
        if self._was_reached:
            self._worker.do_last(leave, _LEAVE_S)
        self._worker.end()

    def _stop(self) -> None:
        self._closed = True
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        self._watcher.stop()
        self._worker.stop()

    @property
    def local_addr(self) -> str:
        """The address of this node at which the others reach it; "" if it is not known."""
        return self._local_addr

    # -- turns

    def _soon(self) -> None:
        self._again = True
        if not self._is_busy:
            self._turn_at(max(self._loop.now(), self._turn_s + _SOONEST_S))

    def _turn_at(self, due_s: float) -> None:
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        if not self._closed:
            self._turn_timer = self._loop.call_at(due_s, self._turn)

    def _turn(self) -> None:
        if self._report is None:
            return
        self._is_busy, self._again = True, False
        self._turn_s = self._loop.now()
        ask, self._said, self._pending = self._ask(), self._report, None
        self._worker.do(lambda: self._session.turn(ask), self._ended)

    def _ask(self) -> Ask:
        report = self._report
        assert report is not None, "a turn is taken when there is one"
        decides = self._decider == self._node
        return Ask(
            report=replace(report, address=self._local_addr) if report is not self._said else None,
            takes=self._was_reached and not decides and self._is_decider_silent(),
            decides=decides,
            plan=self._pending,
            clears=decides and self._is_of_an_earlier_job() and not self._is_anybody_seated(),
        )

    def _is_decider_silent(self) -> bool:
        return not self._decider or self._loop.now() - self._decider_s > TAKEOVER_S

    def _is_of_an_earlier_job(self) -> bool:
        """Whether the plan is that of a job with the same id which was over before this node came."""
        return self._plan is not None and self._plan.stage is Stage.OVER and not self._takes_part

    def _is_anybody_seated(self) -> bool:
        return self._plan is not None and any(seat.node in self._beats for seat in self._plan.seats)

    def _ended(self, told: Told | Exception) -> None:
        self._is_busy = False
        if self._closed:
            return
        if isinstance(told, Told):
            self._heard(told)
        else:
            self._failed(told)
        now_s = self._loop.now()
        if self._again or self._pending is not None:
            self._turn_at(max(self._turn_s + _SOONEST_S, now_s))
        else:
            self._turn_at(max(min(self._turn_s + TURN_S, self._next_s), now_s + _SOONEST_S))

    def _failed(self, err: Exception) -> None:
        self._said = None  # it may not have been written
        self._next_s = math.inf
        self._trouble = clean(str(err))
        away = isinstance(err, EtcdAwayError)
        if isinstance(err, RefusedError):
            self._fail(str(err))
        elif isinstance(err, EtcdError) and err.is_final and not self._was_reached:
            self._fail(f"etcd at {self._access} refuses: {err}; see --rdzv-conf user, password_file, cert and key")
        elif not away and self._trouble not in self._noted and len(self._noted) < _MAX_NOTES:
            self._noted.add(self._trouble)
            self.on_note(f"etcd at {self._access}: {self._trouble}")
        if not (isinstance(err, EtcdAwayError) and err.no_majority):
            self._no_majority_s = None
        elif self._no_majority_s is None:
            self._no_majority_s = self._turn_s
        elif self._turn_s - self._no_majority_s >= OUTAGE_S:
            self._answered_s = max(self._answered_s, self._turn_s)
            if self._report is not None and self._report.state in (NodeState.RUNNING, NodeState.SUCCEEDED):
                self._present_s = self._turn_s

    def _heard(self, told: Told) -> None:
        now_s = self._loop.now()
        paused = now_s - self._reached_s > PAUSE_S
        self._answered_s = max(self._answered_s, told.sent_s)
        self._present_s = self._reached_s = now_s
        self._told_silence, self._no_majority_s = False, None
        if not self._was_reached:
            self._was_reached, self._said = True, None  # its address is known now
            self._again = True
        self._local_addr = told.local_addr
        self._hear_decider(told, paused)
        if told.plan is not None:
            if told.wrote and told.decider == self._node:
                self._offset_s = 0.0
            elif told.written_s != self._written_s:
                self._offset_s = now_s - told.written_s
            self._written_s = told.written_s
            self._plan = decide.shifted(told.plan, self._offset_s)
        elif not told.has_plan:
            self._plan = None
        self._next_s = math.inf
        if told.beats is None:
            self._members, self._beats = {}, {}
        else:
            self._hear_nodes(told, paused)
            if not self._is_of_an_earlier_job():
                self._decide(told.sent_s)
        if told.plan is not None:
            self._tell()
        if not self._closed:
            self._watcher.watch(self._session.watched)

    def _tell(self) -> None:
        if self._plan is None or self._is_of_an_earlier_job():
            return
        self._takes_part = True
        self.on_plan(self._plan.for_node(self._node))

    # -- the decider

    def _hear_decider(self, told: Told, paused: bool) -> None:
        now_s = self._loop.now()
        if told.decider != self._decider:
            if told.decider == self._node:
                self._former = (self._decider, self._decider_beat, self._decider_s)
            self._said = None if self._report is not None and self._report.cause is not None else self._said
            self._decider, self._decider_beat, self._decider_s = told.decider, 0, now_s
            self._again = True
        if paused:
            self._decider_s = now_s
            self._former = ("", 0, 0.0)
        if told.decider_beat > self._decider_beat:
            self._decider_beat, self._decider_s = told.decider_beat, now_s
        self._again = self._again or not told.decider

    def _hear_nodes(self, told: Told, paused: bool) -> None:
        assert told.beats is not None, "this node decides"
        now_s = self._loop.now()
        if paused:
            self._members = {node: replace(each, heard_s=now_s) for node, each in self._members.items()}
        for report, gone in told.reports:
            self._members[report.node] = membership.heard(self._members.get(report.node), report, now_s, gone=gone)
        plan = self._plan or Plan()
        for seat in plan.seats:
            if seat.node not in self._members:
                self._members[seat.node] = membership.unheard(seat, plan, now_s)
        for node, number in told.beats.items():
            if node in self._members and number > self._beats.get(node, 0):
                self._members[node] = replace(self._members[node], heard_s=now_s, gone=False)
        former, number, heard_s = self._former
        if former in self._members and told.beats.get(former, 0) <= number:
            self._members[former] = replace(self._members[former], heard_s=heard_s)
        self._former = ("", 0, 0.0)
        self._beats = dict(told.beats)
        for node, each in self._members.items():
            if now_s - each.heard_s > _PROBE_S and not each.gone and each.report.agent_port:
                self._probe(node, each)

    def _probe(self, node: str, silent: Member) -> None:
        """If its host answers that nothing listens where its agent did, the agent is dead, and so are its ranks."""

        def refused() -> None:
            if self._members.get(node) is silent:
                self._members[node] = replace(silent, gone=True)
                self._soon()

        Probe(self._loop, silent.report.address, silent.report.agent_port, on_refused=refused)

    def _decide(self, now_s: float) -> None:
        """`now_s`: when the turn was sent. A beat that was written while its answer was under way is not in it."""
        before = self._plan
        if before is None:
            before = Plan(job=os.urandom(8).hex(), since_s=now_s)
        after = decide.decide(self._settings, before, self._members, now_s)
        if after is not self._plan:
            self._pending = after
        self._members = membership.remembered(after, self._members, now_s)
        self._next_s = decide.next_s(self._settings, after, self._members, now_s)

    # -- time

    def _look(self) -> None:
        if self._closed:
            return
        now_s = self._loop.now()
        late_s = now_s - self._look_s
        if late_s > TURN_S:  # this process was stopped: it could not hear anything
            self._present_s += late_s
        if now_s >= self._answered_s + member.FENCE_S and not self._told_silence:
            self._told_silence = True
            self.on_silence()
        limit_s = self._settings.away_s if self._was_reached else self._settings.join_timeout_s
        if now_s - self._present_s > limit_s:
            self._fail(f"waited {limit_s:g} s for etcd at {self._access}: {self._trouble}; see --rdzv-endpoint")
            return
        fence_s = self._answered_s + member.FENCE_S
        self._look_s = min(now_s + _LOOK_S, fence_s) if fence_s > now_s else now_s + _LOOK_S  # exactly then
        self._loop.call_at(self._look_s, self._look)

    def _fail(self, why: str) -> None:
        if not self._closed:
            self._stop()
            self._worker.end()
            self.on_failed(why)

    def _note_waiting(self) -> None:
        if self._closed or (self._plan is not None and self._plan.stage is not Stage.FORMING):
            return
        if not self._was_reached:
            self.on_note(f"waiting for etcd at {self._access}: {self._trouble}")
        elif self._decider == self._node:
            there = membership.alive(self._settings, self._members, self._loop.now())
            self.on_note(f"waiting for {membership.missing_text(self._settings, there)}")
        self._loop.call_at(self._loop.now() + 6 * NOTE_S, self._note_waiting)
