"""The rendezvous of several nodes, which share a plan. What a node does is in `member`, what the plan says in `decide`.

    --nnodes MIN:MAX --rdzv-endpoint HOST:PORT
        Nodes come and go. The agent that finds the endpoint's address on its own machine, and its port free, is the
        leader: it keeps the plan (`plan_server`). All others report to it (`plan_client`).
    --rdzv-backend etcd
        The plan is in etcd, and any node may be lost (`plan_etcd`).
    --nnodes N --node-rank R --master-addr HOST --master-port PORT
        Node 0 leads, for the whole job, and a node that is lost ends it.

The store of each generation listens on a port of its own, on the node of rank 0; that of a fixed group at the port
where the nodes have met, as under torchrun.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.policy.restart import REQUEUE, Decision
from gpulaunch.launcher.rendezvous import member
from gpulaunch.launcher.rendezvous.base import Callbacks, PortInUseError, RendezvousError, World, unset
from gpulaunch.launcher.rendezvous.codec import clean
from gpulaunch.launcher.rendezvous.etcd_access import Access
from gpulaunch.launcher.rendezvous.listen import is_here, listen
from gpulaunch.launcher.rendezvous.member import News
from gpulaunch.launcher.rendezvous.messages import Register
from gpulaunch.launcher.rendezvous.plan import NodeState, Offer, Plan, Report, Settings, Stage
from gpulaunch.launcher.rendezvous.plan_client import PlanClient
from gpulaunch.launcher.rendezvous.plan_server import PlanServer

if TYPE_CHECKING:
    from gpulaunch.launcher.rendezvous.plan_etcd import PlanEtcd


class GroupRendezvous(Callbacks):
    """One node's part in the rendezvous. The leader binds the port here; raises RendezvousError if it cannot."""

    def __init__(
        self,
        loop: Loop,
        *,
        run_id: str,
        settings: Settings,
        order: int | None,
        nproc: int,
        addr: str,
        port: int,
        leads: bool | None = None,
        token: bytes | None = None,
        host: str | None = None,
        etcd: Access | None = None,
    ) -> None:
        """One node of a job.

        Args:
            loop: calls back.
            run_id: the same on all nodes.
            settings: the same on all nodes.
            order: this node's number among all, if it was given one; of a fixed group its rank.
            nproc: how many ranks it has.
            addr: where the nodes meet.
            port: the leader's there.
            leads: whether the others meet here; None: if the endpoint is an address of this machine. Of a fixed group
                node 0 leads.
            token: only nodes that have it take part; None: all that reach the port.
            host: its name for users; None: the machine's.
            etcd: where they meet instead; None: at a leader.
        """
        super().__init__()
        self.on_note: Callable[[str], None] = unset
        self._loop = loop
        self._settings = settings
        self._addr = addr
        self._port = port
        name = clean(host or os.uname().nodename)
        if settings.fixed:
            leads = order == 0
        listener = None if etcd is not None else _leads(addr, port, leads)
        # Only where the nodes meet: a job on loopback stays there.
        own = listener.getsockname()[0] if listener is not None and settings.fixed else ""
        self._alive = listen("" if own in ("::", "0.0.0.0") else own, 0, others=True)  # noqa: S104
        port_of_agent = int(self._alive.getsockname()[1])
        self._report = Report(node=os.urandom(8).hex(), host=name, order=order, nproc=nproc, agent_port=port_of_agent)
        self._store = listener if settings.fixed else None
        self._opened = self._closed = self._alone = self._over = self._leaving = False
        self.plan = Plan()
        """The newest that was heard, with this node's seat only."""
        self._idle_since_s: float | None = None
        """Since when it says that no rank works."""
        register = Register(
            run_id=clean(run_id),
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            max_restarts=settings.limits.max_restarts,
            replicate=settings.replicate,
            fixed=settings.fixed,
        )
        self._keeper = "etcd" if etcd is not None else settings.leader
        self._post: PlanServer | PlanClient | PlanEtcd
        if etcd is not None:
            from gpulaunch.launcher.rendezvous.plan_etcd import PlanEtcd  # loads TLS and HTTP

            self._post = PlanEtcd(loop, etcd, register, settings, node=self._report.node)
        elif listener is not None:
            self._port = int(listener.getsockname()[1])
            redial = self._alive if settings.fixed else None
            self._post = PlanServer(loop, listener, register, settings, name, addr, token, redial)
        else:
            self._post = PlanClient(loop, register, settings, addr=addr, port=port, token=token)
        self._post.on_plan = self._heard
        self._post.on_failed = self._fail
        self._post.on_note = lambda text: self.on_note(text)
        self._post.on_silence = self._fence

    @property
    def port(self) -> int:
        """Where the nodes meet; chosen by the kernel if the leader was given 0."""
        return self._port

    def open(self) -> None:
        """Let the nodes find each other while this one still prepares to join. Idempotent."""
        if not self._opened:
            self._opened = True
            self._post.open()
            self._post.publish(self._report)

    def join(self, attempt: int, offers: Sequence[Offer] = ()) -> None:  # noqa: ARG002  # the plan counts
        """No rank is alive here, and these are the checkpoints that this node can read; see `Rendezvous`."""
        self.open()
        port = self._port
        if not self._settings.fixed:
            if self._store is not None:
                self._store.close()
            try:
                self._store = listen("", 0, others=True)
            except RendezvousError as err:
                self._fail(str(err))
                return
            port = int(self._store.getsockname()[1])
        self._publish(member.ready(self._report, offers, port))
        if self._alone or self._over:  # it was found out while this node paused
            self._loop.call_at(self._loop.now(), lambda: self._end(self.plan.why))

    def idle(self, idle: bool) -> None:
        """The ranks of this node are known not to work, any of them, or not any more."""
        self._publish(member.idle(self._report, idle))

    def others_idle_s(self) -> float | None:
        """How long no rank of the job has worked, as the nodes tell; this one counts, too; see `Rendezvous`."""
        return None if self._idle_since_s is None else self._loop.now() - self._idle_since_s

    def succeeded(self) -> None:
        """All ranks of this node have ended successfully."""
        self._publish(member.succeeded(self._report))

    def failed(self, cause: Cause) -> None:
        """The ranks of this node are being ended; see `Rendezvous`."""
        self._publish(member.ending(self._report, cause))

    def judge(self, cause: Cause) -> None:
        """No rank of the generation is alive here: ask whether there is another."""
        self._publish(member.ended(self._report, cause))
        if self._alone or self._over:
            self.on_judged(self._decision(), "")

    def leave(self) -> bool:
        """The leader is the last to leave; see `Rendezvous`."""
        self._leaving = True
        return self._over or self._alone or self._post.leave()

    def close(self) -> None:
        """Leave. The others go on without this node if there are enough of them."""
        if not self._closed:
            self._closed = True
            if not self._over:
                self._post.close()
            for sock in (self._store, self._alive):
                if sock is not None:
                    sock.close()

    def _publish(self, report: Report) -> None:
        if report != self._report:
            self._report = report
            self._post.publish(report)
            self._loop.call_at(self._loop.now(), self._look)  # what was heard before may mean something else now

    def _fail(self, why: str) -> None:
        """The plan is out of reach, or this node is refused."""
        if self._closed or self._leaving or self._over:
            return
        self._alone = True
        if self._report.state in (NodeState.RUNNING, NodeState.SUCCEEDED):
            self.on_node_lost(why)
        elif self._report.state is NodeState.ENDED:
            self.on_judged(self._decision(), why)
        elif self._report.state is not NodeState.ENDING:
            self._end(why)

    def _end(self, why: str) -> None:
        if not self._closed:
            self.on_over(self._decision(), why)

    def _fence(self) -> None:
        """The leader, or etcd, does not answer: the others may go on without this node."""
        if self.plan.stage is Stage.OVER:  # no other group follows: these ranks may save as long as they like
            return
        if self._report.state in (NodeState.RUNNING, NodeState.SUCCEEDED, NodeState.ENDING):
            why = f"{self._keeper} has not answered for {member.FENCE_S:g} s: the ranks here are ended"
            if self._report.cause is None:
                self._publish(member.ending(self._report, Cause(text=why, tier=Tier.ECHO)))
            self.on_fenced(why)

    def _decision(self) -> Decision:
        """What comes next, on every node alike."""
        plan = self.plan
        if plan.stage is Stage.OVER:
            why = plan.decision.why if plan.decision is not None else ""
            return Decision(again=False, wait_s=0.0, charged=False, why=why, code=plan.exit_code)
        if self._alone:  # the group is out of reach: the same job may go on later, or on other nodes
            return Decision(again=False, wait_s=0.0, charged=False, why="", code=REQUEUE if plan.generation else None)
        return plan.decision or Decision(again=True, wait_s=0.0, charged=False, why="", code=None)

    def _heard(self, plan: Plan) -> None:
        self.plan = plan
        if not plan.idle or plan.generation != self._report.generation:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = self._loop.now()
        self._look()

    def _look(self) -> None:
        """Compare what this node does with the plan."""
        if self._closed or self._over or self._leaving:
            return
        plan, state = self.plan, self._report.state
        report, news = member.receive(self._report, plan)
        # Nothing follows: the leader, which waits for this node to know, may leave.
        self._over = news is News.DONE or (news is News.JUDGED and plan.stage is Stage.OVER)
        self._publish(report)
        if self._over:
            self._post.close()
        match news:
            case News.JOINED:
                self.on_joined(self._world(plan))
            case News.STOP if plan.preempted:
                self.on_peer_preempted(plan.why)
            case News.STOP if plan.saves:
                goes_on = "continue without it" if plan.blamed else "restart with it"
                self.on_saves(f"{plan.why}: the ranks of this node also save, and {goes_on}")
            case News.STOP if plan.lost and plan.stage is Stage.OVER:
                self.on_node_lost(plan.why)
            case News.STOP:
                self.on_peer_failed(plan.stage is Stage.OVER, plan.why)
            case News.JUDGED if state is NodeState.ENDED:
                self.on_judged(self._decision(), "" if plan.blamed in ("", report.node) else plan.why)
            case News.JUDGED:
                self._end(plan.why)
            case News.DONE:
                self.on_peers_done()
            case None:
                pass

    def _world(self, plan: Plan) -> World:
        seat = plan.seat
        assert seat is not None, "joined with it"
        return World(
            attempt=plan.attempt,
            nnodes=plan.nnodes,
            node_rank=seat.node_rank,
            first_rank=seat.first_rank,
            world_size=plan.world_size,
            master_addr=self._addr if self._settings.fixed else plan.store_addr,
            master_port=plan.store_port,
            local_addr=self._post.local_addr,
            store_fd=self._store.fileno() if self._store is not None and seat.node_rank == 0 else None,
            job=plan.job,
            generation=plan.generation,
            resume=plan.resume,
        )


def _leads(addr: str, port: int, leads: bool | None) -> socket.socket | None:
    """A socket that listens at the endpoint, on the node that leads: if it was not told, that is the one with an
    address of this machine and the port free."""
    if leads is False or (leads is None and not is_here(addr, port)):
        return None
    try:
        return listen(addr, port, others=True)
    except PortInUseError:  # by the leader, or by a stranger, who will not answer as one
        if leads:
            raise
        return None
