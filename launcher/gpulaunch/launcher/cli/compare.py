"""`gpulaunch compare`: what changed between two runs, and which changes are significant."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, wants_help
from gpulaunch.launcher.cli.waiting import show_activity
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.runs.find import find_run, here
from gpulaunch.launcher.runs.processes import RunError

if TYPE_CHECKING:
    from gpulaunch.exporters.report.compare import Comparison

_HELP = """\
usage: gpulaunch compare RUN_A RUN_B [--json]

Shows what changed from RUN_A to RUN_B: step time and its phases, throughput, memory, goodput, new and resolved
findings, different settings and versions; and which changes are significant. Each is a run directory, or the name of
one below ./gpulaunch-runs.

Both runs are divided into intervals of the same length: at least three steps of either run, and at least the
resolution in which the longer run was stored (a 180th of it). Adjacent intervals are correlated, so they are grouped
into blocks. A difference is significant if the blocks of the two runs differ by more than chance allows, by more than
each run varies by itself, and by at least 3 %; and if other processes did not use the cores. Runs of several minutes
and of similar length give better results than short runs or runs of different length.

Exit code 0 whether they differ or not, 2 for a usage error.
"""
_LARGEST_BYTES = 32 << 20


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("compare")
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--json", action="store_true")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the comparison of two runs and give the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    given = words().read(argv)
    if len(given.runs) != 2:
        raise UsageError(f"compare: two runs are needed, not {len(given.runs)}: gpulaunch compare RUN_A RUN_B")
    try:
        run_dirs = [find_run(name, here()) for name in given.runs]
    except RunError as err:
        raise UsageError(f"compare: {err}") from None
    from gpulaunch.exporters.report import compared

    found = compare_runs(run_dirs[0], run_dirs[1])
    if given.json:
        answer(json.dumps(compared.as_json(found), indent=2, allow_nan=False, default=str) + "\n")
    else:
        answer(compared.as_text(found) + "\n")
    return 0


def compare_runs(run_a: str, run_b: str) -> Comparison:
    """Read two run directories and compare them; settings and notes are without secrets."""
    from gpulaunch.exporters.report.compare import compare
    from gpulaunch.exporters.view.load import load_run
    from gpulaunch.profiler.redact import redact_all

    with show_activity("reading A") as doing:
        view_a = load_run(run_a)
        doing("reading B")
        view_b = load_run(run_b)
        doing("comparing")
        found = compare(view_a, view_b, jobs=(_job(run_a), _job(run_b)))
    settings = tuple((name, redact_all(one), redact_all(other)) for name, one, other in found.settings)
    return replace(found, settings=settings)


def _job(run_dir: str) -> Mapping[str, Any]:
    """job.json; empty if it cannot be read (the view's notes say so)."""
    from gpulaunch.exporters.store.bounded import sound

    path = os.path.join(run_dir, "job.json")
    try:
        if not os.path.isfile(path):  # reading a pipe of that name would block forever
            return {}
        with open(path, "rb") as file:
            content: object = sound(json.loads(file.read(_LARGEST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else {}
