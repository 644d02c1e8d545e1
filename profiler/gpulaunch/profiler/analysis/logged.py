"""Counts stack samples inside logging calls: which line of the program logs, and in how many samples."""

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
"""Path patterns of the logging libraries that programs use."""
_NOT_THE_USERS: Final = re.compile(
    rf"{_PYTHON}(?!(?:site|dist)-packages/)|{_PACKAGES}torch/|.*/gpulaunch/(?:launcher|profiler|compat|checkpoint)/"
    r"|<frozen "
)
"""Files that cannot contain the line to change: Python's, torch's, ours (as in `probe.sites.caller`)."""
_MOST_LINES: Final = 64

Place = tuple[str, int]


def line_that_logs(stack: Sequence[Place]) -> Place | None:
    """Return the line of the program that called into logging; None for a stack that is not inside logging.

    Args:
        stack: file (as in Python) and line of every frame, the outermost first.
    """
    caller = None
    for file, line in stack:
        if _LOGS.match(file):
            return caller
        if not _NOT_THE_USERS.match(file):
            caller = file, line
    return None


class Tally:
    """Counts samples in bounded memory. One thread adds, any other may read the counts."""

    def __init__(self) -> None:
        self._samples = Counter[int]()
        self._logged = Counter[tuple[int, str]]()

    def add(self, rank: int, phase: str, line: str | None) -> None:
        """Count a sample of a rank's main thread.

        Args:
            rank: the rank.
            phase: of `samplers.phases`.
            line: `path:line` of the call into logging; None: the thread was not inside logging.
        """
        if phase == "startup":  # before the first step, part of none
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
        """Those inside logging, by rank and the program's line."""
        return dict(self._logged)
