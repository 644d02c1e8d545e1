"""`gpulaunch runs`: lists stored runs with their size and age, and removes finished ones."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, time_s, wants_help
from gpulaunch.launcher.failure.redact import inert
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.runs.find import RUNS, here
from gpulaunch.launcher.runs.stored import CHECKPOINTS, Run, RunInUseError, is_saved_to, removable, remove, stored

_HELP = """\
usage: gpulaunch runs [DIR] [--json]
       gpulaunch runs prune [DIR] [--keep N] [--older TIME] [--checkpoints] [--dry-run]

Lists the runs whose directories are directly below DIR (default: ./gpulaunch-runs), the newest first: state, time
since the last change, size, number of files, size of its checkpoints. `stopped`: ended by a signal. `lost`: no summary,
and no agent on this machine.

prune removes finished runs, and prints each:
  --keep N              keep the N newest of all runs
  --older TIME          only those unchanged for this time, such as 30d, 12h
  --checkpoints         also their checkpoints; by default these are kept, with the files needed to resume from them
  --dry-run             only print what would be removed

At least one of --keep and --older is required; with both, both must allow it. Active runs are never removed, lost runs
only after a day, and files that gpulaunch did not create stay.

Exit code 0, 1 if something could not be removed, 2 for a usage error.
"""


_ELSEWHERE = "for jobs with --job-dir, specify the directory that contains theirs: gpulaunch runs DIR"


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("runs")
    parser.add_argument("dir", nargs="*")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=_count)
    parser.add_argument("--older", type=time_s)
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    return parser


def run(argv: Sequence[str]) -> int:
    """List or remove runs, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    given = words().read(argv)
    pruning = given.dir[:1] == ["prune"]
    directories = given.dir[1:] if pruning else given.dir
    if len(directories) > 1:
        raise UsageError(f"runs: one directory at a time, not {len(directories)}: {' '.join(directories)}")
    directory = os.path.join(here(), directories[0] if directories else RUNS)
    asked = [name for name in ("keep", "older") if getattr(given, name) is not None]
    if pruning and not asked:
        raise UsageError("runs prune: --keep N, --older TIME, or both are required")
    if pruning and given.json:
        raise UsageError("runs prune: --json is only for the list")
    if not pruning and (asked or given.checkpoints or given.dry_run):
        raise UsageError("runs: --keep, --older, --checkpoints and --dry-run are for `gpulaunch runs prune`")
    try:
        directory = os.path.realpath(directory)
        found = stored(directory)
    except FileNotFoundError:  # or the current directory is gone
        found = []
    except OSError as err:
        raise UsageError(f"runs: cannot read {directory}: {err.strerror}") from None
    if pruning:
        return _prune(found, given)
    answer(_as_json(found) if given.json else _as_text(found, directory))
    if found and not given.json and not directories:
        print(f"gpulaunch: {_ELSEWHERE}", file=sys.stderr)
    return 0


def _prune(found: Sequence[Run], given: argparse.Namespace) -> int:
    from gpulaunch.exporters.view.figures import PROSE, count

    going = removable(found, now_s=time.time(), keep=given.keep, older_s=given.older, checkpoints=given.checkpoints)
    trouble = num_files = freed_bytes = done = 0
    for each in going:
        stays: list[str] = []
        is_used = given.checkpoints and is_saved_to(each)
        if is_used and each.is_pruned:
            _complain(f"{each.name} stays: another run saves there")
            continue
        takes = given.checkpoints and not is_used
        if not given.dry_run:
            try:
                stays = remove(each, checkpoints=takes)
            except RunInUseError:
                _complain(f"{each.name} stays: it is in use")
                continue
            except OSError as err:
                _complain(f"{each.name} cannot be removed completely: {err.filename or ''}: {err.strerror}")
                trouble = 1
                continue
        kept_bytes = 0 if takes else each.checkpoint_bytes
        done, num_files = done + 1, num_files + each.num_files
        freed_bytes += each.size_bytes - kept_bytes
        others = ", ".join(name for name in stays if name != CHECKPOINTS) if not kept_bytes else ""
        why = ": another run saves there" if is_used else ""
        kept = f"; its checkpoints stay ({PROSE.size(kept_bytes)}){why}" if kept_bytes else ""
        kept += f"; kept, because gpulaunch did not create it: {others}" if others else ""
        size = PROSE.size(each.size_bytes - kept_bytes)
        answer(f"{'would remove' if given.dry_run else 'removed'} {each.name} ({_about(each)}, {size}){kept}\n")
    verb = "would be removed" if given.dry_run else "removed"
    answer(f"{done} of {_runs(found)} {verb}, {PROSE.size(freed_bytes)} in up to {count(num_files)} files\n")
    return trouble


def _about(run: Run) -> str:
    from gpulaunch.exporters.view.figures import PROSE

    return f"{run.state.value} {PROSE.took(max(0.0, time.time() - run.changed_s))} ago"


def _as_text(found: Sequence[Run], directory: str) -> str:
    from gpulaunch.exporters.view.figures import PROSE, count

    if not found:
        return f"no runs in {directory}; {_ELSEWHERE}\n"
    now_s = time.time()
    rows = [("RUN", "STATE", "AGE", "SIZE", "FILES", "CHECKPOINTS")] + [
        (
            run.name,
            run.state.value,
            PROSE.took(max(0.0, now_s - run.changed_s)),
            PROSE.size(run.size_bytes),
            count(run.num_files),
            PROSE.size(run.checkpoint_bytes) if run.checkpoint_bytes else "-",
        )
        for run in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    total = f"{_runs(found)}, {PROSE.size(sum(run.size_bytes for run in found))} in {directory}"
    return "\n".join([*(line.rstrip() for line in lines), total]) + "\n"


def _runs(found: Sequence[Run]) -> str:
    return "1 run" if len(found) == 1 else f"{len(found)} runs"


def _as_json(found: Sequence[Run]) -> str:
    rows = [
        {
            "path": run.path,
            "state": run.state.value,
            "began_s": run.began_s,
            "changed_s": run.changed_s,
            "size_bytes": run.size_bytes,
            "checkpoint_bytes": run.checkpoint_bytes,
            "files": run.num_files,
        }
        for run in found
    ]
    return json.dumps({"version": 1, "runs": rows}, indent=2) + "\n"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return int(text)


def _complain(line: str) -> None:
    print(inert(f"gpulaunch runs: {line}"), file=sys.stderr, flush=True)
