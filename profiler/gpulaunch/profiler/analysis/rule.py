"""The type of a rule: a pure function over a window, and the text of its page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpulaunch.profiler.analysis.finding import Loss
from gpulaunch.profiler.analysis.thresholds import Limit
from gpulaunch.profiler.analysis.window import Window


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule; its id is stable."""

    id: str
    judge: Callable[[Window], Iterable[Loss]]
    problem: str
    """What is wrong, in one sentence."""
    evidence: str
    """The evidence that it is based on."""
    costs: str
    """What `seconds_per_step` is, and its confidence."""
    fix: str
    """What to change."""
    suppressed: str
    """When it reports nothing despite the symptoms."""
    limits: tuple[Limit, ...] = ()
