"""Tracks findings over several windows, because in a single one both a finding and its absence may be chance."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final

from gpulaunch.profiler.analysis.finding import ESTIMATED, findings_of
from gpulaunch.profiler.analysis.owners import SLOW_FETCHES, with_one_owner
from gpulaunch.profiler.analysis.rules import RULES
from gpulaunch.profiler.analysis.stats import median_low
from gpulaunch.profiler.analysis.thresholds import APPEARS, GONE, SHORT_RUN_LOST, SHORT_RUN_S, WINDOW_STEPS
from gpulaunch.profiler.analysis.window import Window
from gpulaunch.profiler.record import Finding

_RECENT: Final = 5
"""Windows whose median one is reported, so that a finding's figures do not jump."""

_AT_ONCE: Final = frozenset({"hot-line", "logging-stall", "small-operations-loop", "gil-contention"})
"""Rules that judge all samples so far, and wait themselves until there are enough: a second window adds little."""
_AT_THE_SLOWEST_LINE: Final = frozenset({"dataloader-slow-transform", "dataloader-lock", "straggler"})
"""Rules with one loss per loader, or rank, at the line that holds most of it so far: with more samples, another one."""
_OF_LOADERS: Final = "dataloader-"
"""How the names of rules begin that are about fetches: caches may be cold in the first epoch."""
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
    def rule(self) -> str:
        return self.recent[-1].rule

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.recent[-1].ranks

    @property
    def appears(self) -> bool:
        """Whether it was found often enough to be reported."""
        return self.seen >= (1 if self.rule in _AT_ONCE else APPEARS.value)

    @property
    def is_refuted(self) -> bool:
        """Whether it was in the samples of the first windows only, and is not in all of them."""
        return self.rule in _AT_ONCE and self.missed >= self.seen

    def as_told(self) -> Finding:
        """Return the whole finding of the window with the median loss, so that its figures are consistent.

        Of several windows with that loss (0, where no time is lost) the last one is used; of samples so far, the last.
        Only windows with the line that most of them have.
        """
        if self.rule in _AT_ONCE:
            return self.recent[-1]
        ((key, _),) = Counter(found.key for found in reversed(self.recent)).most_common(1)
        there = [found for found in self.recent if found.key == key]
        middle = median_low(found.seconds_per_hour for found in there)
        return next(found for found in reversed(there) if found.seconds_per_hour == middle)


class Advisor:
    """Takes one window after another and keeps the current findings."""

    def __init__(self) -> None:
        self.windows = 0
        """How many it has taken."""
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
        self.windows += 1
        found = self._add(advise(window, self._fail))
        for key in self._standing.keys() - found:
            standing = self._standing[key]
            standing.missed += 1
            if not standing.appears or standing.missed >= GONE.value:
                del self._standing[key]
        return _within_the_time(each.as_told() for each in self._standing.values() if each.appears)

    def conclude(self, rest: Window | None, whole: Window | None) -> tuple[Finding, ...]:
        """Return the findings that are current at the end of a run.

        Args:
            rest: the steps after the last window. Only rules that judge all samples so far take it: for others it is
                too short, or the end of the program.
            whole: all steps after the warm-up of a run of few windows. What is clear in this is told: after several
                windows only what the last one had, but not the one before it; after one, nothing of a cold first epoch.
        """
        of_rest = () if rest is None else advise(rest, self._fail)
        if rest is not None:
            found = self._add(each for each in of_rest if each.rule in _AT_ONCE)
            for key in self._standing.keys() - found:
                self._standing[key].missed += 1
        told = {key: each.as_told() for key, each in self._standing.items() if each.appears and not each.is_refuted}
        for clear in () if whole is None else self._clear(whole):
            key = _identity(clear)
            is_new = key in self._standing and not self._standing[key].appears
            if is_new or (self.windows < APPEARS.value and not _is_over(clear, rest, of_rest)):
                told.setdefault(key, clear)
        return _within_the_time(told.values())

    def _add(self, findings: Iterable[Finding]) -> Set[tuple[str, str, int, str]]:
        """Add those of one window; return what identifies each."""
        found = {_identity(finding): finding for finding in findings}
        for key, finding in found.items():
            if key not in self._standing:
                self._standing[key] = _Standing(seen=self._seen_as_another(finding, found.keys()))
            standing = self._standing[key]
            standing.recent.append(finding)
            standing.seen += 1
            standing.missed = 0
        return found.keys()

    def _seen_as_another(self, finding: Finding, found: Set[tuple[str, str, int, str]]) -> int:
        """How often another rule has found the loss of a new finding, which it does not find now."""
        if finding.rule not in SLOW_FETCHES:
            return 0
        rules = SLOW_FETCHES - {finding.rule}
        others = [each for key, each in self._standing.items() if key not in found and each.rule in rules]
        return max((each.seen for each in others if not each.appears and each.ranks == finding.ranks), default=0)

    def _clear(self, window: Window) -> tuple[Finding, ...]:
        """Return the clear findings of a run that was too short for several windows, with a low confidence."""
        steps = _steps(window)
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


def _is_over(clear: Finding, rest: Window | None, of_rest: Sequence[Finding]) -> bool:
    """Whether training no longer waits for data as it did in the first window, by enough steps after it."""
    if rest is None or rest.seconds < SHORT_RUN_S.value or _steps(rest) < WINDOW_STEPS.value:
        return False
    return clear.rule.startswith(_OF_LOADERS) and not any(each.rule.startswith(_OF_LOADERS) for each in of_rest)


def _steps(window: Window) -> int:
    """Steps of the rank that made the most."""
    return max((rank.steps for rank in window.ranks), default=0)


def _within_the_time(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in their order, with one owner for each loss: what a lower one can save is at most what those
    above it leave of the time of its ranks."""
    told: list[Finding] = []
    left_s: dict[int, float] = {}
    for found in _in_order(with_one_owner([*findings])):
        kept_s = min(found.seconds_per_hour, max(left_s.get(rank, 3600.0) for rank in found.ranks))
        left_s |= {rank: max(0.0, left_s.get(rank, 3600.0) - kept_s) for rank in found.ranks}
        told.append(found if kept_s == found.seconds_per_hour else _trimmed(found, kept_s / found.seconds_per_hour))
    return tuple(told)


def _trimmed(found: Finding, share: float) -> Finding:
    """Return a finding with a share of its loss."""
    others_ms = 1e3 * (1.0 - share) * found.seconds_per_step
    return replace(
        found,
        seconds_per_step=share * found.seconds_per_step,
        seconds_per_hour=share * found.seconds_per_hour,
        advice=f"{found.advice} Another {others_ms:.3g} ms of every step are part of the findings above.",
    )


def _in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda found: (*found.order, found.key)))
