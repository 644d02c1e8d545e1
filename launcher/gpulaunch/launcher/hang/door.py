"""The agent's door to hang detection: a timer that looks at the ranks, and the helper process while one is suspected.

On the agent's loop nothing waits: reading the pages is microseconds, everything else happens in the helper.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpulaunch.launcher.hang.values import Limits, Verdict, to_json, verdict_from
from gpulaunch.launcher.hang.watch import Look, Suspicion, Watch
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.loop import Exit, Loop, Timer
from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.page import PageSnapshot

__all__ = ["HangWatch"]

_TICK_S = 1.0
_MOVES_S = 2.0
"""A rank that has passed an edge so lately is not stopped: nobody asks /proc."""
_LOOK_S = 15.0
"""How long the helper may take for one answer, beside its own waiting."""
_AFTER_TROUBLE_S = 10.0
_ALL_EDGES = Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER
_ENTRY = "import sys; from gpulaunch.launcher.cli.stacks import run; sys.exit(run())"


class HangWatch:
    """Watches the ranks of one attempt on this node.

    Args:
        loop: the agent's.
        limits: the numbers; `cap_s` and `first_step_s` are the user's.
        ranks: rank -> pid of this node's ranks.
        read: gives a rank's page, None where it has none: such a rank is judged by definite evidence only.
        rank_dir: where a rank's own files are.
        on_suspicion: called with one sentence when a rank has gone beyond its allowance, once until all move again.
        on_hang: called with the verdict, once until all ranks move again.
        path: where the evidence of a hang is written (`.../attempts/<k>/hang.json`).
        whole: these ranks are all ranks of the job, so that there is nobody else whom they could be waiting for.
    """

    def __init__(
        self,
        loop: Loop,
        limits: Limits,
        ranks: Mapping[int, int],
        read: Callable[[int], PageSnapshot | None],
        rank_dir: Callable[[int], str],
        on_suspicion: Callable[[str], None],
        on_hang: Callable[[Verdict], None],
        *,
        path: str,
        whole: bool,
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._ranks = dict(ranks)
        self._read = read
        self._rank_dir = rank_dir
        self._on_suspicion = on_suspicion
        self._on_hang = on_hang
        self._path = path
        self._whole = whole
        self._watch = Watch(limits)
        self._timer: Timer | None = None
        self._helper: _Helper | None = None
        self._suspicion: Suspicion | None = None
        self._told = self._judged = False
        self._look_at_s = 0.0
        self.num_suspicions = 0
        self.trouble = ""
        """Why no helper could look, or ""; for the record."""

    def start(self) -> None:
        """Begin to watch."""
        self._timer = self._loop.call_at(self._loop.now() + _TICK_S, self._tick)

    def stop(self) -> None:
        """Watch no more; the helper is killed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_helper()

    def ended(self, rank: int) -> None:
        """A rank's process has ended: nobody waits for it to move."""
        self._ranks.pop(rank, None)

    def helper_pids(self) -> frozenset[int]:
        """The helper, while there is one: not a leftover of the ranks."""
        return frozenset() if self._helper is None else frozenset({self._helper.pid})

    # -- the timer

    def _tick(self) -> None:
        now_s = self._loop.now()
        self._timer = self._loop.call_at(now_s + _TICK_S, self._tick)
        looks = [self._look(rank, pid, now_s) for rank, pid in self._ranks.items()]
        before, self._suspicion = self._suspicion, self._watch.tick(now_s, looks)
        if self._suspicion is None:
            self._told = self._judged = False
            self._end_helper()
            return
        if self._suspicion.beyond and not self._told:
            self._told = True
            self.num_suspicions += 1
            self._on_suspicion(self._suspicion.sentence)
        if before is None or set(self._suspicion.beyond) - set(before.beyond):
            self._look_at_s = 0.0  # what was said before is of another time
        if not self._judged and now_s >= self._look_at_s and (self._helper is None or not self._helper.busy):
            self._ask(self._suspicion)

    def _look(self, rank: int, pid: int, now_s: float) -> Look:
        page = self._read(rank)
        # A probe that has taken its edges out of service (a fault of ours) tells nothing of the rank any more.
        if page is None or not page.armed or page.hooks_unavailable & _ALL_EDGES == _ALL_EDGES:
            return Look(rank=rank, pid=pid, state=linux.state_of(pid))
        edge_s = page.last_edge_ns / 1e9
        return Look(
            rank=rank,
            pid=pid,
            state="" if now_s - edge_s < _MOVES_S else linux.state_of(pid),
            armed=True,
            region=page.region,
            edge_s=edge_s,
            armed_s=page.started_ns / 1e9,
            steps=page.steps_made,
            begun=page.first_step_end_ns != 0,
            saving=page.checkpoint_blocking_since_ns != 0,
        )

    # -- the helper

    def _ask(self, suspicion: Suspicion) -> None:
        request = {
            "standings": [to_json(standing) for standing in suspicion.standings],
            "dirs": {standing.rank: self._rank_dir(standing.rank) for standing in suspicion.standings},
        }
        try:
            if self._helper is None:
                first = {"limits": to_json(self._limits), "whole": self._whole, "path": self._path}
                self._helper = _Helper(self._loop, first, self._answered)
            self._helper.ask(request, within_s=self._limits.sample_s + _LOOK_S)
        except OSError as error:
            self._failed(suspicion, f"the helper cannot be started: {error.strerror}")

    def _answered(self, answer: dict[str, Any]) -> None:
        suspicion = self._suspicion
        if suspicion is None or self._judged:
            return
        try:
            verdict = verdict_from(answer["verdict"])
        except (KeyError, TypeError, ValueError):
            self._failed(suspicion, str(answer.get("error", "the helper gave no verdict")))
            return
        self._take(verdict)

    def _failed(self, suspicion: Suspicion, why: str) -> None:
        """Nobody could look: what the clock alone tells still holds."""
        from gpulaunch.launcher.hang.judge import judge

        self.trouble = why
        self._end_helper()
        verdict = judge(suspicion.standings, {}, self._limits, whole=False)
        self._take(replace(verdict, notes=(f"no stacks: {why}",), again_s=_AFTER_TROUBLE_S))

    def _take(self, verdict: Verdict) -> None:
        if verdict.hung:
            self._judged = True
            self._end_helper()
            self._on_hang(verdict)
        else:
            self._look_at_s = self._loop.now() + verdict.again_s

    def _end_helper(self) -> None:
        self._look_at_s = 0.0
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


