"""Tries changes of one job until its time is used or nothing is left to be learnt."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from gpulaunch.launcher.job.job_json import CHANGES
from gpulaunch.launcher.tune.candidates import MOST_WORKERS, PREFETCH, Seen, candidates, more_workers
from gpulaunch.launcher.tune.change import TRIAL, Change
from gpulaunch.launcher.tune.measure import FEWEST_LOSSES, Losses
from gpulaunch.launcher.tune.search import Measured, Search
from gpulaunch.launcher.tune.trial import Point, Start, Steps, Watched, watch
from gpulaunch.profiler.channel.clock import monotonic_ns

_WARM_UP_STEPS: Final = 5
_WARM_UP_S: Final = 1.0
_FEWEST_STEPS: Final = 20
"""In a trial. A mean over fewer is mostly chance."""
_MEASURED_S: Final = 3.0
"""In a trial."""
_DIAGNOSED_S: Final = 8.0
"""Of steps of the job as it is: its findings say what to try."""
_EPOCHS: Final = 2
"""That must begin in the measured steps, where the job as it is began as many."""
_DRAINED_STEPS: Final = PREFETCH * MOST_WORKERS + _WARM_UP_STEPS
"""Until then also as many workers as are ever tried have handed out what they had prepared before the first step."""
_HOPELESS: Final = 1.5
"""A trial whose steps take so many times as long as those of the job as it is ends early."""
_SLACK_S: Final = 20.0
_LOSSES_S: Final = 2.0
"""For the losses of a trial whose steps are over: its rank publishes them once a second."""


class InterruptedTuningError(Exception):
    """The user has asked to end."""


class NotTunableError(Exception):
    """No trial can be made of the job; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job to tune."""

    start: Start
    env: Mapping[str, str]
    directory: str
    """For the trials' run directories; emptied by the caller."""
    ranks: int
    cores: int
    discard_view: Callable[[str], None]
    """Removes what the trial with this run directory wrote to the working directory."""
    allow_numerics: bool = False


@dataclass
class Tuned:
    """What has been learnt."""

    base_s: float
    steps: Steps
    seen: Seen
    search: Search
    base_dir: str
    """The run directory of the first trial, of the job as it is."""
    losses: int = 0
    """How many means of losses the first trial has published."""
    spent_s: float = 0.0
    trials: int = 1
    left: list[Change] = field(default_factory=list[Change])
    """What there was no time for."""


