"""Stack samples that were inside of logging: which of the program's lines logs, and how often it was met there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["Tally", "line_that_logs"]

_LOGS: Final = (
    *("logging/", "torch/utils/tensorboard/", "tensorboard/", "tensorboardX/", "wandb/", "mlflow/", "comet_ml/"),
    *("neptune/", "aim/", "clearml/", "tqdm/", "rich/progress"),
)
"""Where the files of what programs log with are, as labels have them: from the package on."""
_LABEL: Final = re.compile(r".* \((?P<path>.+):(?P<line>\d+)\)")
_MOST_LINES: Final = 64


def line_that_logs(labels: Sequence[str]) -> str | None:
    """Give `path:line` of what called into logging; None for a stack that is not inside of it.

    Args:
        labels: `name (path:line)`, the outermost frame first, as `samplers.folded` makes them.
    """
    caller = ""
    for label in labels:
        found = _LABEL.fullmatch(label)
        path = found["path"] if found else ""
        if path.startswith(_LOGS):
            return caller or None
        caller = f"{path}:{found['line']}" if found else ""
    return None


class Tally:
    """Counts samples as they come; bounded. One thread adds, any other may take the counts."""

    def __init__(self) -> None:
        self._samples = Counter[int]()
        self._logged = Counter[tuple[int, str]]()

    def add(self, rank: int, phase: str, labels: Sequence[str]) -> None:
        """Count a sample of a rank's main thread, taken in a phase of `samplers.phases`."""
        if phase == "startup":  # before the first step, and no part of any
            return
        self._samples[rank] += 1
        line = line_that_logs(labels)
        if line is not None and ((rank, line) in self._logged or len(self._logged) < _MOST_LINES):
            self._logged[rank, line] += 1

    @property
    def samples(self) -> Mapping[int, int]:
        """All samples so far, by rank."""
        return dict(self._samples)

    @property
    def logged(self) -> Mapping[tuple[int, str], int]:
        """Those inside of logging, by rank and the program's line."""
        return dict(self._logged)
