"""Ends what ranks leave behind: the store, and whatever outlived its rank, however it detached itself.

The agent is the subreaper of all of them: by now each is a child of this process, or a descendant of one.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from gpulaunch.launcher.loop import linux
from gpulaunch.launcher.loop.keeper import KEEPER_COMM
from gpulaunch.launcher.loop.loop import Loop

GENTLE_S = 2.0
"""How long what outlives its rank may take to end by itself after a run that went well."""
CLEAR_S = 5.0
"""How long killed leftovers are waited for before the job goes on without them."""


class Leftovers:
    """Clears up after one attempt, once; asked again, less gently."""

    def __init__(self, loop: Loop, *, store_pid: int | None) -> None:
        """`store_pid`: the store of the attempt; `store_ended` tells that it is gone."""
        self._loop = loop
        self._store_pid = store_pid
        self._keep: frozenset[int] = frozenset()
        self._gently = False
        self._deadline_s = 0.0
        self._done: Callable[[list[int]], None] | None = None

    def clear(self, keep: frozenset[int], *, gently: bool, done: Callable[[list[int]], None]) -> None:
        """End all children but `keep`; then `done`, with the pids that the kernel does not let go."""
        loop = self._loop
        self._keep = keep
        self._gently = gently
        again, self._done = self._done is not None, done
        if self._store_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store_pid, signal.SIGKILL)
        self._deadline_s = loop.now() + (GENTLE_S if gently else 0.0) + CLEAR_S
        if not again:
            loop.on_orphan(lambda _: self._check())
        self._signal_all(signal.SIGTERM if gently else signal.SIGKILL)
        if gently:
            loop.call_at(loop.now() + GENTLE_S, self._kill_if_waiting)
        loop.call_at(self._deadline_s - CLEAR_S / 2 + 0.01, self._check)
        loop.call_at(self._deadline_s, self._check)
        loop.call_at(loop.now(), self._check)

    def store_ended(self) -> None:
        """The store is gone."""
        self._store_pid = None
        self._check()

    def _kill_if_waiting(self) -> None:
        if self._done is not None:
            self._signal_all(signal.SIGKILL)

    def _left(self) -> list[int]:
        mine = [pid for pid in linux.children_of(os.getpid()) if pid not in self._keep and pid != self._store_pid]
        return [pid for pid in mine if linux.state_of(pid) not in ("Z", "X", "")]

    def _signal_all(self, signum: int) -> None:
        """Signal what is left, but the keeper of a launcher that ran inside a rank: it cleans up and ends by itself."""
        late = self._loop.now() > self._deadline_s - CLEAR_S / 2
        for pid in self._left():
            for one in (pid, *linux.descendants_of(pid)):
                if late or linux.comm_of(one) != KEEPER_COMM:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(one, signum)

    def _check(self) -> None:
        if self._done is None:
            return
        left = self._left()
        now_s = self._loop.now()
        if (left or self._store_pid is not None) and now_s < self._deadline_s:
            if left and (not self._gently or now_s > self._deadline_s - CLEAR_S):
                # The orphans of the orphans just killed have become ours meanwhile.
                self._signal_all(signal.SIGKILL)
            return
        done, self._done = self._done, None
        self._loop.on_orphan(lambda _: None)
        self._loop.forget_unclaimed()
        done(left)
