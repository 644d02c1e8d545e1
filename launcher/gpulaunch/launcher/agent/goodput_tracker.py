"""Goodput of a run: where its time went and how often it was restarted, kept while it runs and reported at the end.

Reported to the sidecar through `run.json` among the shared segments, once a second and at every change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.checkpoint.find import Checkpoint
from gpulaunch.launcher.policy import goodput
from gpulaunch.profiler.channel.segment import SegmentSnapshot

_ADVICE = ": specify the directory of the program's checkpoints with --checkpoint-dir"


class GoodputTracker:
    """Tracks one run."""

    def __init__(self, context: RunContext, *, began_s: float) -> None:
        """`began_s`: when the launcher was called, by the loop's clock."""
        self._context = context
        self._loop = context.loop
        self._ledger = goodput.GoodputLedger(steps_are_seen=context.segments is not None)
        self._ledger.run_started(began_s)
        self._attempt = 0
        self._open = False
        """An attempt has begun and is not over."""
        self._first_step_ns = self._stall_ns = 0
        spec = context.spec
        self._is_told = bool((spec.resume_arg or spec.checkpoint_dirs) and spec.resume != "never")
        """Where the program's checkpoints are: the program does not resume from anything outside of these."""
        self._lost_is_unknown = False
        """Whether this was reported."""
        self._unsettled = False
        """The current attempt was given no checkpoint, and it is not yet known what it resumed from."""
        self._captured: tuple[int, float] | None = None
        """Step of the newest checkpoint that a rank reported, and when its state was captured."""
        self._left: tuple[int, float] | None = None
        """The same, as of the end of the previous attempt."""
        self.restarts: dict[str, int] = {}
        """Number of restarts, by kind of the first cause."""
        self.hang_suspicions = 0
        self.hangs = 0
        self.stall: dict[str, Any] | None = None
        """The stall reported for the ranks, as long as it lasts."""
        self.resumed_step: int | None = None
        self.checkpoint_step: int | None = None
        """Step of the newest known checkpoint; a program may save others by itself."""
        self.preempted = False

    # -- what happens

    def attempt_began(self, attempt: int, resumed: Checkpoint | None) -> None:
        """The attempt's processes are requested; it resumes from `resumed`."""
        self._attempt = attempt
        self._first_step_ns = self._stall_ns = 0
        self.resumed_step = resumed.step if resumed is not None else None
        self._know_of(self.resumed_step)
        self._left = self._captured
        self._unsettled = attempt > 0 and resumed is None
        if attempt and resumed is not None:
            self._ledger.resumed(self._captured_s(resumed))
            self._tell_what_is_known()
        self._ledger.attempt_began(self._loop.now())
        self._open = True
        self.write()

    def attempt_started(self) -> None:
        """The attempt's ranks run."""
        self._ledger.attempt_started(self._loop.now())
        if self._context.segments is None:
            self._settle([])

    def update(self, segments: Iterable[SegmentSnapshot]) -> None:
        """Read the ranks' segments."""
        segments = [segment for segment in segments if segment.attempt == self._attempt]
        firsts = [segment.first_step_start_ns for segment in segments]
        if firsts and all(firsts):
            self._first_step_ns = max(self._first_step_ns, *firsts)
            self._ledger.first_step(self._first_step_ns / 1e9)
        self._stall_ns = max(self._stall_ns, *map(_stall_ns, segments), 0)
        if self._stall_ns and self._open:
            self._ledger.stalled(self._stall_ns / 1e9)
        if any(segment.armed for segment in segments):
            self._ledger.armed()
        for segment in segments:
            if segment.checkpoint.captured_ns:
                newest = (segment.checkpoint.step, segment.checkpoint.captured_ns / 1e9)
                self._captured = max(self._captured or newest, newest)
                self._know_of(segment.checkpoint.step)
            if segment.checkpoint.resumed_step:
                self.resumed_step = segment.checkpoint.resumed_step
                self._know_of(segment.checkpoint.resumed_step)
        if firsts and all(firsts):
            self._settle(segments)

    def failed(self, cause_s: float, seen_s: float) -> None:
        """The attempt failed, and all of its processes have ended."""
        if self._open:
            self._ledger.failed(cause_s, seen_s)
            self._cleared()

    def stopped(self, signalled_s: float | None) -> None:
        """The attempt is over, its processes have ended, nothing failed; `signalled_s`: when it was asked to end.

        Time after a checkpoint that was made for that request counts as the end, not as work.
        """
        at_s = self._loop.now()
        captured_s = self.captured_s
        if self._open:
            self._ledger.stopped(captured_s if signalled_s is not None and captured_s > signalled_s else at_s)
            self._cleared()

    def _settle(self, segments: Iterable[SegmentSnapshot]) -> None:
        """An attempt without a given checkpoint has begun to work: see whether its ranks say what they resumed from."""
        if not self._unsettled:
            return
        self._unsettled = False
        step = max((segment.checkpoint.resumed_step for segment in segments if segment.listens), default=None)
        if step is None and not self._is_told:
            self._ledger.resumed_unseen()
        elif not step or self._left is None:  # from nothing, or from a checkpoint older than this run
            self._ledger.resumed(None)
        elif self._left[0] == step:
            self._ledger.resumed(self._left[1])
        else:
            self._ledger.resumed_unseen()
        self._tell_what_is_known()

    def _tell_what_is_known(self) -> None:
        """Update the values for readers while the run continues."""
        unknown = self.seconds()["lost_work"] is None
        if unknown != self._lost_is_unknown:
            self._lost_is_unknown = unknown
            self._context.rundir.event(f"lost_work_{'unknown' if unknown else 'known'}", attempt=self._attempt)

    def restarted(self, kind: str) -> None:
        """There will be another attempt; `kind`: of the first cause."""
        self.restarts[kind] = self.restarts.get(kind, 0) + 1

    def _cleared(self) -> None:
        self._open = False
        self._ledger.cleared(self._loop.now())

    def ended(self, *, ok: bool, newest: Checkpoint | None, all_done: bool = False) -> None:
        """The run is over; it could resume from `newest`; `all_done`: its work is complete, however it ended."""
        if ok:
            self._settle([])
        saved_s = None
        if newest is not None:
            saved_s = None if all_done else self._captured_s(newest)
            self._know_of(newest.step)
        self._ledger.ended(self._loop.now(), ok=ok, saved_s=saved_s)
        self.write()

    # -- reports

    @property
    def captured_s(self) -> float:
        """When the state in the newest checkpoint that a rank reported was captured; 0.0: no report."""
        return self._captured[1] if self._captured is not None else 0.0

    def seconds(self) -> dict[str, float | None]:
        """Seconds by bucket; None: unknown."""
        return self._ledger.seconds(self._loop.now())

    def _counted(self) -> dict[str, float]:
        return self._ledger.counted(self._loop.now())

    def line(self) -> str:
        """One line for the end of the run."""
        spec = self._context.spec
        named = bool(spec.checkpoint_dirs or spec.resume_arg) or spec.resume == "never"
        return goodput.line(
            self.seconds(),
            sum(self._counted().values()),
            advice="" if named else _ADVICE,
            why_unknown="no steps were observed" if spec.profile else "steps were not observed",
        )

    def as_json(self) -> dict[str, Any]:
        """The content of run.json without the frame."""
        return {
            "goodput_seconds": self.seconds(),
            "restarts": self.restarts,
            "hang_suspicions": self.hang_suspicions,
            "hangs": self.hangs,
            "stall": self.stall,
            "checkpoint_step": self.checkpoint_step,
            "resumed_step": self.resumed_step,
            "preempted": int(self.preempted),
        }

    def write(self) -> None:
        """Report to the sidecar now. It takes only numbers, and counters must not fall: only known lost work counts."""
        if self._context.segments is not None:
            run_id = self._context.base_env["GPULAUNCH_RUN_ID"]
            told = self.as_json()
            spent_s = {**told["goodput_seconds"], "lost_work": self._counted()["lost_work"]}
            told["goodput_seconds"] = {name: part_s for name, part_s in spent_s.items() if part_s is not None}
            self._context.segments.write_run({"version": 1, "run_id": run_id, "attempt": self._attempt, **told})

    def _know_of(self, step: int | None) -> None:
        """A checkpoint of this step exists."""
        if step is not None:
            self.checkpoint_step = max(self.checkpoint_step or 0, step)

    def _captured_s(self, checkpoint: Checkpoint) -> float:
        """When its state was captured, by the loop's clock: reported by its rank, else the files' wall-clock time."""
        if self._captured is not None and self._captured[0] == checkpoint.step:
            return self._captured[1]
        return self._loop.now() - max(0.0, time.time() - checkpoint.saved_s)


def _stall_ns(segment: SegmentSnapshot) -> int:
    """How long a rank was blocked by saves, by any library.

    The time that `gpulaunch.checkpoint` reports is also in the phase once the step that contains it has ended. The
    phase includes other libraries, but lacks what was not observed and what follows the last step. So: the larger,
    never the sum.
    """
    return max(segment.checkpoint.stall_ns_total, segment.phase_ns["checkpoint"])
