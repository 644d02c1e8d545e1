"""Hang detection in the agent: a timer that checks the ranks, and a helper process while one is suspected.

Nothing blocks the agent's loop: reading the segments takes microseconds, everything else happens in the helper.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpulaunch.launcher.hang.announcer import Announcer
from gpulaunch.launcher.hang.values import OVER, TOLD, Limits, RankProgress, Verdict, to_json, verdict_from
from gpulaunch.launcher.hang.watch import RankSnapshot, Watch
from gpulaunch.launcher.loop import child, linux
from gpulaunch.launcher.loop.files import write_json
from gpulaunch.launcher.loop.loop import Exit, Loop, Timer
from gpulaunch.profiler.channel.layout import Hook
from gpulaunch.profiler.channel.segment import SegmentSnapshot

_TICK_S = 1.0
_MOVES_S = 2.0
"""A rank that has passed an edge this recently is not stopped: /proc is not read."""
ANSWER_TIMEOUT_S = 15.0
"""How long the helper may take for one answer, in addition to its own waiting."""
RETRY_AFTER_TROUBLE_S = 10.0
"""When another helper is tried, after one that failed."""
_PIPE_BYTES = 16384
"""A quarter of a pipe's capacity: the first message and a request fit."""
_ALL_EDGES = Hook.DATALOADER | Hook.BACKWARD | Hook.OPTIMIZER
ENTRY = "import sys; from gpulaunch.launcher.cli.stacks import run; sys.exit(run())"
"""The program of the helper's process."""


