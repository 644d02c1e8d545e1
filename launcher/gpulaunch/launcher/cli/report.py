"""`gpulaunch report`: the findings of a run, from its run directory, while it runs or afterwards."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.report_document import as_markdown, as_page
from gpulaunch.launcher.cli.report_page import PAGE_FILE
from gpulaunch.launcher.cli.verb_parser import VerbParser, wants_help
from gpulaunch.launcher.cli.waiting import show_activity
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.files import shown, write_text
from gpulaunch.launcher.runs.find import find_run, here
from gpulaunch.launcher.runs.processes import RunError

_HELP = """\
usage: gpulaunch report [RUN] [--json | --md | --html [FILE.html] [--static]]

Shows the findings of a run: what to change, where, and the cost per hour. RUN is a run directory, or the name of one
below ./gpulaunch-runs (default: the newest there). docs/findings.md describes each rule.

  --json                the findings as JSON, and under `view` all data of the run, as in gpulaunch top --json
  --md                  the full report (steps, memory, copies, failures, goodput) as Markdown
  --html [FILE.html]    the full report as one self-contained page, in report.html of the run directory or FILE.html;
                        `-` is stdout. With pip install 'gpulaunch[report]', its charts are interactive
  --static              without interactive charts: a page of 100 kB instead of 5 MB

A run with steps writes a static report.html when it ends.

Exit code 0 whether there are findings or not, 2 for a usage error.
"""


def run(argv: Sequence[str]) -> int:
    """Print or write the report of a run, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    given = _parse(argv)
    try:
        run_dir = find_run(given.run[0] if given.run else None, here())
    except RunError as err:
        raise UsageError(f"report: {err}") from None
    if given.html is not None:
        with show_activity("reading the run"):
            page = as_page(run_dir, static=given.static)
        if given.html == "-":
            answer(page)
            return 0
        into = given.html or os.path.join(run_dir, PAGE_FILE)
        try:
            write_text(into, page)
        except OSError as err:
            raise UsageError(f"report: cannot write {into}: {err.strerror}; specify a file with --html") from None
        answer(f"report in {shown(into)}\n")
    elif given.md:
        with show_activity("reading the run"):
            page = as_markdown(run_dir)
        answer(page)
    elif given.json:
        with show_activity("reading the run"):
            everything = as_json(whole(run_dir))
        answer(everything + "\n")
    else:
        with show_activity("reading the run"):
            report = collect(Path(run_dir))
            is_clear = report["watched"] and not any(found["active"] for found in report["findings"])
            text = as_text(report, _standing(run_dir), where_the_time_goes(run_dir) if is_clear else "")
        answer(text + "\n")
    return 0


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    words = VerbParser("report")
    words.add_argument("run", nargs="*")
    how = words.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true")
    how.add_argument("--md", action="store_true")
    how.add_argument("--html", nargs="?", const="", metavar="FILE.html")
    words.add_argument("--static", action="store_true")
    return words


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = words()
    given = parser.read(argv)
    if given.html and given.html != "-" and not given.html.endswith((".html", ".htm")):
        # Accept `report --html RUN`: its meaning is clear.
        if given.run:
            raise UsageError(f"report: --html {given.html}: the file name must end in .html")
        given.run, given.html = [given.html], ""
    if given.static and given.html is None:
        raise UsageError("report: --static requires --html")
    parser.one_run(given.run)
    return given


def _standing(run_dir: str) -> str:
    """The result of the run, in a sentence; "" if unknown."""
    from gpulaunch.exporters.report.content import standing
    from gpulaunch.exporters.view.load import load_run
    from gpulaunch.exporters.view.model import Status
    from gpulaunch.profiler.redact import redact

    view = load_run(run_dir)
    return "" if view.status is Status.UNKNOWN else redact(standing(view))


def collect(run_dir: Path) -> dict[str, Any]:
    """Return all findings of a run, the largest loss first. A job of several nodes has a directory for each.

    Data of an earlier run in the same directory is marked (`earlier`).
    """
    from gpulaunch.exporters.files.findings import FINDINGS_FILE, read_findings
    from gpulaunch.exporters.files.tuned import tried_in
    from gpulaunch.exporters.store.locations import nodes_of
    from gpulaunch.exporters.view.files import read_files
    from gpulaunch.profiler.record import order_of

    notes: list[str] = []
    findings: list[dict[str, Any]] = []
    watched = False
    for _, directory in nodes_of(run_dir):
        begins = [line["time_s"] for line in read_files(directory).events if line["event"] == "run_started"]
        began_s = max(begins, default=0.0)
        for found in read_findings(directory / FINDINGS_FILE, notes):
            earlier = found["last_seen_s"] < began_s
            findings.append({**found, "active": found["active"] and not earlier, "earlier": earlier})
        with contextlib.suppress(OSError):
            watched = watched or os.stat(directory / FINDINGS_FILE).st_mtime >= began_s
    return {
        "version": 1,
        "run": str(run_dir),
        "watched": watched,
        "profiled": read_files(run_dir).job.get("profile") is not False,
        "findings": sorted(
            findings,
            key=lambda found: (
                found["earlier"],
                not found["active"],
                *order_of(found["evidence"], found["seconds_per_hour"]),
            ),
        ),
        "tried": list(tried_in(run_dir, notes)),
        "notes": notes,
    }


