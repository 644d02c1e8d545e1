"""How an attempt's ranks are started: forked from a server that has torch loaded, or spawned where that is impossible.

Keeps the fork server: the next attempt uses the same one, and a dead one is replaced while it is still needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpulaunch.launcher.agent import packages
from gpulaunch.launcher.agent.rank_group import RankGroup
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.job import plan
from gpulaunch.launcher.job.imports import Reading, preloaded
from gpulaunch.launcher.job.job_json import with_preloaded
from gpulaunch.launcher.job.spec import JobSpec
from gpulaunch.launcher.loop.forkserver import ForkServer, Imports, Ready, Started

_MAX_LOST_SERVERS = 3
"""After this many fork servers that died before they were ready, ranks are spawned."""


def imports_of(
    spec: JobSpec,
    base_env: Mapping[str, str],
    reading: Reading,
    refused: Mapping[str, str],
    *,
    forking: bool,
    agent_store: bool,
) -> Imports:
    """What the fork server of a job imports.

    Args:
        spec: the job.
        base_env: the fork server's environment.
        reading: what is known about the program.
        refused: packages that ranks of this job cannot share, and why; those of earlier jobs are added.
        forking: whether ranks are forked from it, too; otherwise it is needed for the store only.
        agent_store: whether it serves the store.
    """
    names = list(reading.packages) if forking else []
    fixed = {k: v for k, v in reading.environment.items() if k not in reading.defaults or k not in base_env}
    of_ranks = plan.rank_environment(
        spec, local_rank=0, attempt=0, master_port=0, error_file="", use_agent_store=agent_store
    )
    return Imports(
        torch=bool(preloaded(names, trains=reading.trains)),
        dynamo=forking and reading.trains,  # nearly half of the import time
        packages=names,
        refused=packages.recall(spec, names) | dict(refused),
        environment=fixed if forking else {},
        before_torch=sorted(reading.before_torch),
        of_a_rank=sorted(name for name, value in of_ranks.items() if base_env.get(name) != value),
    )


@dataclass(frozen=True, kw_only=True)
class StarterEvents:
    """Callbacks of a starter."""

    start_failed: Callable[[frozenset[int], str], None]
    """The local ranks that run although the others cannot be started, and why."""
    no_store: Callable[[str], None]
    """Ranks wait for a store that cannot be started; the argument is the reason."""


class Starter:
    """Starts the attempts one after another."""

    def __init__(
        self,
        context: RunContext,
        *,
        say: Callable[[str], None],
        reading: Reading,
        spawn_because: str,
        events: StarterEvents,
        on_pid: Callable[[], None],
    ) -> None:
        """`spawn_because`: why the ranks are not to be forked, or ""; `on_pid`: the fork server's pid has changed."""
        self._context = context
        self._spec = context.spec
        self._say = say
        self._reading = reading
        self._spawn_because = spawn_because
        self._events = events
        self._on_pid = on_pid
        self._server: ForkServer | None = None
        self._inherited = context.fork_server
        self._lost_servers = 0
        self._refused: dict[str, str] = {}  # in this job, because ranks had to restart
        self._outdated = False  # the fork server has imported one of them
        self._known: dict[str, str] = {}  # packages that the fork server must not import
        self._group: RankGroup | None = None
        self._over = False
        self._not_noted: Ready | None = None  # not written to job.json yet
        self.agent_store = context.use_agent_store

    @property
    def pid(self) -> int | None:
        """The fork server's pid, if it runs."""
        return self._server.pid if self._server is not None else None

    def start_server(self) -> None:
        """Start the fork server first: everything waits for `import torch`, if the program may need it."""
        self._server = ForkServer(
            loop=self._context.loop, on_ready=self._ready, on_started=self._started, on_lost=self._lost
        )
        base, forking = self._context.base_env, not self._spawn_because
        wanted = imports_of(
            self._spec, base, self._reading, self._refused, forking=forking, agent_store=self.agent_store
        )
        self._known = wanted.refused
        inherited, self._inherited = self._inherited, None
        try:
            self._server.start(base, wanted, inherited)
        except OSError as err:
            self._server = None
            self._do_without_server(f"the fork server cannot be started: {err.strerror}")

    def start(self, group: RankGroup) -> None:
        """Start this attempt's store and ranks, now or as soon as the fork server is ready."""
        self._group = group
        self._over = False
        if self._outdated and self._server is not None and not self._spawn_because:
            self._server.close()  # this attempt gets one without the packages that ranks cannot share
            self._server = None
        self._outdated = False
        if self._server is None and (self.agent_store or not self._spawn_because):
            self.start_server()
        self._start_what_can_be()

    def cancel(self) -> None:
        """The attempt is being cleared: start nothing more for it."""
        self._over = True

    def started_again(self, told: dict[str, Any]) -> None:
        """A forked rank restarts as a plain interpreter, or should but cannot, because of packages it cannot share."""
        self._context.rundir.event("rank_kept_preloaded" if "too_late" in told else "rank_started_again", **told)
        concerned, why = list(told["packages"]), str(told["why"])
        names = [name for name in concerned if name in ("torch", *self._reading.packages)]
        if self._spawn_because or (names and all(name in self._refused for name in names)):
            return  # another rank has reported it
        packages.remember_script(self._spec, names, why)
        self._refused.update(dict.fromkeys(names, why))
        if "torch" in names or not names:
            self._spawn_because, later = why, "ranks are not forked"
        else:
            later = f"{', '.join(names)} is not preloaded"
        self._outdated = True  # not closed yet: its answer with the ranks' pids may not be read yet
        if "too_late" in told:
            self._say(
                f"{why}, too late to take effect ({told['too_late']}): the ranks keep what was imported before the "
                f"fork; from the next start of this script on, {later}"
            )
            return
        twice = "; output printed until then may appear twice" if told["written"] else ""
        lost = f"; {told['threads']} of their threads were ended" if told["threads"] else ""
        self._say(
            f"the ranks restart from the script's first line in new interpreters: {why}{twice}{lost}; from the next "
            f"start of this script on, {later}"
        )

    def close(self) -> None:
        """Ask the fork server to end; while it still imports, it does not read the request, and is not waited for."""
        if self._server is not None:
            self._server.close()
            if self._server.ready is None:
                self._server = None

    def _start_what_can_be(self) -> None:
        assert self._group is not None, "an attempt is started"
        server = self._server if self._server is not None and self._server.ready is not None else None
        if self._spawn_because:
            if server is not None:
                self._group.start_store(server)
            self._group.start_spawned()
        elif server is not None:
            self._group.start_forked(server)

    def _ready(self, ready: Ready) -> None:
        packages.remember({name: why for name, why in ready.refused.items() if name not in self._known})
        self._context.rundir.event("fork_server_ready", pid=ready.pid, loaded=ready.loaded, refused=dict(ready.refused))
        if ready.refused:
            left = "; ".join(f"{name} ({why})" for name, why in ready.refused.items())
            self._say(f"not preloaded, each rank imports it itself: {left}")
        if ready.problem and not self._spawn_because and self._spec.start_method != "fork":
            self._spawn_because = ready.problem
            self._say(f"ranks are spawned, not forked: {ready.problem}")
        self._on_pid()
        if self._group is not None and not self._over:
            self._start_what_can_be()
        self._not_noted = ready
        if self._spawn_because:
            self._note_preloaded()

    def _started(self, started: Started) -> None:
        if self._group is not None:
            self._group.adopt(started)
        self._note_preloaded()

    def _note_preloaded(self) -> None:
        """Write to job.json what the fork server imported: after announcing the ranks, which must not wait for it."""
        ready, self._not_noted = self._not_noted, None
        if ready is None:
            return
        imported, because = (*(["torch"] if ready.torch else []), *ready.loaded), self._spawn_because
        self._context.rundir.amend_json(
            "job.json", lambda document: with_preloaded(document, imported, ready.refused, because)
        )

    def _lost(self) -> None:
        """The fork server has exited. Ranks that run and have their store no longer need it; others get a new one."""
        self._server = None
        group = self._group
        self._context.rundir.event("fork_server_lost", running=bool(group and group.live))
        if group is None or self._over or (group.live and not group.awaits_store):
            return
        self._lost_servers += 1
        if group.asked and not self._spawn_because:
            self._events.start_failed(frozenset(group.live), "the fork server died while it started the ranks")
        elif self._lost_servers < _MAX_LOST_SERVERS:
            self.start_server()
        else:
            self._do_without_server(f"the fork server died {self._lost_servers} times")

    def _do_without_server(self, why: str) -> None:
        """From now on ranks are spawned, and rank 0 hosts the store."""
        group = self._group
        self.agent_store = False
        self._spawn_because = self._spawn_because or why
        self._say(f"ranks are spawned, not forked: {why}")
        if group is None or self._over:
            return
        if group.asked:
            self._events.no_store(f"the ranks wait for a store that cannot be started: {why}")
        else:
            group.agent_store = False
            group.start_spawned()