class HangDetector:
    """Watches the ranks of one attempt on this node.

    Args:
        loop: the agent's.
        limits: the thresholds; `timeout_s` and `first_step_s` are the user's.
        ranks: rank -> pid of this node's ranks.
        read: returns a rank's segment, None if it has none: such a rank is judged by definite evidence only.
        rank_dir: where a rank's own files are.
        on_late: called with a verdict that only reports, and again whenever the stall has lasted twice as long.
        on_over: called when the reported ranks have moved again or ended, with those that moved, and after how long.
        on_hang: called with a verdict that acts, once until all ranks move again.
        path: where the evidence of a hang is written (`.../attempts/<k>/hang.json`).
        store_pid: returns the process of the ranks' store, None if a rank hosts it.
        whole: these are all ranks of the job, so they cannot be waiting for any other.
        on_idle: called when it changes whether the ranks are known not to work, any of them.
        others_idle_s: returns how long no rank of another node has worked; infinite if there is none; None: one works.
    """

    def __init__(
        self,
        loop: Loop,
        limits: Limits,
        ranks: Mapping[int, int],
        read: Callable[[int], SegmentSnapshot | None],
        rank_dir: Callable[[int], str],
        on_late: Callable[[Verdict], None],
        on_over: Callable[[Sequence[int], float], None],
        on_hang: Callable[[Verdict], None],
        *,
        path: str,
        whole: bool,
        store_pid: Callable[[], int | None] = lambda: None,
        on_idle: Callable[[bool], None] = lambda _: None,
        others_idle_s: Callable[[], float | None] = lambda: math.inf,
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._ranks = dict(ranks)
        self._read = read
        self._rank_dir = rank_dir
        self._on_late = on_late
        self._on_over = on_over
        self._on_hang = on_hang
        self._path = path
        self._whole = whole
        self._store_pid = store_pid
        self._on_idle = on_idle
        self._others_idle_s = others_idle_s
        self._idle = False
        self._watch = Watch(limits)
        self._telling = Announcer()
        self._timer: Timer | None = None
        self._helper: _Helper | None = None
        self._standings: tuple[RankProgress, ...] = ()
        self._late: frozenset[int] = frozenset()
        self._judged = False
        self._look_at_s = 0.0
        self.trouble = ""
        """Why no helper could run, or ""; for the record."""

    def start(self) -> None:
        """Start watching."""
        self._timer = self._loop.call_at(self._loop.now() + _TICK_S, self._tick)

    def stop(self) -> None:
        """Stop watching; the helper is killed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_helper()

    def ended(self, rank: int) -> None:
        """A rank's process has ended: do not wait for it to move. It may have moved since the last second."""
        if self._telling.from_s:
            self._follow()
        self._ranks.pop(rank, None)
        if self._telling.from_s:
            self._follow()

    def helper_pids(self) -> frozenset[int]:
        """The helper, while it runs: not a leftover of the ranks."""
        return frozenset() if self._helper is None else frozenset({self._helper.pid})

    # -- the timer

    def _tick(self) -> None:
        now_s = self._loop.now()
        self._timer = self._loop.call_at(now_s + _TICK_S, self._tick)
        self._follow()
        before, self._late = (
            self._late,
            frozenset(one.rank for one in self._standings if one.stopped_s or one.quiet_s >= one.allowed_s),
        )
        if not self._standings:
            return
        if self._late - before:
            self._look_at_s = 0.0  # the previous result is outdated
        if not self._judged and now_s >= self._look_at_s and (self._helper is None or not self._helper.busy):
            self._ask()

    def _follow(self) -> None:
        """Read the segments, and withdraw reports that are over."""
        now_s = self._loop.now()
        self._standings = self._watch.tick(now_s, [self._look(rank, pid, now_s) for rank, pid in self._ranks.items()])
        if not self._standings:
            self._judged = False
            self._end_helper()
            self._is_idle(False)
        elif any(one.armed and one.region and one.quiet_s < self._limits.floor_s for one in self._standings):
            self._is_idle(False)
        over = self._telling.resolved(self._watch.moved_s)
        if over is not None:
            self._on_over(*over)

    def _look(self, rank: int, pid: int, now_s: float) -> RankSnapshot:
        segment = self._read(rank)
        # A probe that has disabled its edges (a fault of ours) says nothing about the rank any more.
        if segment is None or not segment.armed or segment.hooks_unavailable & _ALL_EDGES == _ALL_EDGES:
            return RankSnapshot(rank=rank, pid=pid, state=linux.state_of(pid))
        edge_s = segment.last_edge_ns / 1e9
        return RankSnapshot(
            rank=rank,
            pid=pid,
            state="" if now_s - edge_s < _MOVES_S else linux.state_of(pid),
            armed=True,
            region=segment.region,
            edge_s=edge_s,
            armed_s=segment.started_ns / 1e9,
            steps=segment.steps_made,
            begun=segment.first_step_end_ns != 0,
            saving=segment.checkpoint.blocking_since_ns != 0,
            left_group=segment.left_group_ns > segment.last_edge_ns,
        )

    # -- the helper

    def _ask(self) -> None:
        request = {
            "standings": [to_json(standing) for standing in self._standings],
            "dirs": {standing.rank: self._rank_dir(standing.rank) for standing in self._standings},
            "store_pid": self._store_pid(),
            "tell_from_s": self._telling.from_s,
            "others_idle_s": self._others_idle_s(),
        }
        try:
            if self._helper is None:
                first = {"limits": to_json(self._limits), "whole": self._whole, "path": self._path}
                self._helper = _Helper(self._loop, first, self._answered)
            self._helper.ask(request, within_s=self._limits.sample_s + ANSWER_TIMEOUT_S)
        except OSError as error:
            self._failed(f"the helper cannot be started: {error.strerror}")

    def _answered(self, answer: dict[str, Any]) -> None:
        if not self._standings or self._judged:
            return
        try:
            verdict = verdict_from(answer["verdict"])
        except (KeyError, TypeError, ValueError):
            self._failed(str(answer.get("error", "the helper gave no verdict")))
            return
        self._take(verdict)

    def _failed(self, why: str) -> None:
        """No look was possible: report only what follows from the clock."""
        from gpulaunch.launcher.hang.judge import judge

        self.trouble = why
        self._end_helper()
        verdict = judge(self._standings, {}, self._limits, whole=False)
        self._take(replace(verdict, notes=(f"no stacks: {why}",), again_s=RETRY_AFTER_TROUBLE_S, works=True))

    def _is_idle(self, idle: bool) -> None:
        if idle is not self._idle:
            self._idle = idle
            self._on_idle(idle)

    def _take(self, verdict: Verdict) -> None:
        self._is_idle(not verdict.works)
        due = self._telling.is_due(verdict)
        if verdict.acts or due:
            self._telling.reported(verdict, self._watch.moved_s)
        if verdict.acts:
            self._judged = True
            self._end_helper()
            self._on_hang(verdict)
        else:
            again_s = self._telling.again_s(verdict)
            if self._idle and not self._whole:  # those of other nodes are acted on when none has worked for settle_s
                again_s = min(again_s, self._limits.settle_s / 3)
            self._look_at_s = self._loop.now() + again_s
            if due:
                self._on_late(verdict)

    def _end_helper(self) -> None:
        self._look_at_s = 0.0
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


def mark_over(path: str, after_s: float) -> None:
    """Note in a `hang.json` that was only reported that the ranks have moved again; a missing file stays missing."""
    with contextlib.suppress(OSError, ValueError):
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if isinstance(document, dict) and document.get("state") == TOLD:
            write_json(path, {**document, "state": OVER, "moved_after_s": after_s})


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
            argv = [sys.executable, "-P", "-c", ENTRY]
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
        """A request is pending."""
        return self._deadline is not None

    def ask(self, request: Mapping[str, Any], *, within_s: float) -> None:
        """Send a request; `on_answer` gets the answer, or {"error": ...}. Raises OSError."""
        self._send(request)
        late = {"error": f"the helper did not answer within {within_s:.0f} s"}
        self._deadline = self._loop.call_at(self._loop.now() + within_s, lambda: self._answer(late))

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode("ascii") + b"\n"
        if len(data) > _PIPE_BYTES:  # with hundreds of ranks
            fcntl.fcntl(self._to, fcntl.F_SETPIPE_SZ, len(data) + _PIPE_BYTES)
        # It has read all earlier requests; if this one does not fit, that is an error, not something to wait for.
        if os.write(self._to, data) != len(data):
            raise OSError(0, "it does not read what it is asked")

    def _ended(self, _: Exit) -> None:
        self._gone = True  # reaped, so its number may be reused; its pipe reports the rest

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
        """Kill it and its child (py-spy)."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._loop.unwatch_read(self._from)
        os.close(self._from)
        os.close(self._to)
        if not self._gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # it leads a session of its own
