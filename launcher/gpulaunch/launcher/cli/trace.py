"""`gpulaunch trace`: records the operations of the ranks of an active run on this node."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from typing import Any

from gpulaunch.launcher.agent.segments import directory_of
from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.trace_result import TraceResult, as_lines, time_of
from gpulaunch.launcher.cli.tracer import Rank, Tracer, file_name
from gpulaunch.launcher.cli.verb_parser import VerbParser, count, time_s, wants_help
from gpulaunch.launcher.cli.waiting import Activity, show_activity
from gpulaunch.launcher.job.options import UsageError, did_you_mean
from gpulaunch.launcher.loop.files import write_json
from gpulaunch.launcher.runs.events_log import note
from gpulaunch.launcher.runs.find import find_under_way, here
from gpulaunch.launcher.runs.processes import RunError, RunProcesses, read_group, take_rank
from gpulaunch.profiler.channel.clock import monotonic_ns
from gpulaunch.profiler.channel.segment import SegmentReader
from gpulaunch.profiler.daemon.kineto import WHAT
from gpulaunch.profiler.daemon.window import LONGEST_S, Window, length_s, slowest, speed_of

_HELP = """\
usage: gpulaunch trace [RUN] [--steps N | --duration TIME] [options]

Records the operations of the ranks of an active run on this node, with torch's own profiler. The program is neither
changed nor restarted; all ranks start recording at the same time. Open the files in https://ui.perfetto.dev
RUN is a run directory, or the name of one below ./gpulaunch-runs (default: the only active run there).

  --steps N             record at least N steps (default: 5)
  --duration TIME       record for this time instead (2s, 500ms; at most 60s)
  --rank N|slowest|all  ranks to record (default: all of this node)
  --what LIST           cpu: operations; cuda: kernels, copies and calls; memcpy: copies only (default: cpu,cuda)
  --job-dir DIR         the same as RUN
  --out DIR             output directory (default: traces/<time> in the run directory)
  --again               even if the last trace was made less than ten minutes ago

