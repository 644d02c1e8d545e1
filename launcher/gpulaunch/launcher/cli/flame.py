"""`gpulaunch flame`: flame graphs of the stacks sampled while a job ran."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from gpulaunch.exporters.files.flame import Stack, boxes_of, speedscope
from gpulaunch.exporters.files.flame_svg import flame_svg
from gpulaunch.exporters.store.locations import nodes_of
from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, wants_help
from gpulaunch.launcher.cli.waiting import show_activity
from gpulaunch.launcher.failure.redact import inert
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.files import shown, write_text
from gpulaunch.launcher.runs.find import find_run, here
from gpulaunch.launcher.runs.processes import RunError
from gpulaunch.profiler.samplers.folded import STACKS_FILE, Folded, load

_HELP = """\
usage: gpulaunch flame [RUN] [--out DIR]

Draws the stacks of the ranks' main threads that were sampled while a job ran (stacks.folded in its run directory):
one flame graph per phase of the step and one for all phases, as SVG files for a browser, and one file for the viewer
speedscope. For an active job, the stacks written so far (every 30 s). If several runs used the directory, those of the
newest run with stacks.

RUN is a run directory, or the name of one below ./gpulaunch-runs (default: the newest one there that has stacks).

  --out DIR             output directory (default: `flame` in the run directory)

Exit code 0 if there are stacks, 1 if there are none, 2 for a usage error.
"""
_NONE = (
    "the job ran with --no-profile or ended within seconds, or its processes cannot be read "
    "(see `ptrace` and `collector stacks` of gpulaunch doctor)"
)
_WHOLE = "all"


def run(argv: Sequence[str]) -> int:
    """Draw what the arguments name, print the path, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    options = _parse(argv)
    try:
        run_dir = Path(find_run(options.run[0] if options.run else None, here(), having=STACKS_FILE))
    except RunError as error:
        raise UsageError(f"flame: {error}" + ("" if options.run else f". Possible reasons: {_NONE}")) from None
    with show_activity("reading stacks"):
        stacks = read_all(run_dir)
    if not stacks.samples():
        answer(f"no stacks in {shown(str(run_dir))}: {_NONE}\n")
        return 1
    into = Path(options.out) if options.out is not None else run_dir / "flame"
    try:
        with show_activity("drawing"):
            write_all(stacks, into, name=inert(run_dir.name))
    except OSError as error:
        raise UsageError(f"flame: cannot write to {into}: {error.strerror}; specify a directory with --out") from None
    files = f"{_WHOLE}.svg, an SVG for each phase, stacks.speedscope.json"
    answer(f"{table(stacks)}drawn in {shown(str(into))}: {files}\n")
    return 0


def read_all(run_dir: Path) -> Folded:
    """The stacks of a run; a job of several nodes has a directory for each node.

    Raises:
        UsageError: one of the files cannot be read.
    """
    stacks = Folded()
    for _, directory in nodes_of(run_dir):
        file = directory / STACKS_FILE
        try:
            load(file, stacks)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"flame: cannot read {file}: {error.strerror}") from None
    return stacks


def write_all(stacks: Folded, into: Path, *, name: str) -> None:
    """Write an SVG for each phase, one for all, and the speedscope file. Raises OSError."""
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    samples = stacks.samples()
    total = sum(samples.values())
    by_phase: dict[str, list[Stack]] = {phase: list(stacks.stacks(phase)) for phase in samples}
    whole: list[Stack] = [((phase, *labels), count) for phase in samples for labels, count in by_phase[phase]]
    note = "the wider a box, the more samples; the outermost frames are on top; a click zooms"
    for phase, counted in by_phase.items():
        title = f"{name}: {phase}, {samples[phase]} of {total} samples"
        write_text(str(into / f"{phase}.svg"), flame_svg(boxes_of(counted), title=title, note=note))
    title = f"{name}: {total} samples of the ranks' main threads, by phase"
    write_text(str(into / f"{_WHOLE}.svg"), flame_svg(boxes_of(whole), title=title, note=note))
    content = speedscope({_WHOLE: whole, **by_phase}, name=name, exporter="gpulaunch")
    write_text(str(into / "stacks.speedscope.json"), json.dumps(content))


def table(stacks: Folded) -> str:
    """One line for each phase: number of samples, share, and the most frequent place."""
    samples = stacks.samples()
    total = sum(samples.values())
    lines = ["phase       samples  share  most often in"]
    for phase, count in samples.items():
        often, where = _most_often(stacks, phase)
        lines.append(f"{phase:<11} {count:>7}  {count / total:>5.0%}  {where} ({often / count:.0%})")
    return "\n".join(lines) + "\n"


def _most_often(stacks: Folded, phase: str) -> tuple[int, str]:
    """The most frequent deepest frame in the stacks of a phase."""
    deepest: dict[str, int] = {}
    for labels, count in stacks.stacks(phase):
        deepest[labels[-1]] = deepest.get(labels[-1], 0) + count
    return max((count, label) for label, count in deepest.items())


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("flame")
    parser.add_argument("run", nargs="*")
    parser.add_argument("--out")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = words()
    given = parser.read(argv)
    parser.one_run(given.run)
    return given
