"""Parses the command line with argparse as torchrun does, and makes the help text.

argparse does the reading, so that abbreviations, `-r3`, `--redirects=3`, negative numbers and "everything after the
program belongs to the program" are torchrun's own on every Python version. What differs: an error is one line with a
suggestion instead of a usage dump, and an abbreviation that is torchrun's keeps torchrun's meaning where our options
would make it ambiguous (`--no-p` is --no-python).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from gpulaunch.launcher.job.option_table import BY_KEY, OPTIONS, SECTIONS
from gpulaunch.launcher.job.options import Option, UsageError, did_you_mean
from gpulaunch.launcher.job.verbs import VERBS

_TORCHRUN = frozenset(s for option in OPTIONS for s in option.torchrun_strings)
_SPECIAL = ("help", "version", "print-completion")


class Parser(argparse.ArgumentParser):
    """argparse with our errors, our help and torchrun's abbreviations."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        self.ambiguous: dict[str, list[str]] = {}
        """Ambiguous abbreviations, and the options they match: no error among the arguments of a program."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as one line that starts with the option's own name."""
        if message.startswith("argument "):
            names, _, what = message.removeprefix("argument ").partition(": ")
            longest = next((n for n in names.split("/") if n.startswith("--")), names)
            message = f"{longest}: {what}"
        raise UsageError(message)

    def format_help(self) -> str:
        """The help text, from the table."""
        return help_text()

    def _get_option_tuples(self, option_string: str) -> Any:
        # argparse calls this for a word that is no exact option: each candidate is a tuple whose first two items are
        # the action and the full option string (later Python versions append to it).
        found: list[Any] = super()._get_option_tuples(option_string)
        torchruns = [each for each in found if each[1] in _TORCHRUN]
        # torch 2.13 knows what is short for one of its options, and not yet those of 2.14.
        of_2_13 = [each for each in torchruns if each[0].dest != "log_line_prefix_template"]
        for candidates in (of_2_13, torchruns, found):
            if candidates and len({each[0].dest for each in candidates}) == 1:
                return candidates[:1]
        # argparse would fail here before checking whether the word is after the program and belongs to it. As an
        # unknown option it is passed on correctly.
        if found:
            self.ambiguous[option_string] = list({each[0].dest: each[1] for each in reversed(found)}.values())[::-1]
        return []


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(version_text() + "\n")  # parser.exit would write to stderr
        parser.exit()


def build_parser() -> Parser:
    """A parser whose namespace contains only what was given, so that each value's source is known.

    Call `set_defaults` on it to fill in the rest, as with a plain argparse parser.
    """
    parser = Parser(prog="gpulaunch", add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="help")
    parser.add_argument("--version", action=_Version, nargs=0)
    parser.add_argument("--print-completion", "--print_completion", dest="print_completion")
    for option in OPTIONS:
        if option.is_flag:
            parser.add_argument(*option.option_strings, dest=option.dest, action="store_const", const=True)
        else:
            parser.add_argument(*option.option_strings, dest=option.dest, type=_argparse_type(option))
    # argparse considers both required; they are not, because a job file may name the script.
    parser.add_argument("training_script").required = False
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER).required = False
    return parser


def _argparse_type(option: Option) -> Any:
    def convert(value: str) -> object:
        try:
            return option.convert(value)
        except UsageError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    return convert


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """The command line's values, by destination; `training_script` is absent if it names none.

    `print_completion` is returned alone: it is a query, like --help.

    Raises:
        UsageError: the line cannot be read.
        SystemExit: --help or --version was answered.
    """
    parser = build_parser()
    given, unknown = parser.parse_known_args(list(argv))
    if "print_completion" in given:
        return {"print_completion": given.print_completion}
    # argparse takes a word with a space in it for the program if it is no known option.
    for word in (*unknown[:1], getattr(given, "training_script", "")):
        if could_be := parser.ambiguous.get(word):
            name = word.partition("=")[0]
            raise UsageError(f"ambiguous option: {name} could match {', '.join(could_be)}")
    if unknown:
        raise UsageError(f"unknown option {unknown[0].partition('=')[0]}{suggestion(unknown[0])}")
    return vars(given)


def suggestion(word: str) -> str:
    """`; did you mean --X?` for an option that does not exist, or nothing."""
    name = word.partition("=")[0].lstrip("-")
    names = (*BY_KEY, *_SPECIAL)
    if "_" not in name:  # suggest the spelling that the user uses
        names = tuple(n for n in names if "_" not in n)
    return did_you_mean("--" + name, ["--" + n for n in names])


def version_text() -> str:
    """Versions of gpulaunch, Python and torch; torch is not imported for it."""
    from importlib import metadata  # slow to import, and rarely needed

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    return f"gpulaunch {version('gpulaunch')} (Python {sys.version.split()[0]}, torch {version('torch')})"


_HEAD = """\
usage: gpulaunch [options] PROGRAM [arguments of the program]
"""

_WHAT = """
Runs PROGRAM once per rank, as torchrun does, with the same options and the same environment.
Everything after PROGRAM belongs to the program. ${local_rank} in its arguments is replaced in each rank.
"""

_TAIL = """
Each option can also be set in the environment (PET_NNODES for --nnodes and all of torchrun's own; GPULAUNCH_GPUS for
--gpus and all marked *), or in a job file under its long name. The command line takes precedence over the
environment, and the environment over the job file. Names may be written with - or _, and abbreviated if unique.
`doctor`, `top`, `report`, `tune`, `compare`, `trace`, `flame`, `export`, `runs`, `init` and `chaos` are commands only
as the first word, each with its own --help; a program of that name runs as ./doctor.
"""


def help_text() -> str:
    """The whole help, one block per section of the table, 118 columns at most."""
    verbs = (f"{' '.join((verb, usage)):<28} {summary}" for verb, (usage, summary) in VERBS.items())
    lines = [_HEAD + "".join(f"       gpulaunch {verb}\n" for verb in verbs) + _WHAT]
    for section in SECTIONS:
        lines.append(f"{section}:")
        for option in (o for o in OPTIONS if o.section == section):
            spelt = ", ".join(([f"-{option.short}"] if option.short else []) + _dashed(option))
            left = f"  {spelt} {option.metavar}".rstrip() + (" *" if option.ours else "")
            lines.extend(_two_columns(left, option.help + _default(option)))
        lines.append("")
    lines.append("  -h, --help, --version")
    lines.extend(_two_columns("  --print-completion SHELL", "print a completion script for bash, zsh or tcsh"))
    return "\n".join(lines) + "\n" + _TAIL


def _default(option: Option) -> str:
    """The default, if it is informative and the help text does not already state it."""
    if option.is_flag or option.default in (None, "", ()) or "default" in option.help:
        return ""
    value = f"{option.default:g}" if isinstance(option.default, float) else option.default
    return f" (default: {value})"


def _dashed(option: Option) -> list[str]:
    return [f"--{name}" for name in (*option.also, option.name)]


def _two_columns(left: str, right: str, *, column: int = 34, width: int = 118) -> list[str]:
    lines = [left.ljust(column)] if len(left) < column - 1 else [left, " " * column]
    for word in right.replace("(default: ", "(default:\0").split(" "):  # keep the two on one line
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append(" " * column)
        lines[-1] += word if len(lines[-1]) == column else f" {word}"
    return [line.replace("\0", " ") for line in lines]
