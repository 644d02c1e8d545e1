"""Stack samples that were inside of logging: which of the program's lines logs, and how often it was met there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

_PACKAGES: Final = r".*/(?:site|dist)-packages/"
_PYTHON: Final = r".*/lib(?:64)?/python3\.\d+t?/"
_LOGS: Final = re.compile(
    rf"{_PYTHON}logging/|{_PACKAGES}(?:torch/utils/tensorboard|tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune"
    r"|aim|clearml|tqdm|rich/progress)[/.]"
)
"""Where the files of what programs log with are."""
_NOT_THE_USERS: Final = re.compile(
    rf"{_PYTHON}(?!(?:site|dist)-packages/)|{_PACKAGES}torch/|.*/gpulaunch/(?:launcher|profiler|compat|checkpoint)/"
    r"|<frozen "
)
"""What cannot be the line to change: Python's own, torch's, ours (as `probe.sites.caller` has it)."""
_MOST_LINES: Final = 64

Place = tuple[str, int]


def line_that_logs(stack: Sequence[Place]) -> Place | None:
    """Give the line of the program that called into logging; None for a stack that is not inside of it.

    Args:
        stack: file, as Python has it, and line of every frame, the outermost first.
    """
    caller = None
    for file, line in stack:
        if _LOGS.match(file):
            return caller
        if not _NOT_THE_USERS.match(file):
            caller = file, line
    return None


class Tally:
    """Counts samples as they come; bounded. One thread adds, any other may take the counts."""

    def __init__(self) -> None:
        self._samples = Counter[int]()
        self._logged = Counter[tuple[int, str]]()

    def add(self, rank: int, phase: str, line: str | None) -> None:
        """Count a sample of a rank's main thread.

        Args:
            rank: whose.
            phase: of `samplers.phases`.
            line: `path:line` of what called into logging; None: the thread was not inside of that.
        """
        if phase == "startup":  # before the first step, and no part of any
            return
        self._samples[rank] += 1
        if line is None or phase == "data_wait":  # a progress bar around a loader waits for data, and logs nothing
            return
        if (rank, line) in self._logged or len(self._logged) < _MOST_LINES:
            self._logged[rank, line] += 1

    @property
    def samples(self) -> Mapping[int, int]:
        """All samples so far, by rank."""
        return dict(self._samples)

    @property
    def logged(self) -> Mapping[tuple[int, str], int]:
        """Those inside of logging, by rank and the program's line."""
        return dict(self._logged)
