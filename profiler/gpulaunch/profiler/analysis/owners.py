"""Gives a loss one owner: a finding that another one explains becomes a part of that one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from gpulaunch.profiler.record import Finding

_EXPLAINING: Final = ("hot-line", "logging-stall")
"""Rules that name the line of what a straggler does between its steps."""
_MOST: Final = 0.5
"""Of a straggler's excess: a line that takes less is not why it is late."""


def with_one_owner(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without the stragglers whose cause is one of the others, which then tells of both.

    A rank is late because of a line if only this rank has it, and it takes most of what the others wait for.
    """
    kept = list(findings)
    for late in findings:
        if (owner := _owner(late, kept)) is not None:
            kept.remove(late)
            kept[kept.index(owner)] = _with(owner, late)
    return kept


def _owner(late: Finding, findings: Iterable[Finding]) -> Finding | None:
    if late.rule != "straggler" or late.evidence.get("cause") != "other":
        return None
    lines = [
        each
        for each in findings
        if each.rule in _EXPLAINING
        and each.ranks == late.ranks
        and each.seconds_per_step >= _MOST * late.seconds_per_step
    ]
    return max(lines, key=lambda each: each.seconds_per_step, default=None)


def _with(owner: Finding, late: Finding) -> Finding:
    return replace(
        owner,
        evidence={**owner.evidence, "straggler_excess_seconds_per_step": late.seconds_per_step},
        advice=f"{owner.advice} Only rank {late.ranks[0]} does it, and the other ranks wait for it.",
    )
