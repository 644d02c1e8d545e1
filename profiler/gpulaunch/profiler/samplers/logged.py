"""Finds the line of the program that logs, in a stack that was sampled inside a logging library."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from gpulaunch.profiler.samplers.paths import OWN_DIRS, PACKAGES_DIR, PYTHON_DIR
from gpulaunch.profiler.stack import Frame

_LOGS: Final = re.compile(
    rf"{PYTHON_DIR}logging/|{PACKAGES_DIR}(?:torch/utils/tensorboard|tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune"
    r"|aim|clearml|tqdm|rich/progress|(?:lightning/|pytorch_lightning/|lightning_fabric/)(?:pytorch/|fabric/)?"
    r"(?:loggers|trainer/connectors/logger_connector))[/.]"
)
"""Path patterns of the logging libraries that programs use."""
_LIGHTNING_MODULE: Final = re.compile(rf"{PACKAGES_DIR}(?:lightning/pytorch|pytorch_lightning)/core/module\.py")
_SELF_LOG: Final = ("LightningModule.log", "LightningModule.log_dict")
"""Of these files, what logs: a tenth of its time passes before it calls a logger's code."""
_NOT_THE_USERS: Final = re.compile(
    rf"{PYTHON_DIR}(?!(?:site|dist)-packages/)|{PACKAGES_DIR}torch/|{OWN_DIRS}|<frozen |{_LIGHTNING_MODULE.pattern}"
)
"""Files that cannot contain the line to change: Python's, torch's, ours, and Lightning's `self.log`."""
_AT_FORK: Final = re.compile(rf"{PYTHON_DIR}multiprocessing/|{PYTHON_DIR}subprocess\.py")
"""What starts processes: at each fork, Python takes the locks of logging, and the time is the fork's."""


_BAR: Final = re.compile(rf"{PACKAGES_DIR}(?:tqdm|rich/progress)[/.]")
_ITERATES: Final = frozenset({"__iter__", "__next__", "track"})
"""Of a progress bar, functions that call what they iterate over."""


def line_that_logs(stack: Sequence[Frame]) -> Frame | None:
    """Return the line of the program that called into logging; None for a stack that is not inside logging.

    In a progress bar that has called a generator of the program, say, the thread is in that, which may log itself.

    Args:
        stack: the outermost frame first.
    """
    caller = None
    forks = False
    for frame, called in zip_longest(stack, stack[1:]):
        if _iterates(frame) and called is not None and not _LOGS.match(called.file):
            continue
        if _LOGS.match(frame.file) or (frame.name in _SELF_LOG and _LIGHTNING_MODULE.match(frame.file)):
            return None if forks else caller
        forks = _AT_FORK.match(frame.file) is not None
        if not _NOT_THE_USERS.match(frame.file):
            caller = frame
    return None


def _iterates(frame: Frame) -> bool:
    return frame.name.rpartition(".")[2] in _ITERATES and _BAR.match(frame.file) is not None
