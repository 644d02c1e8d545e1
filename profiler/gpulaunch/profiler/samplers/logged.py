"""Finds the line of the program that logs, in a stack that was sampled inside a logging library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gpulaunch.profiler.samplers.paths import OWN_DIRS, PACKAGES_DIR, PYTHON_DIR

_LOGS: Final = re.compile(
    rf"{PYTHON_DIR}logging/|{PACKAGES_DIR}(?:torch/utils/tensorboard|tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune"
    r"|aim|clearml|tqdm|rich/progress|(?:lightning/|pytorch_lightning/|lightning_fabric/)(?:pytorch/|fabric/)?"
    r"(?:loggers|trainer/connectors/logger_connector))[/.]"
)
"""Path patterns of the logging libraries that programs use."""
_NOT_THE_USERS: Final = re.compile(
    rf"{PYTHON_DIR}(?!(?:site|dist)-packages/)|{PACKAGES_DIR}torch/|{OWN_DIRS}|<frozen "
    rf"|{PACKAGES_DIR}(?:lightning/pytorch|pytorch_lightning)/core/module\.py"
)
"""Files that cannot contain the line to change: Python's, torch's, ours, and Lightning's `self.log`."""
_AT_FORK: Final = re.compile(rf"{PYTHON_DIR}multiprocessing/|{PYTHON_DIR}subprocess\.py")
"""What starts processes: at each fork, Python takes the locks of logging, and the time is the fork's."""
Place = tuple[str, int]


def line_that_logs(stack: Sequence[Place]) -> Place | None:
    """Return the line of the program that called into logging; None for a stack that is not inside logging.

    Args:
        stack: file (as in Python) and line of every frame, the outermost first.
    """
    caller = None
    forks = False
    for file, line in stack:
        if _LOGS.match(file):
            return None if forks else caller
        forks = _AT_FORK.match(file) is not None
        if not _NOT_THE_USERS.match(file):
            caller = file, line
    return None
