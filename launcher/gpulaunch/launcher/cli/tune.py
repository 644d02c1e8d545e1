"""`gpulaunch tune`: tries changes of a job in short trials, and shows what each gains."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, time_s, wants_help
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.files import shown, write_json
from gpulaunch.launcher.runs.find import RUNS, here

if TYPE_CHECKING:
    from gpulaunch.launcher.job.spec import JobSpec
    from gpulaunch.launcher.tune.change import Change
    from gpulaunch.launcher.tune.search import Measured
    from gpulaunch.launcher.tune.session import Tuned

_HELP = """\
usage: gpulaunch tune [--budget TIME] [--allow-numerics] [--in-place] [options] PROGRAM [arguments of the program]
       gpulaunch tune [--budget TIME] [--allow-numerics] [--in-place] RUN

Runs the job in short trials, each with one change that its findings suggest, without touching the program: arguments
of its DataLoader and of DistributedDataParallel, threads of torch, garbage collection. Each change is measured over
the same steps as the job as it is, several times if it gains, and those that gain are tried together. The result is a
table, a patch for the lines that are known, and tune.json in the run directory of the first trial. RUN is a finished
run: its command is tried.

  --budget TIME         for all trials together (default: 60s; steps of more than 100 ms, or a slow start, need more)
  --allow-numerics      also try what changes results a little: TF32 for matrix products
  --in-place            run trials in the current directory itself, not in a view of it that is thrown away

`options` are those of gpulaunch: --nproc and so on. Trials start from the beginning, save checkpoints to a directory of
their own, and what they write below the current directory is thrown away where the kernel allows that. What they write
elsewhere stays: files outside, records of experiment trackers. One node only.

Exit code 0 whether anything gains or not, 1 if the job cannot be tried, 2 for a usage error.
"""
_BUDGET_S = 60.0
_SHUTDOWN_S = 1


class _Ended(Exception):  # noqa: N818 (a request, not an error)
    """A signal asks to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("tune")
    parser.add_argument("--budget", type=time_s, default=_BUDGET_S)
    parser.add_argument("--allow-numerics", action="store_true")
    parser.add_argument("--in-place", action="store_true")
    return parser


