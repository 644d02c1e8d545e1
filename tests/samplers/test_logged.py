"""A stack inside of logging is told by the line of the program that logs."""

from __future__ import annotations

import logging
import re
import sysconfig
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.samplers.logged import line_that_logs
from gpulaunch.profiler.stack import Frame

Place = tuple[str, int] | tuple[str, int, str]
"""A file, a line, and where it matters the name of the function."""

PROGRAM = (("/home/me/proj/train.py", 90), ("/home/me/proj/train.py", 61))
LOGS = PROGRAM[-1]
PYTHON = "/opt/conda/lib/python3.12"
PACKAGES = f"{PYTHON}/site-packages"
LIBRARY = (f"{PACKAGES}/lightning/pytorch/trainer.py", 5)
SELF_LOG = (
    (f"{PACKAGES}/lightning/pytorch/core/module.py", 1),
    (f"{PACKAGES}/lightning/pytorch/trainer/connectors/logger_connector/result.py", 2),
)
BAR = (f"{PACKAGES}/tqdm/std.py", 1181)
BATCHES = ("/home/me/proj/data.py", 12)
LOGGING = ((f"{PYTHON}/logging/__init__.py", 1489), (f"{PYTHON}/logging/__init__.py", 1113))


def where(stack: Sequence[Place]) -> Place | None:
    frame = line_that_logs([Frame(file=file, line=line, name="".join(name)) for file, line, *name in stack])
    return None if frame is None else (frame.file, frame.line)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((*PROGRAM, *LOGGING), LOGS),
        ((*PROGRAM, ("/usr/lib64/python3.11/logging/__init__.py", 3)), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/torch/utils/tensorboard/writer.py", 380)), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/wandb/sdk/wandb_run.py", 1), (f"{PYTHON}/json/encoder.py", 2)), LOGS),
        ((*PROGRAM, ("/usr/lib/python3/dist-packages/tqdm/std.py", 2)), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/rich/progress.py", 2)), LOGS),
        ((*PROGRAM, (*BAR, "tqdm.__iter__")), LOGS),
        ((*PROGRAM, (*BAR, "tqdm.__iter__"), (*BAR, "tqdm.update"), (f"{PYTHON}/threading.py", 9)), LOGS),
        ((*PROGRAM, (*BAR, "tqdm.__iter__"), BATCHES, (f"{PACKAGES}/torch/functional.py", 7)), None),
        ((*PROGRAM, (*BAR, "tqdm.__iter__"), (f"{PACKAGES}/torch/utils/data/dataloader.py", 7)), None),
        ((*PROGRAM, (f"{PACKAGES}/rich/progress.py", 2, "Progress.track"), BATCHES), None),
        ((*PROGRAM, (*BAR, "tqdm.__iter__"), BATCHES, *LOGGING), BATCHES),
        ((*PROGRAM, (f"{PYTHON}/warnings.py", 112), *LOGGING), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/torch/_dynamo/utils.py", 7), *LOGGING), LOGS),
        ((*PROGRAM, LIBRARY, *LOGGING), LIBRARY),
        ((*PROGRAM, *SELF_LOG), LOGS),
        ((*PROGRAM, (*SELF_LOG[0], "LightningModule.log_dict"), (f"{PACKAGES}/torch/_tensor.py", 1)), LOGS),
        ((*PROGRAM, (*SELF_LOG[0], "LightningModule.manual_backward")), None),
        ((*PROGRAM, LIBRARY, (f"{PACKAGES}/lightning/pytorch/loggers/csv_logs.py", 1)), LIBRARY),
        ((*PROGRAM, LIBRARY, (f"{PACKAGES}/lightning/fabric/loggers/csv_logs.py", 1)), LIBRARY),
        ((*PROGRAM, LIBRARY, (f"{PACKAGES}/lightning/pytorch/core/module.py", 1)), None),
        ((("/src/gpulaunch/launcher/loop/rank_main.py", 80), ("<frozen runpy>", 88), *LOGGING), None),
        ((("/src/gpulaunch/examples/train.py", 8), *LOGGING), ("/src/gpulaunch/examples/train.py", 8)),
        ((*PROGRAM, ("/home/me/proj/model.py", 12)), None),
        ((*PROGRAM, ("/home/me/proj/logging/mine.py", 3)), None),
        ((*PROGRAM, ("/home/me/logging/mine.py", 3)), None),
        ((*PROGRAM, (f"{PACKAGES}/wandbox/run.py", 1)), None),
        ((*PROGRAM, (f"{PYTHON}/multiprocessing/popen_fork.py", 66), (f"{PYTHON}/logging/__init__.py", 242)), None),
        ((*PROGRAM, (f"{PYTHON}/subprocess.py", 1883), (f"{PYTHON}/logging/__init__.py", 242)), None),
        (LOGGING, None),
        ((), None),
    ],
)
def test_the_line_that_logs_is_the_programs_last_outside_of_it(stack: tuple[Place, ...], line: Place | None) -> None:
    assert where(stack) == line


def test_the_logging_of_this_python_is_known() -> None:
    """Wherever it is installed; a path that is not known would make the rule blind."""
    if not re.search(r"/lib(64)?/python3\.\d+t?$", sysconfig.get_paths()["stdlib"]):
        pytest.skip("a Python that is laid out in another way")

    assert where((*PROGRAM, (logging.__file__, 1))) == LOGS


@given(st.lists(st.tuples(st.text(), st.integers())))
def test_any_stack_is_read(stack: list[Place]) -> None:
    where(stack)