def whole(run_dir: str) -> dict[str, Any]:
    """The result of `collect` and, as `view`, everything known of the run; without secrets, as a page is."""
    from gpulaunch.exporters.view.as_json import to_json
    from gpulaunch.exporters.view.load import load_run
    from gpulaunch.profiler.redact import redact_all

    return cast("dict[str, Any]", redact_all({**collect(Path(run_dir)), "view": to_json(load_run(run_dir))}))


def headlines(run_dir: str, most: int = 3, *, since_s: float = 0.0) -> list[str]:
    """The final findings, a line each, the largest loss first; empty if there were none, or without a profiler.

    Args:
        run_dir: the run directory.
        most: maximum number of lines, plus one that there are more.
        since_s: findings before this Unix time belong to another run.
    """
    every = collect(Path(run_dir))["findings"]
    told: dict[tuple[str, str], dict[str, Any]] = {}
    for found in every:
        if found["active"] and found["last_seen_s"] >= since_s:
            told.setdefault((found["rule"], _where(found)), found)  # of the same one on several nodes the largest
    findings = list(told.values())
    if not findings and any(found["last_seen_s"] >= since_s for found in every):
        return [_printable(f"no finding is active at the end; earlier ones: gpulaunch report {run_dir}")]
    lines = [f"found: {found['rule']}{_where(found)}: {_cost(found)}; {found['advice']}" for found in findings[:most]]
    if len(findings) > most:
        lines.append(f"and {len(findings) - most} more: gpulaunch report {run_dir}")
    return [_printable(line) for line in lines]


def as_json(report: Mapping[str, Any]) -> str:
    """The report for machines."""
    import json

    return json.dumps(report, indent=2, allow_nan=False)


def where_the_time_goes(run_dir: str) -> str:
    """The lines of the training loop that take most of the time, and those of what it calls, in a sentence; "" if that
    is not known."""
    from gpulaunch.profiler.samplers.busiest_lines import busiest_lines, deepest_functions
    from gpulaunch.profiler.samplers.folded import STACKS_FILE, Folded, load

    try:
        stacks = load(Path(run_dir, STACKS_FILE), Folded())
        lines, deepest = busiest_lines(stacks), deepest_functions(stacks)
    except Exception:  # a sentence is not worth the end of a run
        return ""
    of_loop = {place for place, _ in lines}
    shares = " and ".join(f"{place} ({share:.0%})" for place, share in lines)
    inside = " and ".join(f"{name} at {place} ({share:.0%})" for name, place, share in deepest if place not in of_loop)
    spent = ", below that in ".join(filter(None, (shares, inside)))
    return f"most time is spent in {spent}" if spent else ""


def as_text(report: Mapping[str, Any], standing: str = "", spent: str = "") -> str:
    """The report for people: the result of the run in a sentence, where the time is `spent` if that is given, and each
    finding in three lines."""
    from gpulaunch.exporters.view.findings import not_profiled

    notes = [f"note: {note}" for note in report["notes"]]
    if not report["watched"] and not notes:
        found = not_profiled(requested=report["profiled"])
    elif notes and not report["findings"]:  # otherwise "nothing found" would claim more than is known
        found = "findings are unknown (--md shows the data of telemetry.sqlite)"
    else:
        found = _counted([found for found in report["findings"] if not found["earlier"]])
    lines = [f"{report['run']}: {found}", *([standing] if standing else []), *notes]
    lines += [f"{spent[0].upper()}{spent[1:]}."] if spent else []
    for found in report["findings"]:
        over = ", in an earlier run only" if found["earlier"] else "" if found["active"] else ", no longer active"
        lines += [
            "",
            f"{found['rule']}{_where(found)}{over}",
            f"  {_cost(found)}; {_ranks(found['ranks'])}; confidence {found['confidence']:.0%}",
            f"  {found['advice']}",
        ]
    lines += [*([""] if report["tried"] else []), *report["tried"]]
    return "\n".join(map(_printable, lines))


def _printable(line: str) -> str:
    """Escape what is not printable in a line: it could harm a terminal, or look like a separate line.

    Paths and function names come from the program and may contain any character.
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
    step_s = found["seconds_per_step"]
    of_step = f"{1e3 * step_s:.3g} ms" if step_s < 0.9995 else f"{step_s:.3g} s"
    return f"{of_step} of every step, {found['seconds_per_hour']:.0f} s of every hour"


def _ranks(ranks: Sequence[object]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