def run(argv: Sequence[str]) -> int:
    """Make the trials, show what they gave, and return the exit code."""
    own, job_argv = _split(argv)
    if wants_help(own) or wants_help(job_argv[:1]):
        answer(_HELP)
        return 0
    given = words().read(own)
    if not job_argv:
        raise UsageError("tune: no program is given: gpulaunch tune --nproc 2 train.py")
    run_dir, job_argv = _of_run(job_argv)
    options, program, spec = _job(job_argv)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _end)
    from gpulaunch.launcher.tune import scratch

    try:
        parent = scratch.upper_parent(here())
    except OSError as error:
        raise UsageError(f"tune: no directory for trials: {error.strerror}; set TMPDIR") from None
    try:
        return _tune(given, options, program, spec, parent, run_dir)
    finally:
        try:
            scratch.discard(parent)
        except OSError as error:
            print(f"gpulaunch: {parent} remains: {error.strerror}", file=sys.stderr, flush=True)


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    raise _Ended(signum)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tune's own words, which come first, and the job's."""
    own: list[str] = []
    rest = list(argv)
    while rest and rest[0].partition("=")[0] in ("--budget", "--allow-numerics", "--in-place", "-h", "--help"):
        own.append(rest.pop(0))
        if own[-1] == "--budget" and rest:
            own.append(rest.pop(0))
    return own, rest


def _of_run(job_argv: list[str]) -> tuple[str, list[str]]:
    """The directory and the command of a run, where one is named instead of a program; else ""."""
    if len(job_argv) != 1 or job_argv[0].startswith("-") or os.path.isfile(job_argv[0]):
        return "", job_argv
    from gpulaunch.launcher.runs.find import find_run
    from gpulaunch.launcher.runs.processes import RunError

    try:
        run_dir = find_run(job_argv[0], here())
        with open(os.path.join(run_dir, "job.json"), "rb") as file:
            return run_dir, [str(word) for word in json.load(file)["command"][1:]]
    except (RunError, OSError, ValueError, KeyError, TypeError):
        return "", job_argv  # a command, or a program that does not exist: the parser says so


def _job(job_argv: list[str]) -> tuple[list[str], list[str], JobSpec]:
    """Its options, its program with arguments, and what they mean. Raises UsageError."""
    from gpulaunch.launcher.job.host_info import detect
    from gpulaunch.launcher.job.load import resolve
    from gpulaunch.launcher.job.parse import parse

    given = parse(job_argv)
    program: list[str] = []
    if "training_script" in given:
        program = [given["training_script"], *given.get("training_script_args", [])]
    options = job_argv[: len(job_argv) - len(program)]
    spec = resolve(given, os.environ, detect(os.environ)).spec
    if spec.nnodes > 1:
        raise UsageError("tune: a job on several nodes cannot be tuned; try its program on one")
    if spec.program.kind == "exec":
        raise UsageError("tune: --no-python: changes are applied in Python programs only")
    if not spec.profile:
        raise UsageError("tune: --no-profile: without the profiler steps cannot be measured")
    return options, program, spec


def _tune(
    given: argparse.Namespace, options: list[str], program: list[str], spec: JobSpec, parent: str, run_dir: str
) -> int:
    from gpulaunch.launcher.job.host_info import detect
    from gpulaunch.launcher.tune import result, scratch
    from gpulaunch.launcher.tune.session import Job, NotTunableError, Session
    from gpulaunch.launcher.tune.trial import last_output

    directory = here()
    why_not = "--in-place" if given.in_place else scratch.why_not(directory, parent)
    if why_not:
        answer(f"trials run in {directory} itself ({why_not}): what they write stays\n")
    else:
        answer(f"trials run in a view of {directory} that is thrown away; what they write elsewhere stays\n")

    def argv_in(run_dir: str) -> Sequence[str]:
        argv = [sys.executable, "-m", "gpulaunch.launcher.cli.main", *options, *_options_of_trial(run_dir), *program]
        return argv if why_not else scratch.run_in_scratch_argv(argv, directory, parent)

    job = Job(
        argv_in=argv_in,
        env=dict(os.environ),
        directory=os.path.join(parent, "runs"),
        ranks=spec.nproc,
        cores=detect(os.environ).cores,
        allow_numerics=given.allow_numerics,
    )

    def told(tuned: Tuned, change: Change, measured: Measured) -> None:
        answer(result.as_line(tuned, change, measured) + "\n")

    session = Session(job, given.budget, told)
    code = 0
    try:
        session.run()
    except NotTunableError as error:
        answer(last_output(job.directory))
        print(f"gpulaunch: error: tune: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except _Ended as ended:
        code = 128 + ended.signum
    if session.tuned is not None:
        _conclude(session.tuned, [*options, *program], run_dir, spec.name)
    return code


def _options_of_trial(run_dir: str) -> list[str]:
    """Options that take precedence over the user's: a trial is seen in full, and shows itself to nobody."""
    return [
        *("--job-dir", run_dir, "--checkpoint-dir", os.path.join(run_dir, "checkpoints"), "--resume", "never"),
        *("--max-restarts", "0", "--on-hang", "report", "--shutdown-timeout", str(_SHUTDOWN_S)),
        *("--profile-budget", "0", "--metrics-addr", "127.0.0.1:0"),
        *("--metrics-sd", "", "--metrics-push", "", "--metrics-otlp", ""),
    ]


def _conclude(tuned: Tuned, command: Sequence[str], run_dir: str, name: str) -> None:
    """Show the table and the patch, and keep all of it as JSON: in the run that was named, or the first trial's."""
    from gpulaunch.launcher.tune import result

    best = tuned.search.best()
    patch, hints = ("", []) if best is None else result.patch_of(best.change)
    kept = run_dir or os.path.join(here(), RUNS, f"{name}-tune-{time.strftime('%Y%m%d-%H%M%S')}")
    lines = ["", *result.as_table(tuned), *([""] if patch or hints else []), *hints, patch.rstrip("\n")]
    try:
        if not run_dir:
            shutil.copytree(tuned.base_dir, kept, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
        write_json(os.path.join(kept, result.TUNE_FILE), result.as_json(tuned, command=command, patch=patch))
    except (OSError, shutil.Error) as error:
        lines.append(f"cannot keep the results in {shown(kept)}: {error}")
    else:
        lines.append(f"{tuned.trials} trials in {tuned.spent_s:.0f} s; all of it in {shown(kept)}/{result.TUNE_FILE}")
    answer("\n".join(lines) + "\n")