class Session:
    """The trials of one job.

    Args:
        job: the job.
        budget_s: for all trials together.
        told: called with a change and what its trial gave, after each.
        is_interrupted: whether the user has asked to end.
    """

    def __init__(
        self,
        job: Job,
        budget_s: float,
        told: Callable[[Tuned, Change, Measured], None],
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._job = job
        self._is_interrupted = is_interrupted
        self._budget_s = budget_s
        self._told = told
        self._began_ns = monotonic_ns()
        self._took_s: list[float] = []
        self.tuned: Tuned | None = None
        """What has been learnt so far, also after an interrupt; None until the job as it is has been tried."""

    def run(self) -> Tuned:
        """Try until nothing is left.

        Raises:
            InterruptedTuningError: the user has asked to end; what has been learnt is in `tuned`.
            NotTunableError: the job fails, makes no steps, or too few.
            OSError: it cannot be started.
        """
        tuned = self._try_base()
        search = tuned.search
        tuned.left = [each.change for each in search.tried]
        while (change := search.next(self._trials_left())) is not None:
            watched = self._watch(change, self._is_enough(tuned), longest_s=2 * self._took_s[0] + _SLACK_S)
            measured = measured_of(watched, tuned.steps, change)
            search.add(change, measured)
            tuned.trials += 1
            tuned.spent_s = self._spent_s()
            tuned.left = [each.change for each in search.tried if not each.trials]
            self._told(tuned, change, measured)
        return tuned

    def _spent_s(self) -> float:
        return (monotonic_ns() - self._began_ns) / 1e9

    def _trials_left(self) -> int:
        first_s = self._took_s[0] - _DIAGNOSED_S + _MEASURED_S  # without its diagnosis
        return int((self._budget_s - self._spent_s()) / max(self._took_s[1:], default=max(first_s, _MEASURED_S)))

    def _watch(self, change: Change, is_enough: Callable[[Watched], bool], *, longest_s: float) -> Watched:
        if self._is_interrupted():
            raise InterruptedTuningError
        run_dir = os.path.join(self._job.directory, f"trial-{len(self._took_s)}")
        env = {name: value for name, value in self._job.env.items() if name != CHANGES} | {TRIAL: "1"}
        if change.keys:
            env[CHANGES] = change.as_env()
        began_ns = monotonic_ns()
        watched = watch(
            self._job.start,
            env,
            run_dir,
            is_enough=is_enough,
            is_interrupted=self._is_interrupted,
            longest_s=longest_s,
        )
        if self._is_interrupted():
            raise InterruptedTuningError
        self._took_s.append((monotonic_ns() - began_ns) / 1e9)
        self._job.discard_view(run_dir)
        if len(self._took_s) > 1:  # the first one is kept: its findings are the job's
            shutil.rmtree(run_dir, ignore_errors=True)
        return watched

    def _try_base(self) -> Tuned:
        def is_enough(seen: Watched) -> bool:
            first, last = seen.points[0], seen.points[-1]
            if last.steps - first.steps < _WARM_UP_STEPS + _FEWEST_STEPS:
                return False
            return last.at_ns - first.at_ns >= (_WARM_UP_S + _DIAGNOSED_S) * 1e9

        watched = self._watch(Change(), is_enough, longest_s=self._budget_s)
        steps = steps_of(watched)
        if steps is None or (ends := watched.between(steps)) is None:
            raise NotTunableError(_why_not(watched, self._budget_s))
        base_dir = os.path.join(self._job.directory, "trial-0")
        seen = _seen(self._job, watched, steps, ends, base_dir)
        # It may have read its data from a disk that later trials find in memory, so nothing is compared with it.
        tuned = self.tuned = Tuned(
            base_s=seen.step_s,
            steps=steps,
            seen=seen,
            search=Search(candidates(seen), lambda change, measured: more_workers(seen, change, measured)),
            base_dir=base_dir,
            losses=len(_losses(watched.facts)),
            spent_s=self._spent_s(),
        )
        self._told(tuned, Change(), measured_of(watched, steps, Change()))
        return tuned

    @staticmethod
    def _is_enough(tuned: Tuned) -> Callable[[Watched], bool]:
        steps, longest_ns = tuned.steps, _HOPELESS * tuned.base_s * tuned.steps.count * 1e9

        def is_enough(seen: Watched) -> bool:
            if (ends := seen.between(steps)) is not None:
                has_losses = len(_losses(seen.facts)) >= min(FEWEST_LOSSES, tuned.losses)
                return has_losses or monotonic_ns() - ends[1].at_ns > _LOSSES_S * 1e9
            begin = seen.after(steps.first)
            return begin is not None and monotonic_ns() - begin.at_ns > longest_ns

        return is_enough


def steps_of(watched: Watched) -> Steps | None:
    """Return which steps all trials measure, given the first one; None if it made too few."""
    if not watched.points:
        return None
    first, last = watched.points[0], watched.points[-1]
    warm = [
        point
        for point in watched.points
        if point.steps >= _WARM_UP_STEPS
        and point.at_ns - first.at_ns >= _WARM_UP_S * 1e9
        and last.steps - point.steps >= _FEWEST_STEPS
    ]
    if not warm:
        return None
    # Where all that workers have prepared before the first step is used up, if there are enough steps after that.
    long = [point for point in warm if last.at_ns - point.at_ns >= _MEASURED_S * 1e9] or warm[:1]
    begin = next((point for point in long if point.steps >= _DRAINED_STEPS), long[-1])
    enough = next(
        (
            point
            for point in watched.points
            if point.steps - begin.steps >= _FEWEST_STEPS
            and point.at_ns - begin.at_ns >= _MEASURED_S * 1e9
            and point.epochs - begin.epochs >= min(_EPOCHS, last.epochs - begin.epochs)
        ),
        last,
    )
    return Steps(first=begin.steps, count=enough.steps - begin.steps)


def measured_of(watched: Watched, steps: Steps, change: Change) -> Measured:
    """Return what a trial gave."""
    if refused := _refused(watched.facts, change):
        return Measured(step_s=None, refused=refused)
    ends = watched.between(steps)
    if ends is None:
        return Measured(step_s=None, died=_died(watched))
    begin, end = ends
    of_steps_ns = end.step_ns - begin.step_ns
    waited_ns = end.phase_ns.get("data_wait", 0) - begin.phase_ns.get("data_wait", 0)
    return Measured(
        step_s=(end.at_ns - begin.at_ns) / 1e9 / (end.steps - begin.steps),
        waits=waited_ns / of_steps_ns if of_steps_ns else 0.0,
        losses=_losses(watched.facts),
    )


def _refused(facts: Mapping[str, Any], change: Change) -> str:
    """Why a change was not applied, by the ranks' account; "" if it was, or if no rank got so far."""
    told = facts.get("changes") or {}
    if refused := told.get("refused"):
        return "; ".join(f"{name}: {why}" for name, why in refused.items())
    missing = sorted(change.applied_names - (told.get("applied") or {}).keys())
    if missing and facts.get("loaders"):
        return f"not used by the program: {', '.join(missing)}"
    threads = change.torch.get("num_threads")
    if threads is not None and facts.get("torch_threads", threads) != threads:
        return "the program itself sets the number of threads"
    return ""


def _losses(facts: Mapping[str, Any]) -> Losses:
    """The means of losses that rank 0 has published."""
    told: object = facts.get("losses")
    known = cast("list[object]", told) if isinstance(told, list) else []
    return tuple(float(each) if isinstance(each, int | float) else None for each in known)


def _died(watched: Watched) -> str:
    if watched.code is not None:
        return watched.error or ("ended before it was measured" if not watched.code else f"ended with {watched.code}")
    if watched.full:
        return watched.full
    return "hung, or much slower" if watched.late else "slower"


def _seen(job: Job, watched: Watched, steps: Steps, ends: tuple[Point, Point], run_dir: str) -> Seen:
    from gpulaunch.exporters.files.findings import FINDINGS_FILE, read_findings

    begin, end = ends
    of_steps_ns = max(1, end.step_ns - begin.step_ns)
    return Seen(
        step_s=(end.at_ns - begin.at_ns) / 1e9 / (end.steps - begin.steps),
        facts=watched.facts,
        findings=[found for found in read_findings(Path(run_dir, FINDINGS_FILE)) if found["active"]],
        shares={name: (now - begin.phase_ns.get(name, 0)) / of_steps_ns for name, now in end.phase_ns.items()},
        ranks=job.ranks,
        cores=job.cores,
        epochs=end.epochs - begin.epochs,
        most_prepared=steps.first - _WARM_UP_STEPS,
        allow_numerics=job.allow_numerics,
    )


def _why_not(watched: Watched, budget_s: float) -> str:
    if watched.full:
        return watched.full
    if watched.code:
        return f"the job fails by itself: {watched.error or f'it ended with {watched.code}'}"
    made = watched.points[-1].steps if watched.points else 0
    if watched.code == 0:
        return f"the job ended after {made} steps; a trial needs {_WARM_UP_STEPS + _FEWEST_STEPS} and {_MEASURED_S:g} s"
    if not made:
        return f"the job made no step within {budget_s:g} s; allow more with --budget"
    return f"the job made {made} steps within {budget_s:g} s; allow more with --budget"
