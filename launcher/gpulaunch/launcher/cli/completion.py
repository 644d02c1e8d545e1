"""--print-completion: what a shell needs to complete the command line, written by shtab as for torchrun."""

from __future__ import annotations

import argparse
from importlib import import_module

from gpulaunch.launcher.job.option_table import OPTIONS
from gpulaunch.launcher.job.options import UsageError, did_you_mean
from gpulaunch.launcher.job.verbs import VERBS

SHELLS = ("bash", "zsh", "tcsh")


def completion(shell: str) -> str:
    """The script for one shell. Raises UsageError if shtab is not installed."""
    if shell not in SHELLS:
        raise UsageError(
            f"--print-completion: {shell!r} is not one of {', '.join(SHELLS)}{did_you_mean(shell, SHELLS)}"
        )
    try:
        import shtab
    except ImportError:
        raise UsageError("--print-completion needs the package shtab: pip install 'gpulaunch[completion]'") from None
    script: str = shtab.complete(_parser(shtab), shell=shell)
    return script.rstrip("\n") + "\n"


def _parser(shtab: object) -> argparse.ArgumentParser:
    """All options and verbs as one plain parser: used only for its list of them, not to parse."""
    parser = argparse.ArgumentParser(prog="gpulaunch", add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show the help")
    parser.add_argument("--version", action="store_true", help="versions of gpulaunch, Python and torch")
    parser.add_argument("--print-completion", choices=SHELLS, help="print a completion script for a shell")
    for option in OPTIONS:
        spelt = ([f"-{option.short}"] if option.short else []) + [f"--{name}" for name in (option.name, *option.also)]
        text = option.help.replace("%", "%%")
        if option.is_flag:
            parser.add_argument(*spelt, action="store_true", help=text)
        else:
            _complete(parser.add_argument(*spelt, metavar=option.metavar, help=text), option.metavar, shtab)
    verbs = parser.add_subparsers(metavar="PROGRAM")
    for verb in sorted(VERBS):
        module = import_module(f"gpulaunch.launcher.cli.{verb}")
        if verb == "chaos":
            words = module.words(ranks=False)
            words.add_argument("fault", choices=module.FAULTS)
        else:
            words = module.words()
        for action in words._actions:
            _complete(action, "DIR" if action.dest in ("run", "runs", "job_dir") else "FILE", shtab)
        title = (module.__doc__ or "").partition(": ")[2].partition("\n")[0].rstrip(".").replace("%", "%%")
        verbs.add_parser(verb, parents=[words], add_help=False, help=title or verb)
    return parser


def _complete(action: argparse.Action, metavar: str, shtab: object) -> None:
    """Let the shell complete names of files or directories, where an option takes them."""
    kind = {"DIR": "DIRECTORY", "DIRS": "DIRECTORY", "FILE": "FILE"}.get(metavar)
    if kind is not None and action.nargs != 0 and not action.choices:
        action.complete = getattr(shtab, kind)  # type: ignore[attr-defined]
