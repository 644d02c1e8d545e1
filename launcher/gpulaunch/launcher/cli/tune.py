"""`gpulaunch tune`: tries changes of a job in short trials, and shows what each gains."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, time_s, wants_help
from gpulaunch.launcher.job.job_json import CHANGES
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.loop.files import shown, write_json
from gpulaunch.launcher.runs.find import RUNS, here
from gpulaunch.profiler.redact import HIDDEN, redact_words

if TYPE_CHECKING:
    from gpulaunch.launcher.job.spec import JobSpec
    from gpulaunch.launcher.tune.change import Change
    from gpulaunch.launcher.tune.search import Measured
    from gpulaunch.launcher.tune.session import Tuned
    from gpulaunch.launcher.tune.trial_server import TrialServer

_HELP = """\
usage: gpulaunch tune [--budget TIME] [--allow-numerics] [--in-place] [--apply] [options] PROGRAM [arguments]
       gpulaunch tune [--budget TIME] [--allow-numerics] [--in-place] [--apply] RUN

Runs the job in short trials, each with one change that its findings suggest, without touching the program: arguments
of its DataLoader and of DistributedDataParallel, threads of torch, garbage collection. Each change is measured over
the same steps as the job as it is, several times if it gains, and those that gain are tried together. The result is a
table, a patch for the lines that are known, and tune.json in the run directory of the first trial. RUN is a finished
run: its command is tried.

  --budget TIME         for all trials together (default: 60s; steps of more than 100 ms, or a slow start, need more)
  --allow-numerics      also try what changes results a little: TF32 for matrix products
  --apply               then start the job with the best change in effect, still without touching the program
  --in-place            run trials in the current directory itself, not in a view of it that is thrown away

`options` are those of gpulaunch: --nproc and so on. Trials start from the beginning, save checkpoints to a directory of
their own, and what they write below the current directory is thrown away where the kernel allows that. What they write
elsewhere stays: files outside, records of experiment trackers. One node only.

Exit code 0 whether anything gains or not, 1 if the job cannot be tried, 2 for a usage error.
"""
_OWN = ("--budget", "--allow-numerics", "--in-place", "--apply")
_BUDGET_S = 60.0
_LEAST_BUDGET_S = 15.0
_AGAIN_S = 2.0
"""A signal that comes sooner after another one is the same request."""
_MOST_LINKS = 5
_SHUTDOWN_S = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupt:
    """Notes a signal that asks to end; a second one ends this process, and the kernel its trial."""

    def __init__(self) -> None:
        self.signum = 0
        self._at_s = 0.0
        for signum in _ENDING:
            signal.signal(signum, self._note)

    def __call__(self) -> bool:
        """Whether there was one."""
        return self.signum != 0

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if not self.signum:
            self.signum, self._at_s = signum, time.monotonic()
        elif time.monotonic() - self._at_s > _AGAIN_S:
            self.dismiss()
            os.kill(os.getpid(), signum)

    @staticmethod
    def dismiss() -> None:
        """From now on signals have their usual effect."""
        for signum in _ENDING:
            signal.signal(signum, signal.SIG_DFL)


def words() -> VerbParser:
    """The argument parser, also used for shell completion."""
    parser = VerbParser("tune")
    parser.add_argument("--budget", type=time_s, default=_BUDGET_S)
    parser.add_argument("--allow-numerics", action="store_true")
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--apply", action="store_true")
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
    if given.budget < _LEAST_BUDGET_S:
        raise UsageError(f"tune: --budget: at least {_LEAST_BUDGET_S:g} s: the first trial alone takes that long")
    run_dir, job_argv = _of_run(job_argv)
    options, program, spec, cores = _job(job_argv)
    interrupt = _Interrupt()
    from gpulaunch.launcher.tune import scratch

    try:
        parent = scratch.upper_parent(here())
    except OSError as error:
        raise UsageError(f"tune: no directory for trials: {error.strerror}; set TMPDIR") from None
    try:
        code, best = _tune(given, options, program, spec, cores, parent, run_dir, interrupt)
    finally:
        try:
            scratch.discard(parent)
        except OSError as error:
            print(f"gpulaunch: {parent} remains: {error.strerror}", file=sys.stderr, flush=True)
    interrupt.dismiss()
    if code or not given.apply:
        return code
    if best is not None:
        os.environ[CHANGES] = best.as_env()
    from gpulaunch.launcher.cli.main import main

    sys.argv[1:] = [*options, *program]  # the command that the run records
    return main(sys.argv[1:])


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tune's own words, which come first, and the job's."""
    own: list[str] = []
    rest = list(argv)
    while rest and rest[0].partition("=")[0] in (*_OWN, "-h", "--help"):
        own.append(rest.pop(0))
        if own[-1] == "--budget" and rest:
            own.append(rest.pop(0))
    return own, rest


