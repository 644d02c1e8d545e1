"""A stack inside of logging is told by the line of the program that logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.profiler.analysis.logged import Tally, line_that_logs

PROGRAM = ("<module> (proj/train.py:90)", "main (proj/train.py:61)")


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((*PROGRAM, "info (logging/__init__.py:1489)", "emit (logging/__init__.py:1113)"), "proj/train.py:61"),
        ((*PROGRAM, "add_scalar (torch/utils/tensorboard/writer.py:380)"), "proj/train.py:61"),
        ((*PROGRAM, "log (wandb/sdk/wandb_run.py:1)", "send (json/encoder.py:2)"), "proj/train.py:61"),
        ((*PROGRAM, "forward (proj/model.py:12)"), None),
        ((*PROGRAM, "debug (proj/logging/mine.py:3)"), None),
        (("info (logging/__init__.py:1489)",), None),
        ((*PROGRAM, "(elsewhere)"), None),
        ((), None),
    ],
)
def test_the_line_that_logs_is_the_last_one_outside_of_it(stack: tuple[str, ...], line: str | None) -> None:
    assert line_that_logs(stack) == line


@given(st.lists(st.text()))
def test_any_labels_are_read(labels: list[str]) -> None:
    line_that_logs(labels)


def test_samples_of_steps_are_counted_by_rank() -> None:
    tally = Tally()
    logging = (*PROGRAM, "info (logging/__init__.py:1489)")

    for rank, phase, stack in [
        *((0, "other", logging), (0, "forward", PROGRAM), (1, "other", logging), (0, "unsettled", logging)),
        *((0, "startup", logging), (0, "startup", PROGRAM)),
    ]:
        tally.add(rank, phase, stack)

    assert tally.samples == {0: 3, 1: 1}
    assert tally.logged == {(0, "proj/train.py:61"): 2, (1, "proj/train.py:61"): 1}


def test_a_program_that_makes_lines_without_end_fills_nothing() -> None:
    tally = Tally()

    for line in range(10_000):
        tally.add(0, "other", (f"f (made.py:{line})", "info (logging/__init__.py:1)"))

    assert len(tally.logged) == 64
    assert tally.samples == {0: 10_000}
