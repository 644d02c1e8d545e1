"""A stack inside of logging is told by the line of the program that logs."""

from __future__ import annotations

import logging
import re
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.analysis.logged import Place, Tally, line_that_logs

PROGRAM = (("/home/me/proj/train.py", 90), ("/home/me/proj/train.py", 61))
LOGS = PROGRAM[-1]
PYTHON = "/opt/conda/lib/python3.12"
PACKAGES = f"{PYTHON}/site-packages"
LIBRARY = (f"{PACKAGES}/lightning/pytorch/trainer.py", 5)
LOGGING = ((f"{PYTHON}/logging/__init__.py", 1489), (f"{PYTHON}/logging/__init__.py", 1113))


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((*PROGRAM, *LOGGING), LOGS),
        ((*PROGRAM, ("/usr/lib64/python3.11/logging/__init__.py", 3)), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/torch/utils/tensorboard/writer.py", 380)), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/wandb/sdk/wandb_run.py", 1), (f"{PYTHON}/json/encoder.py", 2)), LOGS),
        ((*PROGRAM, ("/usr/lib/python3/dist-packages/tqdm/std.py", 2)), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/rich/progress.py", 2)), LOGS),
        ((*PROGRAM, (f"{PYTHON}/warnings.py", 112), *LOGGING), LOGS),
        ((*PROGRAM, (f"{PACKAGES}/torch/_dynamo/utils.py", 7), *LOGGING), LOGS),
        ((*PROGRAM, LIBRARY, *LOGGING), LIBRARY),
        ((("/src/gpulaunch/launcher/loop/rank_main.py", 80), ("<frozen runpy>", 88), *LOGGING), None),
        ((("/src/gpulaunch/examples/train.py", 8), *LOGGING), ("/src/gpulaunch/examples/train.py", 8)),
        ((*PROGRAM, ("/home/me/proj/model.py", 12)), None),
        ((*PROGRAM, ("/home/me/proj/logging/mine.py", 3)), None),
        ((*PROGRAM, ("/home/me/logging/mine.py", 3)), None),
        ((*PROGRAM, (f"{PACKAGES}/wandbox/run.py", 1)), None),
        (LOGGING, None),
        ((), None),
    ],
)
def test_the_line_that_logs_is_the_programs_last_outside_of_it(stack: tuple[Place, ...], line: Place | None) -> None:
    assert line_that_logs(stack) == line


def test_the_logging_of_this_python_is_known() -> None:
    """Wherever it is installed; a path that is not known would make the rule blind."""
    if not re.search(r"/lib(64)?/python3\.\d+t?$", sysconfig.get_paths()["stdlib"]):
        pytest.skip("a Python that is laid out in another way")

    assert line_that_logs((*PROGRAM, (logging.__file__, 1))) == LOGS


@given(st.lists(st.tuples(st.text(), st.integers())))
def test_any_stack_is_read(stack: list[Place]) -> None:
    line_that_logs(stack)


def test_samples_of_steps_are_counted_by_rank() -> None:
    tally = Tally()
    logs = "train.py:61"

    for rank, phase, line in [
        *((0, "other", logs), (0, "forward", None), (1, "other", logs), (0, "unsettled", logs)),
        *((0, "startup", logs), (0, "startup", None)),
    ]:
        tally.add(rank, phase, line)

    assert tally.samples == {0: 3, 1: 1}
    assert tally.logged == {(0, logs): 2, (1, logs): 1}


def test_a_progress_bar_that_waits_for_data_logs_nothing() -> None:
    """`for batch in tqdm(loader)` has the loader's frames above those of tqdm."""
    tally = Tally()
    for _ in range(20):
        tally.add(0, "data_wait", "train.py:61")
    tally.add(0, "other", "train.py:61")

    assert (tally.samples, tally.logged) == ({0: 21}, {(0, "train.py:61"): 1})


def test_a_program_that_makes_lines_without_end_fills_nothing() -> None:
    tally = Tally()

    for line in range(10_000):
        tally.add(0, "other", f"made.py:{line}")

    assert len(tally.logged) == 64
    assert tally.samples == {0: 10_000}
