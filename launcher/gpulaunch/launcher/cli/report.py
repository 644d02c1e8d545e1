"""`gpulaunch report`: what a run's profiler found, from its run directory, while it runs or afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.words import Words, wants_help
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.runs.find import find_run, here
from gpulaunch.launcher.runs.group import RunError

_HELP = """\
usage: gpulaunch report [RUN] [--json]

Shows what was found in a run: what to change, where, and what it costs per hour. RUN is a run directory, or the name
of one below ./gpulaunch-runs; without it, the newest there. docs/findings.md has a page for each rule.

Exit code 0 whether something was found or not, 2 for wrong words.
"""


def run(argv: Sequence[str]) -> int:
    """Print the report of a run and give the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    words = Words("report")
    words.add_argument("run", nargs="*")
    words.add_argument("--json", action="store_true")
    given = words.read(argv)
    if len(given.run) > 1:
        raise UsageError(f"report: one run at a time, not {len(given.run)}: {' '.join(given.run)}")
    try:
        run_dir = find_run(given.run[0] if given.run else None, here())
    except RunError as err:
        raise UsageError(f"report: {err}") from None
    report = collect(Path(run_dir))
    answer((as_json(report) if given.json else as_text(report)) + "\n")
    return 0


def collect(run_dir: Path) -> dict[str, Any]:
    """Give everything that was found in a run, the largest loss first. A job of several nodes has a directory each."""
    from gpulaunch.exporters.files.findings import FINDINGS_FILE, read_findings

    files = [run_dir / FINDINGS_FILE, *sorted(run_dir.glob(f"node-*/{FINDINGS_FILE}"))]
    findings = [found for file in files for found in read_findings(file)]
    return {
        "version": 1,
        "run": str(run_dir),
        "watched": any(file.exists() for file in files),
        "findings": sorted(findings, key=lambda found: -found["seconds_per_hour"]),
    }


def headlines(run_dir: str, most: int = 3, *, since_s: float = 0.0) -> list[str]:
    """What stood in the end, a line each, the largest loss first; empty where nothing did, or where nobody watched.

    Args:
        run_dir: the run directory.
        most: so many lines at most, and one that there are more.
        since_s: what stood before (Unix time) is another run's.
    """
    every = collect(Path(run_dir))["findings"]
    findings = [found for found in every if found["active"] and found["last_seen_s"] >= since_s]
    lines = [f"found: {found['rule']}{_where(found)}: {_cost(found)}; {found['advice']}" for found in findings[:most]]
    if len(findings) > most:
        lines.append(f"and {len(findings) - most} more: gpulaunch report {run_dir}")
    return [_printable(line) for line in lines]


def as_json(report: Mapping[str, Any]) -> str:
    """The report for machines."""
    import json

    return json.dumps(report, indent=2)


def as_text(report: Mapping[str, Any]) -> str:
    """The report for people: a finding in three lines."""
    if not report["watched"]:
        return _printable(f"{report['run']}: nobody watched this run (--no-profile?), or it made no steps")
    lines = [f"{report['run']}: {_counted(report['findings'])}"]
    for found in report["findings"]:
        lines += [
            "",
            f"{found['rule']}{_where(found)}{'' if found['active'] else ', not any more'}",
            f"  {_cost(found)}; {_ranks(found['ranks'])}; confidence {found['confidence']:.0%}",
            f"  {found['advice']}",
        ]
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    """A line as it is, but for what does not print: it could harm a terminal, or pass for a line of its own.

    Paths and names of functions are the program's, and it may have made them of anything.
    """
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def _where(found: Mapping[str, Any]) -> str:
    place = f" {found['file']}:{found['line']}" if found["file"] else ""
    return place + (f" ({found['subject']})" if found["subject"] else "")


def _counted(findings: Sequence[object]) -> str:
    return "nothing found" if not findings else f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"


def _cost(found: Mapping[str, Any]) -> str:
    if not found["seconds_per_step"]:
        return "costs no time, or none yet"
    return f"{1e3 * found['seconds_per_step']:.3g} ms of every step, {found['seconds_per_hour']:.0f} s of every hour"


def _ranks(ranks: Sequence[object]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
