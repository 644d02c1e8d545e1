"""The data type of a finding: a problem found in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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


def _rounded(value: float) -> float:
    """Round away digits beyond the precision of any measurement."""
    return float(f"{value:.6g}")
