"""The results of rules: a loss on one rank, and the finding that combines the losses of several ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.record import Finding, order_of

MEASURED: Final = 0.9
"""Confidence if the seconds or bytes were read from a clock or a counter."""
DERIVED: Final = 0.7
"""Confidence if they are derived from measurements by the model described for the rule."""
ESTIMATED: Final = 0.4
"""Confidence if they are an upper bound: the loss may be much smaller."""

_BUILT: Final = re.compile(r".*:(?P<line>\d{1,9}), moved at (?P<path>.+):\d{1,9}", re.DOTALL)
"""The path is the same for both lines, and is at the end, which is never cut off (see `SegmentWriter.add_site`)."""
_LINE: Final = re.compile(r"(?P<path>.+):(?P<line>\d{1,9})(?: .*|)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of the user's program; empty file: unknown, or none."""

    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        return "" if self.file is None else f"{self.file}:{self.line}"


NOWHERE: Final = Place()


def place_of(site: str) -> Place:
    """Return the line that a site's text names: `path:line function`, or `built at path:line, moved at ...`."""
    found = _BUILT.fullmatch(site) or _LINE.fullmatch(site)
    return NOWHERE if found is None else Place(file=found["path"], line=int(found["line"]))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a rule found on one rank."""

    rank: int
    seconds_per_step: float
    step_s: float
    """The mean step of that rank, to convert the loss to one per hour."""
    confidence: float
    evidence: Mapping[str, float | str]
    advice: str
    place: Place = NOWHERE
    subject: str = ""
    """Distinguishes findings of one rule where the line does not: `rank 3`, `GPU 0`."""


def _advice(loss: Loss) -> str:
    """What to change; for a bound or an unknown cause, also how to verify it."""
    is_bound = loss.confidence <= ESTIMATED and loss.seconds_per_step > 0
    if not is_bound and loss.evidence.get("cause") != "other":
        return loss.advice
    return f"{loss.advice} To verify: gpulaunch trace --steps 5 --rank {loss.rank}."


def findings_of(rule: str, losses: Iterable[Loss]) -> list[Finding]:
    """Combine all losses at one place into one finding; ranks wait for each other, so the largest loss is the job's."""
    by_place: dict[tuple[Place, str], list[Loss]] = {}
    for loss in losses:
        by_place.setdefault((loss.place, loss.subject), []).append(loss)
    found: list[Finding] = []
    for (place, subject), there in by_place.items():
        worst = min(there, key=lambda loss: order_of(loss.evidence, loss.seconds_per_step))
        seconds = min(worst.seconds_per_step, worst.step_s)  # waits of helper threads are capped at the step
        found.append(
            Finding(
                rule=rule,
                file=place.file,
                line=place.line,
                subject=subject,
                ranks=tuple(sorted({loss.rank for loss in there})),
                seconds_per_step=seconds,
                seconds_per_hour=3600 * seconds / worst.step_s if worst.step_s else 0.0,
                confidence=worst.confidence,
                evidence=worst.evidence,
                advice=_advice(worst),
            )
        )
    return found