def _of_run(job_argv: list[str]) -> tuple[str, list[str]]:
    """The directory and the command of a run, where one is named instead of a program; else ""."""
    if len(job_argv) != 1 or job_argv[0].startswith("-") or os.path.isfile(job_argv[0]):
        return "", job_argv
    if os.path.isdir(job_argv[0]) and not os.path.exists(os.path.join(job_argv[0], "job.json")):
        raise UsageError(f"tune: {job_argv[0]} is a directory, and not that of a run")
    from gpulaunch.launcher.runs.find import find_run
    from gpulaunch.launcher.runs.processes import RunError

    try:
        run_dir = find_run(job_argv[0], here())
        with open(os.path.join(run_dir, "job.json"), "rb") as file:
            command = [str(word) for word in json.load(file)["command"][1:]]
    except (RunError, OSError, ValueError, KeyError, TypeError):
        return "", job_argv  # a command, or a program that does not exist: the parser says so
    if any(HIDDEN in word for word in command):
        raise UsageError(f"tune: the command of {job_argv[0]} has a secret, which is not stored: give the command")
    return run_dir, command


def _job(job_argv: list[str]) -> tuple[list[str], list[str], JobSpec, int]:
    """Its options, its program with arguments, what they mean, and the cores of this machine. Raises UsageError."""
    from gpulaunch.launcher.job.host_info import detect
    from gpulaunch.launcher.job.load import resolve
    from gpulaunch.launcher.job.parse import parse

    try:
        given = parse(job_argv)
    except UsageError as error:
        if any(f"unknown option {own}" in str(error) for own in _OWN):
            raise UsageError(
                "tune: its own options come first: gpulaunch tune --budget 5m --nproc 2 train.py"
            ) from None
        raise
    program: list[str] = []
    if "training_script" in given:
        program = [given["training_script"], *given.get("training_script_args", [])]
    options = job_argv[: len(job_argv) - len(program)]
    if options[-1:] == ["--"]:
        options.pop()
    host = detect(os.environ)
    spec = resolve(given, os.environ, host).spec
    if spec.nnodes > 1:
        raise UsageError("tune: a job on several nodes cannot be tuned; try its program on one")
    if spec.program.kind == "exec":
        raise UsageError("tune: --no-python: changes are applied in Python programs only")
    if not spec.profile:
        raise UsageError("tune: --no-profile: without the profiler steps cannot be measured")
    return options, program, spec, host.cores


def _tune(
    given: argparse.Namespace,
    options: list[str],
    program: list[str],
    spec: JobSpec,
    cores: int,
    parent: str,
    run_dir: str,
    interrupt: _Interrupt,
) -> tuple[int, Change | None]:
    """Make the trials; return the exit code and the best change."""
    from gpulaunch.launcher.loop import child
    from gpulaunch.launcher.tune import result, scratch
    from gpulaunch.launcher.tune.session import InterruptedTuningError, Job, NotTunableError, Session
    from gpulaunch.launcher.tune.trial import last_output

    directory = here()
    why_not = "--in-place" if given.in_place else scratch.why_not(directory, parent)
    if why_not:
        answer(f"trials run in {directory} itself ({why_not}): what they write stays\n")
    else:
        answer(f"trials run in a view of {directory} that is thrown away; what they write elsewhere stays\n")
        if links := _links_outside(directory):
            answer(f"  elsewhere is also behind: {', '.join(links)}\n")

    server = trial_server_of(spec)

    def start(run_dir: str, env: Mapping[str, str], fds: tuple[int, int, int]) -> int:
        argv = [sys.executable, "-m", "gpulaunch.launcher.cli.main", *options, *_options_of_trial(run_dir), *program]
        view = "" if why_not else view_of(run_dir)
        if view:
            os.mkdir(view, 0o700)
        if server is not None and (pid := server.start(argv, env, directory=directory, view=view, fds=fds)):
            return pid
        if view:
            argv = scratch.run_in_scratch_argv(argv, directory, view)
        return child.start(argv, env, stdin_fd=fds[0], stdout_fd=fds[1], stderr_fd=fds[2])

    def view_of(run_dir: str) -> str:
        return os.path.join(parent, f"view-of-{os.path.basename(run_dir)}")

    job = Job(
        start=start,
        env=dict(os.environ),
        directory=os.path.join(parent, "runs"),
        ranks=spec.nproc,
        cores=cores,
        discard_view=lambda run_dir: scratch.discard(view_of(run_dir)),
        allow_numerics=given.allow_numerics,
    )

    def told(tuned: Tuned, change: Change, measured: Measured) -> None:
        answer(result.as_line(tuned, change, measured) + "\n")

    session = Session(job, given.budget, told, interrupt)
    code = 0
    try:
        if server is not None:
            server.wait(given.budget, interrupt)
        session.run()
    except NotTunableError as error:
        answer(last_output(job.directory))
        print(f"gpulaunch: error: tune: {error}", file=sys.stderr, flush=True)
        return 1, None
    except InterruptedTuningError:
        code = 128 + interrupt.signum
    finally:
        if server is not None:
            server.close()
    if session.tuned is None:
        answer("interrupted before anything was learnt; nothing is kept\n")
        return code, None
    _conclude(session.tuned, [*options, *program], run_dir, spec.name)
    best = session.tuned.search.best()
    return code, None if best is None else best.change


