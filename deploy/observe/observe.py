"""Start a training run and a Prometheus that watches it, say where to look, and leave nothing behind.

    make observe                                     # or: python deploy/observe/observe.py

The run is examples/digits_ddp.py, for as many epochs as last some minutes; Prometheus (Debian's package, or a binary on
PATH) has the rules of deploy/prometheus. Where grafana-server is on PATH it is started too, with the dashboards of
deploy/grafana. All of them serve this machine only, on free ports. Ctrl-C ends them, and everything they wrote goes.

Exit code 0 when it was ended, 1 when something did not start or broke, 2 where something is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import boards
import server
from programs import Asked, Bell, Failed, Program, Programs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/digits_ddp.py"
EPOCHS = 3000
STARTS_S = 180.0
"""What is waited for at most. A run takes seconds to start, Prometheus less, and five until it hears of the run."""

NO_PROMETHEUS = (
    "no prometheus on PATH, which collects the figures of runs and judges them by rules: apt install prometheus, or "
    "put the binary of a release (prometheus.io) on PATH. A run can be looked at without it: gpulaunch top, or the "
    "page at the address that it prints"
)
NO_GRAFANA = "no grafana-server on PATH; with Docker: deploy/docker/compose.yaml (docs/grafana.md)"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    nproc: int
    epochs: int
    stays_s: float | None
    """How long after everything is there; None: until Ctrl-C."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The programs of this machine."""

    gpulaunch: str
    prometheus: str
    grafana: str | None


def main() -> int:
    """Do it, and give the exit code."""
    options = _options()
    try:
        found = _find()
    except Failed as missing:
        return _complain(missing, 2)
    try:
        with (
            Bell() as bell,
            tempfile.TemporaryDirectory(prefix="gpulaunch-observe-") as directory,
            Programs(bell, Path(directory)) as programs,
        ):
            with contextlib.suppress(Asked):
                _observe(options, found, Path(directory), programs)
            with contextlib.suppress(Asked):
                _say("ending what was started")
    except Failed as fault:
        return _complain(fault, 1)
    except OSError as err:
        return _complain(Failed(f"{err.strerror}: {err.filename or 'in the temporary directory'}"), 1)
    return 0


def _observe(options: Options, found: Found, directory: Path, programs: Programs) -> None:
    """Start everything, say where it is, and stay. Raises Asked, Failed."""
    targets = server.configure(directory)
    run_dir = directory / "run"
    prometheus = programs.start("prometheus", server.command(found.prometheus))
    command = _command(options, found, targets=targets, run_dir=run_dir)
    run = programs.start("run", command, env=_environment(), goodbye=signal.SIGINT)
    ranks = "1 rank" if options.nproc == 1 else f"{options.nproc} ranks"
    _say(f"starting {EXAMPLE.name} on {ranks}, and a Prometheus to watch it; what they write is in {directory}")
    at = programs.until(lambda: server.address(prometheus.said), "it was ready", needs=[prometheus], longest_s=STARTS_S)
    grafana, grafana_at = _grafana(found, directory, programs, at)
    page = programs.until(
        lambda: server.stepping(at), "Prometheus had seen a step", needs=[run, prometheus], longest_s=STARTS_S
    )
    rules = programs.until(lambda: server.rules(at), "each rule was computed", needs=[prometheus], longest_s=STARTS_S)
    gpulaunch, shown_dir = _as_typed(found.gpulaunch), shlex.quote(str(run_dir))
    _say(
        "",
        f"the run in a terminal   {gpulaunch} top {shown_dir}",
        f"the run as a page       http://{page}/",
        f"Prometheus              http://{at}/ ({server.version(at)})",
        f"  alerts                {server.alerts(at)} ({rules.alerts} alerts, {rules.recorded} recorded series)",
        f"  where the time goes   {server.graph(at)}",
        f"Grafana                 {f'http://{grafana_at}{boards.HOME}' if grafana_at else NO_GRAFANA}",
        f"to kill a rank          {gpulaunch} chaos kill-rank {options.nproc - 1} --job-dir {shown_dir}",
        "",
        f"Prometheus asks the run every {server.SCRAPE_S} s; alerts take a minute, rates are whole after "
        "five. Ctrl-C ends everything.",
    )
    _stay(options, programs, prometheus, run, grafana)


