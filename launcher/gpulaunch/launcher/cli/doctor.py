"""`gpulaunch doctor`: is this machine fit to run and watch a job, and if not, what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.checks import Finding, Status, checks
from gpulaunch.launcher.cli.collectors import collectors, hooks, traces
from gpulaunch.launcher.cli.verb_parser import VerbParser, wants_help
from gpulaunch.launcher.cli.waiting import told_while
from gpulaunch.launcher.job.host_info import look

_HELP = """\
usage: gpulaunch doctor [--json]

Checks versions, GPUs, tracing, shared memory, limits, ports, name resolution, kernel and installation, and what the
profiler can measure here: every collector of the sidecar, and every part of the probe, by arming it in a process of its
own that imports torch.

Each line: ok, warn (works, with a loss) or fail (jobs will not run), what was found, and what to do.
Exit code 0 unless something is `fail`, then 1. Nothing is changed and nothing is left behind.
"""


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("doctor")
    parser.add_argument("--json", action="store_true")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run all checks, print the results, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    in_json = words().read(argv).json
    findings = examine()
    answer((as_json(findings) if in_json else as_text(findings)) + "\n")
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0


def examine() -> list[Finding]:
    """All findings; a check that fails itself is one of them, and does not stop the others."""
    findings: list[Finding] = []
    with told_while("looking at this machine") as doing:
        every = {**checks(os.environ, look(os.environ)), "collectors": collectors, "probe": hooks, "traces": traces}
        for number, (name, check) in enumerate(every.items()):
            doing(f"looking at {name}", number / len(every))
            try:
                findings.extend(check())
            except Exception as err:  # detecting machines strange enough to break a check is a doctor's purpose
                value, advice = f"{type(err).__name__}: {err}", "this check could not be made; please report it"
                findings.append(Finding(name=name, status=Status.WARN, value=value, advice=advice))
    return findings


def as_text(findings: Sequence[Finding]) -> str:
    """One line per finding, and what to do on the next."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.status.value:<5} {finding.name:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"{'':<5} {'':<{width}}  -> {finding.advice}")
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    lines.append(", ".join(f"{count} {status.value}" for status, count in counts.items()))
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """The same as JSON."""
    import json

    checks = [
        {"name": each.name, "status": each.status.value, "value": each.value, "advice": each.advice}
        for each in findings
    ]
    return json.dumps({"version": 1, "checks": checks}, indent=2)
