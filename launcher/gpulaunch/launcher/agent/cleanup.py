"""Ends what ranks leave behind: the store, and processes that outlive their rank, however they detached themselves.

The agent is the subreaper of all of them: by now each is a child or a descendant of this process. If the agent had
children when it began, or is PID 1, not every child belongs to a rank: a service started before `exec gpulaunch`, and
its descendants, are also re-parented to the agent. Then the ranks' processes are those in a rank's session and those
that carry the run's mark.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.loop.orphan_reaper import comes_last
from gpulaunch.profiler.redact import redact_words

GENTLE_S = 2.0
"""How long processes that outlive their rank may take to exit by themselves after a successful run."""
CLEAR_S = 5.0
"""How long to wait for killed leftovers before the job continues without them."""
SETTLE_S = 0.5
"""How long processes that exit with their rank (a resource tracker, a worker) may take before they are reported."""
_NAMED = 3
_NAME_CHARS = 60


class LeftoverPolicy(Enum):
    """What to do with processes that outlive their rank."""

    KILL = "kill"
    END = "end"
    """SIGTERM, and SIGKILL after `GENTLE_S`."""
    WAIT = "wait"
    LEAVE = "leave"


class Cleanup:
    """Cleans up after one attempt, once; a second request is less gentle."""

    def __init__(
        self,
        loop: Loop,
        *,
        run_id: str,
        sessions: Collection[int],
        foreign: bool,
        store_pid: int | None,
        told: Callable[[list[int]], None],
    ) -> None:
        """Search among this process's children.

        Args:
            loop: Reports their exits.
            run_id: The mark in the environment of every process that the ranks start.
            sessions: The sessions of the ranks.
            foreign: Whether this process may have children that do not belong to a rank.
            store_pid: The store of the attempt; `store_ended` reports its exit.
            told: Called once after a successful run with the processes that are waited for, left running, or ended.
        """
        self._loop = loop
        self._run_id = run_id
        self._sessions = sessions
        self._foreign = foreign
        self._store_pid = store_pid
        self._told = told
        self._keep: frozenset[int] = frozenset()
        self._how = LeftoverPolicy.KILL
        self._began_s = 0.0
        self._done: Callable[[list[int]], None] | None = None

    def clear(self, keep: frozenset[int], how: LeftoverPolicy, *, done: Callable[[list[int]], None]) -> None:
        """Clean up everything except `keep`; then call `done` with the pids that could not be ended."""
        loop = self._loop
        self._keep = keep
        self._how = how
        again, self._done = self._done is not None, done
        self._end_store()
        self._began_s = loop.now()
        if not again:
            loop.on_orphan(lambda _: self._check())
        if how is LeftoverPolicy.END and (left := [pid for pid in self._left() if not comes_last(pid)]):
            self._told(left)
        if how in (LeftoverPolicy.KILL, LeftoverPolicy.END):
            self._signal_all(signal.SIGKILL if how is LeftoverPolicy.KILL else signal.SIGTERM)
        for after_s in (0.0, SETTLE_S, GENTLE_S, GENTLE_S + CLEAR_S / 2, GENTLE_S + CLEAR_S):
            loop.call_at(self._began_s + after_s, lambda: self._check(due=True))

    def store_started(self, pid: int) -> None:
        """The store of this attempt has only now been announced: end it, too."""
        self._store_pid = pid
        self._end_store()

    def store_ended(self) -> None:
        """The store has exited."""
        self._store_pid = None
        self._check()

    def _end_store(self) -> None:
        if self._store_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store_pid, signal.SIGKILL)

    def _left(self) -> list[int]:
        mine = [pid for pid in linux.children_of(os.getpid()) if pid not in self._keep and pid != self._store_pid]
        return [
            pid
            for pid in mine
            if linux.state_of(pid) not in ("Z", "X", "")
            and (not self._foreign or is_of_ranks(pid, self._sessions, self._run_id))
        ]

    def _signal_all(self, signum: int) -> None:
        """Signal the remaining processes; those that clean up after others and then exit, only when they are late."""
        late = self._loop.now() - self._began_s >= GENTLE_S
        for pid in self._left():
            for one in (pid, *linux.descendants_of(pid)):
                if late or not comes_last(one):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(one, signum)

    def _check(self, *, due: bool = False) -> None:
        if self._done is None:
            return
        left = self._left()
        for_s = self._loop.now() - self._began_s
        if self._how in (LeftoverPolicy.WAIT, LeftoverPolicy.LEAVE):
            if due and left and for_s >= SETTLE_S:
                self._told(left)
                self._told = _nothing
                left = left if self._how is LeftoverPolicy.WAIT else []
            if left or (self._store_pid is not None and for_s < CLEAR_S):
                return
        elif (left or self._store_pid is not None) and for_s < GENTLE_S + CLEAR_S:
            if left and (self._how is LeftoverPolicy.KILL or for_s >= GENTLE_S):
                # The orphans of the orphans just killed have been re-parented to us meanwhile.
                self._signal_all(signal.SIGKILL)
            return
        done, self._done = self._done, None
        self._loop.on_orphan(lambda _: None)
        self._loop.forget_unclaimed()
        done(left)


def is_of_ranks(pid: int, sessions: Collection[int], run_id: str) -> bool:
    """Whether a process is in a session of the ranks or carries the run's mark."""
    return linux.session_of(pid) in sessions or linux.is_of_run(pid, run_id)


def sentence(pids: Sequence[int], how: LeftoverPolicy) -> str:
    """The message about processes that outlive their ranks after a successful run."""
    named = [f"pid {pid} ({_command(pid)})" for pid in pids[:_NAMED]]
    more = [f"{len(pids) - _NAMED} more"] if len(pids) > _NAMED else []
    which = ", ".join([*named, *more])
    if how is LeftoverPolicy.END:
        return f"ending processes left running by the ranks: {which}"
    if how is LeftoverPolicy.WAIT:
        return f"waiting for processes left running by the ranks: {which}; to leave them: --leftovers leave"
    return f"left running: {which}; to wait for it or end it: --leftovers wait or end"


def _command(pid: int) -> str:
    words = " ".join(redact_words(linux.cmdline_of(pid)))
    return words if len(words) <= _NAME_CHARS else f"{words[:_NAME_CHARS]}..."


def _nothing(pids: list[int]) -> None:
    """Already reported."""
