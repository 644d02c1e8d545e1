"""Gives a loss one owner: a finding that another one explains becomes a part of that one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from gpulaunch.profiler.analysis.one_rank_lines import ONLY_ONE
from gpulaunch.profiler.record import Finding

SLOW_FETCHES: Final = frozenset({"dataloader-too-few-workers", "dataloader-slow-transform"})
"""Rules with one loss of a rank between them: if workers or a cheaper transform saves more may differ by window."""
_EXPLAINING: Final = ("hot-line", "logging-stall")
"""Rules that name the line of what a straggler does between its steps, or from its batch to its backward pass."""
_GIL: Final = "gil-contention"
"""A rank whose training thread waits for the GIL seems to compute longer."""
_LINE: Final = "hot-line"
_LOG: Final = "logging-stall"
_SMALL: Final = "small-collectives"
_REDUCED: Final = 0.3
"""Of what a line takes that logs, its small collectives, without the first of each step: a line that takes much more is
slow by itself."""
_LOOP: Final = "small-operations-loop"
_SAVE: Final = "checkpoint-stall"
_BELOW: Final = 2
"""Lines below a save that belong to it: `os.replace`, which frees the cached pages of the file before."""
_MOST: Final = 0.5
"""Of a straggler's excess: a line that takes less is not why it is late."""


def with_one_owner(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings without those that another one explains.

    A straggler whose cause is one of the others, which then tells of both: a rank is late because of a line if only
    this rank has it, and it takes most of what the others wait for. And a line in a loop that is to go as a whole, or
    directly below a save; and a line of a thread that more samples have shown at another one since.
    """
    findings = [each for each in findings if not any(_replaces(other, each) for other in findings)]
    findings = _of_all_ranks(findings)
    findings = [each for each in findings if not any(_is_better_cure(other, each) for other in findings)]
    loops = [each for each in findings if each.rule == _LOOP]
    kept = [each for each in findings if each.rule != _LINE or not any(_is_in(each, loop) for loop in loops)]
    for save in [each for each in kept if each.rule == _SAVE]:
        if below := [each for each in kept if _is_below(each, save)]:
            kept = [each for each in kept if each not in below]
            kept[kept.index(save)] = _saved_with(save, below)
    kept = [each for each in kept if not any(_is_log_of(each, other) or _is_less_of(each, other) for other in kept)]
    for late in findings:
        if (owner := _owner(late, kept)) is not None:
            kept.remove(late)
            kept[kept.index(owner)] = _with(owner, late)
    return kept


def _replaces(later: Finding, earlier: Finding) -> bool:
    """Whether both are of one thread or of the same lines, and the later one has the more samples."""
    if later.rule != earlier.rule or later.ranks != earlier.ranks:
        return False
    if later.rule == _GIL:
        is_same = later.evidence.get("thread") == earlier.evidence.get("thread")
    else:
        is_same = _share_lines(later, earlier)
    return is_same and float(later.evidence.get("samples", 0.0)) > float(earlier.evidence.get("samples", 0.0))


def _is_better_cure(one: Finding, other: Finding) -> bool:
    """Whether both are of the slow fetches of the same ranks, in different windows, and the first one saves more."""
    is_same = {one.rule, other.rule} >= SLOW_FETCHES and one.ranks == other.ranks
    return is_same and one.seconds_per_hour > other.seconds_per_hour


def _of_all_ranks(findings: Sequence[Finding]) -> list[Finding]:
    """Unite the same lines of several ranks, which may each have had another one of them as the first."""
    united: list[Finding] = []
    for found in sorted(findings, key=lambda each: -each.seconds_per_hour):
        for at, other in enumerate(united):
            if "lines" in found.evidence and "lines" in other.evidence and _share_lines(found, other):
                united[at] = replace(other, ranks=tuple(sorted({*other.ranks, *found.ranks})))
                break
        else:
            united.append(found)
    return united


def _share_lines(one: Finding, other: Finding) -> bool:
    """Whether two findings are of a file's hot lines that follow each other, and have some in common."""
    if not one.rule == other.rule == _LINE or one.file != other.file:
        return False
    (first, last), (others_first, others_last) = _lines_of(one), _lines_of(other)
    return first <= others_last and others_first <= last


def _lines_of(finding: Finding) -> tuple[int, int]:
    first, _, last = str(finding.evidence.get("lines", "")).partition("-")
    if first.isdigit() and last.isdigit():
        return int(first), int(last)
    line = finding.line or 0
    return line, line


def _is_in(line: Finding, loop: Finding) -> bool:
    """Whether a line is in a loop, of the same ranks, that takes more, and goes with it: it calls no library."""
    first, last = _lines_of(loop)
    if line.file != loop.file or line.line is None:
        return False
    if "." in str(line.evidence.get("call", "")) or not set(line.ranks) <= set(loop.ranks):
        return False
    return first <= line.line <= last and line.seconds_per_step <= loop.seconds_per_step


def _is_log_of(log: Finding, reduced: Finding) -> bool:
    """Whether a line that logs waits for other ranks: `self.log(..., sync_dist=True)`, most of whose other work goes
    with that."""
    if (log.rule, reduced.rule) != (_LOG, _SMALL) or (log.file, log.line) != (reduced.file, reduced.line):
        return False
    return set(log.ranks) <= set(reduced.ranks) and reduced.seconds_per_step >= _REDUCED * log.seconds_per_step


def _is_less_of(one: Finding, other: Finding) -> bool:
    """Whether two rules found the collectives of one line, such as those of `all_gather_object`, and the other more."""
    if {one.rule, other.rule} != {_LINE, _SMALL} or (one.file, one.line) != (other.file, other.line):
        return False
    return one.seconds_per_step < other.seconds_per_step


def _is_below(line: Finding, save: Finding) -> bool:
    """Whether a line of the same ranks is directly below that of a save."""
    if line.rule != _LINE or (line.file, line.ranks) != (save.file, save.ranks) or not line.line or not save.line:
        return False
    return save.line <= line.line <= save.line + _BELOW


def _saved_with(save: Finding, below: Sequence[Finding]) -> Finding:
    below_s = sum(each.seconds_per_step for each in below)
    return replace(
        save,
        seconds_per_step=save.seconds_per_step + below_s,
        seconds_per_hour=save.seconds_per_hour + sum(each.seconds_per_hour for each in below),
        evidence={**save.evidence, "seconds_below_saves_per_step": below_s},
    )


def _owner(late: Finding, findings: Iterable[Finding]) -> Finding | None:
    if late.rule != "straggler" or (cause := late.evidence.get("cause")) not in ("other", "compute"):
        return None
    forward_s = float(late.evidence.get("forward_excess_seconds_per_step", 0.0))
    is_line = cause == "other" or forward_s >= _MOST * late.seconds_per_step
    explaining = (*_EXPLAINING, _GIL) if is_line else (_GIL,)
    lines = [
        each
        for each in findings
        if each.rule in explaining
        and each.ranks == late.ranks
        and each.seconds_per_step >= _MOST * late.seconds_per_step
    ]
    return max(lines, key=lambda each: each.seconds_per_step, default=None)


def _with(owner: Finding, late: Finding) -> Finding:
    only = ONLY_ONE.format(rank=late.ranks[0])
    return replace(
        owner,
        evidence={**owner.evidence, "straggler_excess_seconds_per_step": late.seconds_per_step},
        advice=owner.advice if only in owner.advice else f"{owner.advice} {only}",
    )