def _grafana(found: Found, directory: Path, programs: Programs, at: str) -> tuple[Program | None, str | None]:
    """Start it, where it is; what goes wrong with it ends nothing. Raises Asked."""
    if found.grafana is None:
        return None, None
    env = boards.configure(directory, at)
    try:
        program = programs.start("grafana", boards.command(found.grafana), env=env)
        where = programs.until(lambda: boards.address(env), "it answered", needs=[program], longest_s=STARTS_S)
    except Failed as fault:
        _say(f"without Grafana: {fault}")
        return None, None
    return program, where


def _stay(options: Options, programs: Programs, prometheus: Program, run: Program, grafana: Program | None) -> None:
    """Until somebody asks for the end, or the time is over. Raises Asked, Failed."""
    end_s = math.inf if options.stays_s is None else time.monotonic() + options.stays_s
    running = [prometheus, run, *([grafana] if grafana else [])]
    while (left_s := end_s - time.monotonic()) > 0:
        for each in [each for each in running if each.code is not None]:
            running.remove(each)
            if each is prometheus:
                raise Failed(f"Prometheus has ended with {each.code}. It said last:{each.last_words()}")
            if each is run:
                _say(
                    f"the run has ended with {each.code}, and its page with it. gpulaunch top still shows it, and "
                    "Prometheus has its figures: look as long as you like, Ctrl-C ends the rest."
                )
            else:
                _say(f"Grafana has ended with {each.code}, the rest goes on. It said last:{each.last_words()}")
        programs.rest(None if left_s == math.inf else left_s)


# --- what is there, and how it is called


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=_count, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--epochs", type=_count, default=EPOCHS, metavar="N", help=f"how long the run is (default: {EPOCHS})"
    )
    parser.add_argument(
        "--for", type=_seconds, dest="stays_s", metavar="SECONDS", help="end so long after everything is there"
    )
    return Options(**vars(parser.parse_args()))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _find() -> Found:
    """Look for the programs. Raises Failed."""
    beside = Path(sysconfig.get_path("scripts"), "gpulaunch")
    gpulaunch = str(beside) if beside.exists() else shutil.which("gpulaunch")
    if gpulaunch is None:
        raise Failed(f"gpulaunch is not installed for {sys.executable}; make observe installs it in .venv")
    if (prometheus := shutil.which("prometheus")) is None:
        raise Failed(NO_PROMETHEUS)
    return Found(gpulaunch=gpulaunch, prometheus=prometheus, grafana=shutil.which("grafana-server"))


def _command(options: Options, found: Found, *, targets: Path, run_dir: Path) -> list[str]:
    return [
        *(found.gpulaunch, "--nproc", str(options.nproc), "--job-dir", str(run_dir)),
        *("--metrics-addr", "127.0.0.1", "--metrics-sd", str(targets), "--rdzv-id", "demo"),
        *("--max-restarts", "100", "--no-progress-limit", "3", "--shutdown-timeout", "10"),
        *(str(EXAMPLE), "--epochs", str(options.epochs)),
    ]


def _environment() -> dict[str, str]:
    """Options of gpulaunch in the environment are for other runs; where shared memory is holds for this one too."""
    ours = ("GPULAUNCH_", "PET_")
    return {
        name: value for name, value in os.environ.items() if not name.startswith(ours) or name == "GPULAUNCH_SHM_DIR"
    }


def _as_typed(command: str) -> str:
    """A command as somebody would type it here."""
    on_path = shutil.which("gpulaunch")
    if on_path is not None and os.path.samefile(on_path, command):
        return "gpulaunch"
    below = os.path.relpath(command)
    return shlex.quote(command if below.startswith(os.pardir) else below)


def _say(*lines: str) -> None:
    """Tell whoever started it. Raises Asked where nobody reads any more."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes there
        raise Asked from None


def _complain(fault: Failed, code: int) -> int:
    sys.stderr.write(f"observe: {fault}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
