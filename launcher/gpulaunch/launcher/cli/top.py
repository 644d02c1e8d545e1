"""`gpulaunch top`: a run in the terminal, while it runs or afterwards."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, wants_help
from gpulaunch.launcher.cli.waiting import show_activity
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.runs.find import find_run, here, none_under_way
from gpulaunch.launcher.runs.processes import RunError, read_group, take_rank

if TYPE_CHECKING:
    from gpulaunch.exporters.tui.task import Task
    from gpulaunch.exporters.view.model import RunView
    from gpulaunch.launcher.hang.stacks import Stacks

_HELP = """\
usage: gpulaunch top [RUN] [--once | --json]

Shows an active or finished run in the terminal: ranks by phase, findings, data loading, copies, memory, attempts and
their failures, logs, stacks, traces. Controlled by keys (? lists them), in at least 40 columns. RUN is a run directory,
or the name of one below ./gpulaunch-runs (default: the newest there). For a job with --job-dir, specify that directory.

  --once                print everything once, as plain text; the default without a terminal
  --json                print everything once, as JSON

The interactive screen needs pip install 'gpulaunch[top]'; --once and --json do not.
Exit code 0, 2 for a usage error or if the screen cannot be shown.
"""
_NARROWEST = 80
"""Minimum width of output that is printed once."""
_QUIET_S = 30.0
"""A rank without a step for this long may be interrupted by a signal, if its stack is not readable otherwise."""


def run(argv: Sequence[str]) -> int:
    """Show the run that the arguments name, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    options = _parse(argv)
    try:
        run_dir = Path(find_run(options.run[0] if options.run else None, here()))
        notice = "" if options.run else none_under_way(here())
    except RunError as err:
        raise UsageError(f"top: {err}") from None
    if options.json:
        answer(_as_json(run_dir))
    elif options.once or not _on_a_terminal():
        answer(_as_text(run_dir))
        if notice:
            print(f"gpulaunch: {notice}", file=sys.stderr)
    else:
        _show(run_dir, notice)
    return 0


def _as_json(run_dir: Path) -> str:
    import json

    from gpulaunch.exporters.view.as_json import to_json
    from gpulaunch.exporters.view.load import load_run

    with show_activity("reading the run"):
        return json.dumps(to_json(load_run(run_dir)), allow_nan=False) + "\n"


def _as_text(run_dir: Path) -> str:
    from gpulaunch.exporters.tui.once import once
    from gpulaunch.exporters.view.load import load_run

    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    width = max(_NARROWEST, shutil.get_terminal_size((_NARROWEST, 24)).columns)
    with show_activity("reading the run"):
        return once(load_run(run_dir), width, ascii_only=not encoding.startswith("utf"))


def _on_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _show(run_dir: Path, notice: str) -> None:
    try:
        from gpulaunch.exporters.tui.app import Top
    except ImportError as err:
        why = f"{err.name or err} is missing" if isinstance(err, ModuleNotFoundError) else f"incompatible: {err}"
        raise UsageError(
            f"top: the screen needs Textual ({why}): pip install 'gpulaunch[top]'; or use gpulaunch top --once"
        ) from None
    # No mouse: over ssh the terminal's own, which selects and copies text, is worth more.
    app = Top(run_dir, dump=_dump_of(run_dir), trace=lambda rank: trace_task(run_dir, rank), notice=notice)
    app.run(mouse=False)
    if app.fault is not None:
        raise app.fault


# -- key commands for a running job


def trace_task(run_dir: Path, rank: int | None) -> Task:
    """Return the task that runs `gpulaunch trace` for a rank; None: for all of them."""
    from gpulaunch.exporters.tui.task import Command

    code = "import sys; from gpulaunch.launcher.cli.main import main; sys.exit(main(sys.argv[1:]))"
    whom = "all" if rank is None else str(rank)
    command = [sys.executable, "-P", "-u", "-c", code, "trace", "--rank", whom, "--job-dir", os.path.abspath(run_dir)]
    return Command(command)


def _dump_of(run_dir: Path) -> Callable[[RunView, int], Task]:
    return lambda view, rank: Dump(run_dir, rank, quiet_s=_quiet_s(view, rank))


def _quiet_s(view: RunView, rank: int) -> float:
    last_s = next((each.last_step_s for each in view.ranks if each.rank == rank), None)
    return 0.0 if last_s is None or view.seen_s is None else view.seen_s - last_s


class Dump:
    """The stacks of a rank of this node, read from outside; bounded in time."""

    def __init__(self, run_dir: Path, rank: int, *, quiet_s: float = 0.0) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._quiet_s = quiet_s

    def run(self, say: Callable[[str], None]) -> None:
        """Take the stacks and show them, the main thread first and of each the innermost frame first."""
        try:
            stacks = self._take()
        except RunError as err:
            say(str(err))
            return
        for why in stacks.refused:
            say(f"not possible: {why}")
        if not stacks.threads:
            say(f"no stack of rank {self._rank} could be read")
            return
        say(f"read by {stacks.source}; the innermost frame is on top")
        for thread in sorted(stacks.threads, key=lambda thread: thread.frames != stacks.main):
            state = "has the GIL" if thread.owns_gil else "idle" if thread.idle else "running"
            say("")
            say(f"{'main thread' if thread.frames == stacks.main else f'thread {thread.name}'} ({state})")
            for frame in thread.frames:
                say(f"  {frame.name} ({frame.file}:{frame.line})")

    def _take(self) -> Stacks:
        from gpulaunch.launcher.hang.stacks import Target, take

        group = read_group(str(self._run_dir))
        if group is None or not group.ranks:
            raise RunError("no ranks are running on this node now")
        with take_rank(group, self._rank) as process:
            rank_dir = self._run_dir / "attempts" / str(group.attempt) / f"rank-{self._rank}"
            may_signal = self._quiet_s >= _QUIET_S
            target = Target(rank=self._rank, pid=process.pid, rank_dir=str(rank_dir), may_signal=may_signal)
            return take([target])[self._rank]

    def stop(self) -> None:
        """Do nothing: it ends by itself, within seconds."""


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("top")
    parser.add_argument("run", nargs="*")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = words()
    given = parser.read(argv)
    parser.one_run(given.run)
    if given.once and given.json:
        raise UsageError("top: --once or --json, not both")
    return given