def trial_server_of(spec: JobSpec) -> TrialServer | None:
    """A server that imports what the ranks of this job need; None if they are not forked, or if there is none."""
    from gpulaunch.launcher.agent.packages import reading_of
    from gpulaunch.launcher.agent.starter import imports_of
    from gpulaunch.launcher.cli.run import base_env_of, has_torch_of, spawn_because_of
    from gpulaunch.launcher.loop.linux import NO_RUN
    from gpulaunch.launcher.tune.trial_server import TrialServer

    reading, has_torch = reading_of(spec), has_torch_of(spec)
    if spawn_because_of(spec, reading, has_torch=has_torch):
        return None
    env = base_env_of(spec, NO_RUN)
    with contextlib.suppress(OSError):
        return TrialServer(imports_of(spec, env, reading, {}, forking=True, agent_store=has_torch), env)
    return None


def _links_outside(directory: str) -> list[str]:
    """Symbolic links in a directory that lead out of it, to something that this user may write; some of them."""
    found: list[str] = []
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            target = os.path.realpath(entry.path) if entry.is_symlink() else ""
            if target and os.path.commonpath([target, directory]) != directory and os.access(target, os.W_OK):
                found.append(f"{entry.name} -> {target}")
    return sorted(found)[:_MOST_LINKS]


def _options_of_trial(run_dir: str) -> list[str]:
    """Options that take precedence over the user's: a trial is seen in full, and shows itself to nobody."""
    return [
        *("--job-dir", run_dir, "--checkpoint-dir", os.path.join(run_dir, "checkpoints"), "--resume", "never"),
        *("--max-restarts", "0", "--on-hang", "report", "--leftovers", "end", "--shutdown-timeout", str(_SHUTDOWN_S)),
        *("--profile-budget", "0", "--metrics-addr", "127.0.0.1:0"),
        *("--metrics-sd", "", "--metrics-push", "", "--metrics-otlp", ""),
    ]


def _keep_command(job_json: str, command: Sequence[str]) -> None:
    """Have the first trial's run record the user's command, not the trial's."""
    with open(job_json, "rb") as file:
        document = json.load(file)
    write_json(job_json, {**document, "command": ["gpulaunch", *redact_words(command)]})


def _conclude(tuned: Tuned, command: Sequence[str], run_dir: str, name: str) -> None:
    """Show the table and the patch, and keep all of it as JSON: in the run that was named, or the first trial's."""
    from gpulaunch.exporters.files.tuned import TUNE_FILE
    from gpulaunch.launcher.tune import result

    best = tuned.search.best()
    patch, hints = ("", []) if best is None else result.patch_of(best.change)
    kept = run_dir or os.path.join(here(), RUNS, f"{name}-tune-{time.strftime('%Y%m%d-%H%M%S')}")
    lines = ["", *result.as_table(tuned), *([""] if patch or hints else []), *hints, patch.rstrip("\n")]
    try:
        if not run_dir:
            shutil.copytree(tuned.base_dir, kept, symlinks=True, ignore=shutil.ignore_patterns("checkpoints"))
            _keep_command(os.path.join(kept, "job.json"), command)
        write_json(os.path.join(kept, TUNE_FILE), result.as_json(tuned, command=redact_words(command), patch=patch))
    except (OSError, shutil.Error) as error:
        lines.append(f"cannot keep the results in {shown(kept)}: {error}")
    else:
        lines.append(f"{tuned.trials} trials in {tuned.spent_s:.0f} s; all of it in {shown(kept)}/{TUNE_FILE}")
    answer("\n".join(lines) + "\n")