class _Helper:
    """One helper process and the request it works on."""

    def __init__(self, loop: Loop, first: Mapping[str, Any], on_answer: Callable[[dict[str, Any]], None]) -> None:
        """Start it. Raises OSError."""
        self._loop = loop
        self._on_answer = on_answer
        self._got = b""
        self._deadline: Timer | None = None
        self._gone = False
        theirs_in, self._to = os.pipe2(os.O_CLOEXEC)
        self._from, theirs_out = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            # `-P`: the user's directory must not shadow what the helper imports.
            argv = [sys.executable, "-P", "-c", _ENTRY]
            self.pid = child.start(argv, os.environ, stdin_fd=theirs_in, stdout_fd=theirs_out, stderr_fd=null)
        except OSError:
            os.close(self._to)
            os.close(self._from)
            raise
        finally:
            for fd in (theirs_in, theirs_out, null):
                os.close(fd)
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)
        loop.watch_read(self._from, self._hear)
        loop.watch_pid(self.pid, self._ended)
        self._send(first)

    @property
    def busy(self) -> bool:
        """It has a request to answer."""
        return self._deadline is not None

    def ask(self, request: Mapping[str, Any], *, within_s: float) -> None:
        """Send a request; `on_answer` gets the answer, or {"error": ...}. Raises OSError."""
        self._send(request)
        late = {"error": f"the helper did not answer within {within_s:.0f} s"}
        self._deadline = self._loop.call_at(self._loop.now() + within_s, lambda: self._answer(late))

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode("ascii") + b"\n"
        # A request is far smaller than the pipe; what does not fit is trouble, not something to wait for.
        if os.write(self._to, data) != len(data):
            raise OSError(0, "it does not read what it is asked")

    def _ended(self, _: Exit) -> None:
        self._gone = True  # reaped, so its number may be another's soon; its pipe tells the rest

    def _hear(self) -> None:
        try:
            data = os.read(self._from, 65536)
        except BlockingIOError:
            return
        self._got += data
        if not data:
            self._loop.unwatch_read(self._from)
            self._answer({"error": "the helper ended"})
        elif self._got.endswith(b"\n"):
            line, self._got = self._got, b""
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                answer = {"error": "the helper answered no JSON"}
            self._answer(answer)

    def _answer(self, answer: dict[str, Any]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._on_answer(answer)

    def end(self) -> None:
        """Kill it and what it has started (py-spy)."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._loop.unwatch_read(self._from)
        os.close(self._from)
        os.close(self._to)
        if not self._gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # it leads a session of its own
