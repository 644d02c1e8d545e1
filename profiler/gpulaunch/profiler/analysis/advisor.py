"""Tracks findings over several windows, because in a single one both a finding and its absence may be chance."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Final

from gpulaunch.profiler.analysis.finding import ESTIMATED, findings_of
from gpulaunch.profiler.analysis.owners import with_one_owner
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.analysis.stats import median_low
from gpulaunch.profiler.analysis.thresholds import APPEARS, GONE, SHORT_RUN_LOST
from gpulaunch.profiler.analysis.window import Window
from gpulaunch.profiler.record import Finding

_RECENT: Final = 5
"""Windows whose median one is reported, so that a finding's figures do not jump."""

_AT_ONCE: Final = frozenset({"hot-line", "logging-stall", "small-operations-loop", "gil-contention"})
"""Rules that judge all samples so far, and wait themselves until there are enough: a second window adds little."""
_AT_THE_SLOWEST_LINE: Final = frozenset({"dataloader-slow-transform", "dataloader-lock", "straggler"})
"""Rules with one loss per loader, or rank, at the line that holds most of it so far: with more samples, another one."""
_NOT_ONCE: Final = frozenset({"recompiles"})
"""Rules for which what happens once is normal."""


def advise(window: Window, failed: Callable[[str, Exception], None] | None = None) -> tuple[Finding, ...]:
    """Return all findings of the rules in one window, the most urgent first.

    Args:
        window: the input of the rules.
        failed: called with the id and the error of a rule that raises; the others still run. None: the error is raised.
    """
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += findings_of(rule.id, rule.judge(window))
        except Exception as error:
            if failed is None:
                raise
            failed(rule.id, error)
    return _in_order(with_one_owner(found))


@dataclass
class _Standing:
    """One finding over several windows."""

    recent: deque[Finding] = field(default_factory=lambda: deque[Finding](maxlen=_RECENT))
    seen: int = 0
    missed: int = 0

    @property
    def appears(self) -> bool:
        """Whether it was found often enough to be reported."""
        return self.seen >= (1 if self.recent[-1].rule in _AT_ONCE else APPEARS.value)

    def as_told(self) -> Finding:
        """Return the whole finding of the window with the median loss, so that its figures are consistent.

        Of several windows with that loss (0, where no time is lost) the last one is used; of samples so far, the last.
        Only windows with the line that most of them have.
        """
        if self.recent[-1].rule in _AT_ONCE:
            return self.recent[-1]
        ((key, _),) = Counter(found.key for found in reversed(self.recent)).most_common(1)
        there = [found for found in self.recent if found.key == key]
        middle = median_low(found.seconds_per_hour for found in there)
        return next(found for found in reversed(there) if found.seconds_per_hour == middle)


class Advisor:
    """Takes one window after another and keeps the current findings."""

    def __init__(self) -> None:
        self._standing: dict[tuple[str, str, int, str], _Standing] = {}
        self._failed: dict[str, str] = {}

    @property
    def failed(self) -> Mapping[str, str]:
        """The ids of rules that have raised, each with the type of its first error: bugs of ours."""
        return self._failed

    def add_window(self, window: Window) -> tuple[Finding, ...]:
        """Take the next window; return the findings that are current after it, in their order.

        Earlier findings of a rule that raises expire as if the rule no longer found them.
        """
        found = self._add(advise(window, self._fail))
        for key in self._standing.keys() - found:
            standing = self._standing[key]
            standing.missed += 1
            if not standing.appears or standing.missed >= GONE.value:
                del self._standing[key]
        return self._told()

    def conclude(self, rest: Window | None, whole: Window | None) -> tuple[Finding, ...]:
        """Return the findings that are current at the end of a run.

        Args:
            rest: the steps after the last window. Only rules that judge all samples so far take it: for others it is
                too short, or the end of the program.
            whole: all steps after the warm-up of a run of few windows. What the last one had, but not the one before
                it, is told if it is clear in this.
        """
        if rest is not None:
            self._add(found for found in advise(rest, self._fail) if found.rule in _AT_ONCE)
        clear = () if whole is None else self.judge_once(whole)
        of_last = {key for key, standing in self._standing.items() if not standing.appears}
        return self._told(*(found for found in clear if _identity(found) in of_last))

    def _add(self, findings: Iterable[Finding]) -> Set[tuple[str, str, int, str]]:
        """Add those of one window; return what identifies each."""
        found = {_identity(finding): finding for finding in findings}
        for key, finding in found.items():
            standing = self._standing.setdefault(key, _Standing())
            standing.recent.append(finding)
            standing.seen += 1
            standing.missed = 0
        return found.keys()

    def _told(self, *others: Finding) -> tuple[Finding, ...]:
        standing = [each.as_told() for each in self._standing.values() if each.appears]
        return _in_order(with_one_owner([*standing, *others]))

    def judge_once(self, window: Window) -> tuple[Finding, ...]:
        """Return the findings of a run that was too short for two windows: the clear ones, with a low confidence."""
        steps = max((rank.steps for rank in window.ranks), default=0)
        return tuple(
            replace(
                found,
                confidence=min(found.confidence, ESTIMATED),
                evidence={**found.evidence, "judged_steps": float(steps)},
                advice=f"{found.advice} Judged by {steps} steps only: the run was short.",
            )
            for found in advise(window, self._fail)
            if found.seconds_per_hour >= 3600 * SHORT_RUN_LOST.value and found.rule not in _NOT_ONCE
        )

    def _fail(self, rule: str, error: Exception) -> None:
        self._failed.setdefault(rule, type(error).__name__)


def _identity(found: Finding) -> tuple[str, str, int, str]:
    """What identifies the same finding in another window."""
    return (found.rule, "", 0, found.subject) if found.rule in _AT_THE_SLOWEST_LINE else found.key


def _in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda found: (*found.order, found.key)))
