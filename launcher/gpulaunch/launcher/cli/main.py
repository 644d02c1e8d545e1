"""The console entry: selects the verb and reports errors. Everything else is imported when needed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.job.options import UsageError
from gpulaunch.launcher.job.verbs import VERBS

INTERNAL_ERROR = 70
"""EX_SOFTWARE of sysexits.h."""


_MODULES = {verb: f"gpulaunch.launcher.cli.{verb}" for verb in VERBS} | {"_sidecar": "gpulaunch.launcher.cli.sidecar"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    _open_closed_stdio()
    # A job manager's notice may arrive before it can be handled: it stays blocked until the agent handles it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1, signal.SIGUSR2))
    try:
        return _dispatch(argv)
    except UsageError as err:
        _complain(f"gpulaunch: error: {err}")
        return err.exit_code
    except KeyboardInterrupt:  # before the agent has taken over its signals
        return 130
    except Exception as err:
        if os.environ.get("GPULAUNCH_DEBUG") == "1":
            raise
        what = " ".join(f"{type(err).__name__}: {err}".split())
        _complain(f"gpulaunch: internal error: {what}; please report; for details set GPULAUNCH_DEBUG=1")
        return INTERNAL_ERROR
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open_closed_stdio() -> None:
    """Open /dev/null where the caller closed stdin, stdout or stderr: else the next opened file gets its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number


def _complain(line: str) -> None:
    from gpulaunch.launcher.failure.redact import inert

    print(inert(line).replace("\n", " "), file=sys.stderr, flush=True)


def _dispatch(argv: Sequence[str]) -> int:
    # A verb is the first word and takes precedence over a file of that name, which runs as ./doctor.
    if argv and argv[0] in _MODULES:
        from importlib import import_module

        code: int = import_module(_MODULES[argv[0]]).run(argv[1:])
        return code

    from gpulaunch.launcher.job.parse import parse

    try:
        given = parse(argv)  # before detecting the machine: --help and typing mistakes need not wait for NVML
    except SystemExit:  # argparse has answered --help or --version, into the buffer
        answer("")
        return 0
    if "print_completion" in given:
        from gpulaunch.launcher.cli.completion import completion

        answer(completion(given["print_completion"]))
        return 0
    from gpulaunch.launcher.job.host_info import detect
    from gpulaunch.launcher.job.load import resolve

    host = detect(os.environ)
    request = resolve(given, os.environ, host)
    from gpulaunch.launcher.cli.run import checked, run

    if request.dry_run:
        from gpulaunch.launcher.agent.packages import reading_of, recall
        from gpulaunch.launcher.job.describe import describe

        checked(request.spec)
        reading = reading_of(request.spec)
        answer(describe(request.spec, host, reading=reading, refused=recall(request.spec, reading.packages)))
        return 0
    return run(request, host)


if __name__ == "__main__":
    sys.exit(main())
