"""The data type of a finding: a problem found in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

_URGENT_HOURS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to change, and the time it loses now."""

    rule: str
    file: str | None
    line: int | None
    subject: str
    ranks: tuple[int, ...]
    seconds_per_step: float
    """By how much every step would be shorter; 0 where no time is lost, or not yet."""
    seconds_per_hour: float
    """The same per hour of training at the present speed."""
    confidence: float
    """0..1; see `analysis.finding`."""
    evidence: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    """Of the rank with the largest loss; the unit is in every name."""
    advice: str

    @property
    def order(self) -> tuple[float, float]:
        """Sorts findings: what ends the job soon comes first, then the largest loss."""
        return order_of(self.evidence, self.seconds_per_hour)

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The key that identifies the same finding in another window."""
        return self.rule, self.file or "", self.line or 0, self.subject

    def as_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "rule": self.rule,
            "file": self.file,
            "line": self.line,
            "subject": self.subject,
            "ranks": list(self.ranks),
            "seconds_per_step": _rounded(self.seconds_per_step),
            "seconds_per_hour": _rounded(self.seconds_per_hour),
            "confidence": self.confidence,
            "evidence": {
                name: value if isinstance(value, str) else _rounded(value) for name, value in self.evidence.items()
            },
            "advice": self.advice,
        }


def order_of(evidence: Mapping[str, Any], seconds_per_hour: float) -> tuple[float, float]:
    """The order of a finding by its evidence and its cost; see `Finding.order`."""
    return (evidence["hours_to_full"] if ends_job_soon(evidence) else inf, -seconds_per_hour)


def ends_job_soon(evidence: Mapping[str, Any]) -> bool:
    """Whether, by its evidence, what a finding is about ends the job within the hour."""
    hours = evidence.get("hours_to_full")
    return isinstance(hours, int | float) and hours < _URGENT_HOURS


def _rounded(value: float) -> float:
    """Round away digits beyond the precision of any measurement."""
    return float(f"{value:.6g}")