Recording slows a rank down, on a GPU possibly for some time afterwards: steps and memory before, during and after are
shown. Exit code 0 if all traces were recorded, 1 if some are missing, 2 for a usage error.
"""
_STEPS = 5
_BETWEEN_S = 600.0
"""Interval between two traces: each costs the job time, and a little memory that is not freed."""


def run(argv: Sequence[str]) -> int:
    """Make the requested traces, report their cost, and return the exit code."""
    if wants_help(argv):
        answer(_HELP)
        return 0
    options = _parse(argv)
    try:
        run_dir = find_under_way(options.run, here())
        group = _group(run_dir)
        with contextlib.ExitStack() as stack:
            ranks = _ranks(stack, group, options.rank)
            with _one_at_a_time(run_dir, again=options.again) as made:
                results = _trace(options, run_dir, group, ranks)
                if any(result.path for result in results):
                    made()
    except RunError as err:
        raise UsageError(f"trace: {err}") from None
    return 0 if all(result.path for result in results) else 1


def _trace(options: argparse.Namespace, run_dir: str, group: RunProcesses, ranks: list[Rank]) -> list[TraceResult]:
    steps = {rank.number: rank.steps() for rank in ranks}
    if options.rank == "slowest":
        ranks = [rank for rank in ranks if rank.number == slowest(steps)]
    speeds = [speed for rank in ranks if (speed := speed_of(steps[rank.number])) is not None]
    if not speeds and options.duration is None:
        raise RunError("no step has completed yet, so the step time is unknown; wait, or use --duration")
    step_s = max((speed.step_s for speed in speeds), default=0.0)
    duration_s = options.duration
    if duration_s is None:
        duration_s = max(length_s(options.steps, speed) for speed in speeds)
    if duration_s > LONGEST_S:
        raise RunError(f"{options.steps} steps would take {duration_s:.0f} s, and the maximum is {LONGEST_S:.0f} s")
    directory = _directory(options.out, run_dir, ranks)

    waiting = contextlib.ExitStack()

    def tell(window: Window) -> Activity:
        numbers = ", ".join(str(rank.number) for rank in ranks)
        in_s = (window.start_ns - monotonic_ns()) / 1e9
        answer(
            f"rank {numbers}: a trace of {time_of(duration_s)} starts in {in_s:.0f} s (steps take {time_of(step_s)})\n"
        )
        return waiting.enter_context(show_activity("waiting for the start", lasts_s=in_s))

    tracer = Tracer(ranks, channel_dir=_channel_dir(group), directory=directory, what=options.what)
    try:
        with waiting:
            results = tracer.make(duration_s=duration_s, step_s=step_s, tell=tell)
    except OSError as err:
        raise RunError(f"{err.strerror}: {err.filename or _channel_dir(group)}") from None
    finally:
        if options.out is None:
            with contextlib.suppress(OSError):  # it is empty if no trace was made
                os.rmdir(directory)
    wanted = options.steps if options.duration is None else None
    answer("".join(f"{line}\n" for line in as_lines(results, num_steps=wanted)))
    if any(each.path for each in results):
        _record(run_dir, directory, results, options.what)
    return results


# -- ranks and directories


def _group(run_dir: str) -> RunProcesses:
    group = read_group(run_dir)
    if group is None or not group.ranks:
        raise RunError("no ranks are running")
    return group


def _channel_dir(group: RunProcesses) -> str:
    return group.channel_dir or directory_of(group.run_id)


def _ranks(stack: contextlib.ExitStack, group: RunProcesses, which: str) -> list[Rank]:
    """The ranks that may be traced, their processes held and their segments mapped until the stack is closed."""
    ranks: list[Rank] = []
    for number in sorted(group.ranks) if which in ("all", "slowest") else [int(which)]:
        process = stack.enter_context(take_rank(group, number))
        try:
            segment = stack.enter_context(SegmentReader(os.path.join(_channel_dir(group), f"rank-{number}.bin")))
        except (OSError, ValueError):
            raise RunError("the profiler is off in this run (--no-profile?), and traces need it") from None
        if segment.read().pid != process.pid:
            raise RunError(
                f"rank {number} has not loaded torch yet, or is a wrapper that has started another program; try again"
            )
        ranks.append(Rank(number=number, process=process, segment=segment))
    return ranks


def _directory(out: str | None, run_dir: str, ranks: Sequence[Rank]) -> str:
    """Make the directory that the traces go to."""
    path = os.path.abspath(out or os.path.join(run_dir, "traces", time.strftime("%Y%m%d-%H%M%S")))
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as err:
        raise RunError(f"cannot create {path}: {err.strerror}") from None
    for rank in ranks:
        if os.path.lexists(os.path.join(path, file_name(rank.number))):
            raise RunError(f"{path} already contains a trace of rank {rank.number}")
    return path


@contextlib.contextmanager
def _one_at_a_time(run_dir: str, *, again: bool) -> Generator[Any]:
    """Hold the run's trace lock; yield a function to call when a trace was made. One at a time, and not too often."""
    directory = os.path.join(run_dir, "traces")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(os.path.join(directory, "last"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise RunError(f"cannot write to {directory}: {err.strerror}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError("another trace of this run is being recorded") from None
        last = os.fstat(fd)
        since_s = time.time() - last.st_mtime
        if last.st_size and 0 <= since_s < _BETWEEN_S and not again:  # an empty file: there was none
            raise RunError(
                f"the last trace of this run was {time_of(since_s)} ago, and each slows the job; wait, or use --again"
            )
        yield lambda: os.pwrite(fd, time.strftime("%Y-%m-%d %H:%M:%S\n").encode(), 0)
    finally:
        os.close(fd)


def _record(run_dir: str, directory: str, results: Sequence[TraceResult], what: Sequence[str]) -> None:
    """Record the trace: next to its files, and in the run's event log. A full disk costs only the record."""
    content = {"version": 1, "time_s": time.time(), "what": list(what), "ranks": [asdict(each) for each in results]}
    with contextlib.suppress(OSError):
        write_json(os.path.join(directory, "trace.json"), content)
    note(run_dir, "trace", what=content["what"], ranks=content["ranks"])


# -- the arguments


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("trace")
    parser.add_argument("run", nargs="*")
    parser.add_argument("--steps", type=count, default=None)
    parser.add_argument("--duration", type=_duration_s, default=None)
    parser.add_argument("--rank", type=_which, default="all")
    parser.add_argument("--what", type=_what, default=("cpu", "cuda"))
    parser.add_argument("--job-dir")
    parser.add_argument("--out")
    parser.add_argument("--again", action="store_true")
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = words()
    given = parser.read(argv)
    runs = [*given.run, *([] if given.job_dir is None else [given.job_dir])]
    parser.one_run(runs)
    given.run = runs[0] if runs else None
    if given.steps is not None and given.duration is not None:
        raise UsageError("trace: --steps or --duration, not both")
    if given.steps is None:
        given.steps = _STEPS
    return given


def _duration_s(text: str) -> float:
    value_s = time_s(text)
    if not 0.001 <= value_s <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"expected 1ms to {LONGEST_S:.0f}s, got {text!r}")
    return value_s


def _which(text: str) -> str:
    if text not in ("all", "slowest") and not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a rank from 0, `slowest` or `all`, got {text!r}")
    return text


def _what(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    for word in words:
        if word not in WHAT:
            raise argparse.ArgumentTypeError(f"unknown kind {word or repr(text)}{did_you_mean(word, WHAT)}")
    return words
