"""Decides which trial comes next, and what the trials so far say. Pure.

Trials of the job as it is and of changes alternate, so that a machine that becomes slower does not favour either. A
change that gains nothing at its first trial is not tried again; one that gains is, until that is sure; and those that
gain are tried together at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from gpulaunch.launcher.tune.change import Change, together
from gpulaunch.launcher.tune.measure import FEWEST, LEAST_GAIN, MOST, Gain, Losses, altered_losses, gain_of

_CHANGES_PER_BASE: Final = 2
"""Trials of changes after which the job is tried as it is once more."""
_ALIKE: Final = 0.03
"""Of several values of one setting the smallest is taken whose step time is within this share of the best one's."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one trial gave."""

    step_s: float | None
    """Mean time of a step; None: it did not get through its steps."""
    died: str = ""
    """Why not, in a few words."""
    refused: str = ""
    """Why the change was not applied; "": it was."""
    waits: float = 0.0
    """Share of its steps in which training waited for data."""
    losses: Losses = ()


@dataclass
class Tried:
    """A change and its trials."""

    change: Change
    trials: list[Measured] = field(default_factory=list[Measured])

    @property
    def step_s(self) -> list[float]:
        """The step times of the trials that have one."""
        return [trial.step_s for trial in self.trials if trial.step_s is not None]

    @property
    def losses(self) -> list[Losses]:
        """Those of the trials that have a step time."""
        return [trial.losses for trial in self.trials if trial.step_s is not None]

    @property
    def failed(self) -> str:
        """Why its trials failed; "": they did not."""
        return next((trial.died or trial.refused for trial in self.trials if trial.died or trial.refused), "")


FollowUp = Callable[[Change, Measured], Iterable[Change]]


class Search:
    """The trials of one job.

    Args:
        changes: what to try, the most promising first.
        follow_up: given a change that gained and its trial, what to try because of it.
    """

    def __init__(self, changes: Iterable[Change], follow_up: FollowUp = lambda _change, _measured: ()) -> None:
        self.base: list[float] = []
        self._base_losses: list[Losses] = []
        self.tried = [Tried(change) for change in {change.as_env(): change for change in changes}.values()]
        self.combined: Tried | None = None
        self._follow_up = follow_up
        self._since_base = 0

    def next(self, trials_left: int) -> Change | None:
        """Return the change to try next, an empty one for the job as it is; None if nothing is left to be learnt.

        Args:
            trials_left: how many trials the time left allows.
        """
        if trials_left <= 0:
            return None
        if not self.base:
            return Change()
        pick = self._pick(trials_left)
        if pick is None:
            return None
        if pick.trials and len(self.base) < FEWEST:
            return Change()
        if self._since_base >= _CHANGES_PER_BASE and trials_left > self._needed:
            return Change()
        return pick.change

    def add(self, change: Change, measured: Measured) -> None:
        """Take what a trial gave."""
        if not change.keys:
            self._since_base = 0
            if measured.step_s is not None:
                self.base.append(measured.step_s)
                self._base_losses.append(measured.losses)
            return
        self._since_base += 1
        known = (*self.tried, *([self.combined] if self.combined is not None else []))
        tried = next((each for each in known if each.change == change), None)
        if tried is None:
            tried = Tried(change)
            self.tried.append(tried)
        tried.trials.append(measured)
        if tried is not self.combined and len(tried.trials) == 1 and self._is_best_of_its_kind(tried):
            tried_so_far = [each.change.as_json() for each in self.tried]
            more = self._follow_up(change, measured)
            self.tried += [Tried(new) for new in more if new.as_json() not in tried_so_far]

    def refused(self, tried: Tried) -> str:
        """Why a change cannot be had; "": it can, as far as is known."""
        if tried.failed:
            return tried.failed
        altered = altered_losses(self._base_losses, tried.losses)
        return "" if altered is None else f"alters the loss: {altered[0]:.4g} -> {altered[1]:.4g}"

    def gain(self, tried: Tried) -> Gain | None:
        """What a change gains; None: it was not tried, or is refused."""
        if not tried.step_s or not self.base or self.refused(tried):
            return None
        return gain_of(self.base, tried.step_s)

    def recommended(self) -> list[Tried]:
        """The changes that surely gain, of several values of one setting one; the largest gain first."""
        gaining = [each for each in self.tried if (gain := self.gain(each)) is not None and gain.verdict == "gain"]
        gaining.sort(key=lambda each: min(each.step_s))
        chosen: list[Tried] = []
        for each in gaining:
            if not any(each.change.keys & other.change.keys for other in chosen):
                chosen.append(self._smallest_alike(each, gaining))
        return chosen

    def best(self) -> Tried | None:
        """What to apply: the recommended changes together where that was tried and gains most, else the best one."""
        chosen = self.recommended()
        if not chosen:
            return None
        combined = self.combined
        if combined is not None and (gain := self.gain(combined)) is not None and gain.verdict == "gain":
            alone = self.gain(chosen[0])
            if alone is None or gain.median >= alone.median:
                return combined
        return chosen[0]

    def _is_best_of_its_kind(self, tried: Tried) -> bool:
        """Whether a change gains, and more than other values of the same settings."""
        gain = self.gain(tried)
        if gain is None or gain.median < LEAST_GAIN:
            return False
        others = (each for each in self.tried if each is not tried and each.change.keys == tried.change.keys)
        return all(min(tried.step_s) * (1.0 + _ALIKE) < min(other.step_s) for other in others if other.step_s)

    # -- which

    def _pick(self, trials_left: int) -> Tried | None:
        unsure = [each for each in self.tried if self._is_unsure(each)]
        unsure.sort(key=lambda each: (len(each.trials), min(each.step_s)))
        untried = next((each for each in self.tried if not each.trials), None)
        if untried is not None and not (unsure and trials_left <= self._needed):
            return untried
        if unsure:
            return unsure[0]
        return self._combination()

    @property
    def _needed(self) -> int:
        """Trials that make sure what gained at its first one; one more, as how many are left is an estimate."""
        return FEWEST - 1 + max(0, FEWEST - len(self.base)) + 1

    def _is_unsure(self, tried: Tried) -> bool:
        gain = self.gain(tried)
        if gain is None or len(tried.trials) >= MOST:
            return False
        return gain.verdict == "unsure" and (gain.median >= LEAST_GAIN or len(tried.trials) >= FEWEST)

    def _combination(self) -> Tried | None:
        chosen = self.recommended()
        if len(chosen) < 2:
            return None
        change = together(each.change for each in chosen)
        if self.combined is None or self.combined.change != change:
            self.combined = Tried(change)
        gain = self.gain(self.combined)
        done = self.combined.trials and (gain is None or gain.verdict != "unsure")
        return None if done or len(self.combined.trials) >= MOST else self.combined

    @staticmethod
    def _smallest_alike(best: Tried, gaining: Iterable[Tried]) -> Tried:
        """Of the values of one numeric setting that are about as good as the best, the smallest: it costs least."""

        def size(tried: Tried) -> float:
            (settings,) = tried.change.loaders.values()
            return float(settings["num_workers"])

        def is_number_of_workers(tried: Tried) -> bool:
            settings = list(tried.change.loaders.values())
            return len(settings) == 1 and "num_workers" in settings[0] and tried.change.keys == best.change.keys

        if not is_number_of_workers(best):
            return best
        limit_s = min(best.step_s) * (1.0 + _ALIKE)
        alike = [each for each in gaining if is_number_of_workers(each) and min(each.step_s) <= limit_s]
        return min(alike, key=size)
