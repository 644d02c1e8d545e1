"""The arguments of a verb, parsed by argparse; errors are one line, as everywhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from gpulaunch.launcher.job.options import UsageError, did_you_mean, duration_s

_LONGEST_S = 1e9


def wants_help(argv: Sequence[str]) -> bool:
    """Whether any of these words requests help."""
    return "help" in argv[:1] or "-h" in argv or "--help" in argv


class VerbParser(argparse.ArgumentParser):
    """The argument parser of one verb."""

    def __init__(self, verb: str) -> None:
        super().__init__(prog=f"gpulaunch {verb}", add_help=False, allow_abbrev=False)
        self._verb = verb

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError instead of ending the process."""
        raise UsageError(f"{self._verb}: {message}")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Read them all. Raises UsageError."""
        given, unknown = self.parse_known_args(argv)
        if unknown:
            known = ["--help", *(string for action in self._actions for string in action.option_strings)]
            near = did_you_mean(unknown[0].partition("=")[0], known)
            raise UsageError(f"{self._verb}: unknown argument {unknown[0]}{near}")
        return given

    def one_run(self, runs: Sequence[str]) -> None:
        """Raise UsageError if more than one run is named: the verb takes one."""
        if len(runs) > 1:
            raise UsageError(f"{self._verb}: one run at a time, not {len(runs)}: {' '.join(runs)}")


def count(text: str) -> int:
    """A number from 1, as a type for argparse."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


def time_s(text: str) -> float:
    """Seconds of `250ms` and of what options of a job take (`90`, `30s`, `10m`, `2h`), as a type for argparse."""
    in_ms = text.endswith("ms") and text[-3:-2].isdecimal()
    try:
        value_s = duration_s(text[:-2]) / 1000 if in_ms else duration_s(text)
    except UsageError:
        value_s = -1.0
    if not 0 <= value_s < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"expected a time such as 250ms, 30s, 2m or 0.5, got {text!r}")
    return value_s
