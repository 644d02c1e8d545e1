"""Samples of stacks are counted by rank and line, in bounded memory."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.analysis.tally import Tally
from gpulaunch.profiler.record.line_calls import KEEPS_LOGITS, RECOMPUTED

LINE = "train.py:61"


def test_samples_of_steps_are_counted_by_rank() -> None:
    tally = Tally()

    for rank, phase, line in [
        *((0, "other", LINE), (0, "forward", ""), (1, "other", LINE), (0, "unsettled", LINE)),
        *((0, "startup", LINE), (0, "startup", "")),
    ]:
        tally.add(rank, phase, logs=line)

    assert tally.samples == {0: 3, 1: 1}
    assert tally.logged == {(0, LINE): 2, (1, LINE): 1}


def test_a_progress_bar_that_waits_for_data_logs_nothing() -> None:
    """`for batch in tqdm(loader)` has the loader's frames above those of tqdm."""
    tally = Tally()
    for _ in range(20):
        tally.add(0, "data_wait", logs=LINE)
    tally.add(0, "other", logs=LINE)

    assert (tally.samples, tally.logged) == ({0: 21}, {(0, LINE): 1})


def test_a_program_that_makes_lines_without_end_fills_nothing() -> None:
    tally = Tally()

    for line in range(10_000):
        tally.add(0, "other", logs=f"made.py:{line}")
        tally.add(0, "other", at=f"made.py:{line}", calls=f"made_{line}")
        tally.add(0, "other", at="made.py:0", calls=f"made_{line}")

    assert len(tally.logged) == 64
    assert len(tally.calling) == len(tally.calls) == 512
    assert tally.samples == {0: 30_000}


def test_a_call_that_contains_the_training_loop_is_none_of_a_step() -> None:
    tally = Tally()
    for _ in range(3):
        tally.add(0, "other", at=LINE, calls="lightning.pytorch.trainer.fit")
        tally.add(0, "other", at="callback.py:7", calls="json.dump")
    tally.add(0, "forward", at=LINE, calls="lightning.pytorch.trainer.fit", spans_steps=True)

    assert (tally.samples, tally.calling) == ({0: 7}, {(0, "callback.py:7"): 3})


def test_a_main_thread_that_does_not_train_holds_no_steps() -> None:
    tally = Tally()
    for rank in (0, 1):
        tally.add(rank, "other", at=LINE, calls="threading.join")
    tally.trains_elsewhere(0)  # a stack that was misread, perhaps
    for _ in range(3):
        tally.trains_elsewhere(1)

    assert tally.calling == {(0, LINE): 1}


def test_fetches_of_workers_are_counted_apart() -> None:
    tally = Tally()
    tally.add(0, "data_wait")
    for lines in ({"data.py:30": "decode"}, {"data.py:30": "decode", "data.py:50": ""}, {}):
        tally.add_fetch(0, lines)

    assert (tally.samples, tally.fetches) == ({0: 1}, {0: 3})
    assert (tally.calling, tally.fetching) == ({}, {(0, "data.py:30"): 2, (0, "data.py:50"): 1})
    assert tally.calls == {(0, "data.py:30"): "decode", (0, "data.py:50"): ""}


def test_a_line_is_told_with_the_function_that_it_mostly_calls() -> None:
    """A decorated function checks what it is given: such samples show another name."""
    tally = Tally()
    for name in ("sklearn.utils.validate", "sklearn.metrics.f1_score", "sklearn.metrics.f1_score"):
        tally.add(0, "other", at=LINE, calls=name)

    assert (tally.calling, tally.calls) == ({(0, LINE): 3}, {(0, LINE): "sklearn.metrics.f1_score"})


def test_loops_are_counted_by_their_first_line_and_those_of_steps_are_none() -> None:
    outer, loop, inner = (0, "train.py:9", 30), (0, "loss.py:4", 8), (0, "loss.py:6", 7)
    tally = Tally()
    tally.add_loops("forward", [inner, loop, outer], [])
    for _ in range(2):
        tally.add_loops_of_steps([outer])
    for phase in ("forward", "forward", "validation", "startup"):
        tally.add(0, phase)
        tally.add_loops(phase, [inner, loop, outer], [])

    assert tally.looping == {(0, "loss.py:4"): 2}
    assert tally.loop_ends == {(0, "loss.py:4"): 8}
    assert tally.before_backward == {0: 2}


def test_a_single_sample_of_backward_in_a_loop_does_not_make_it_one_of_steps() -> None:
    tally = Tally()
    tally.add_loops_of_steps([(0, "loss.py:4", 8)] * 2)
    tally.add_loops("forward", [(0, "loss.py:4", 8)], [])

    assert tally.looping == {(0, "loss.py:4"): 1}


@pytest.mark.parametrize(("forward", "counted"), [(0, 20), (1, 21), (20, 20)])
def test_what_is_outside_of_forward_counts_only_without_a_dataloader(forward: int, counted: int) -> None:
    """It may be after backward. A few samples are misread as forward even if there is no such phase."""
    after, loop = (0, "train.py:40", 44), (0, "loss.py:4", 8)
    tally = Tally()
    for phase, at, count in (("forward", loop, forward), ("other", after, 10), ("unsettled", after, 10)):
        for _ in range(count):
            tally.add(0, phase)
            tally.add_loops(phase, [at], [])

    assert tally.before_backward == {0: counted}
    assert tally.looping.get((0, "train.py:40"), 0) == (0 if forward == 20 else 20)


def test_two_loops_on_one_line_are_one() -> None:
    tally = Tally()
    for end in (8, 4, 4):
        tally.add_loops("forward", [(0, "loss.py:4", end)], [])

    assert (tally.looping, tally.loop_ends) == ({(0, "loss.py:4"): 3}, {(0, "loss.py:4"): 8})


def test_loops_of_a_main_thread_that_does_not_train_and_loops_without_end_are_nothing() -> None:
    tally = Tally()
    for line in range(10_000):
        tally.add_loops("forward", [(line % 2, f"made.py:{line}", line)], [(0, f"made.py:{line}", line)] * 2)
        tally.add_loops_of_steps([(0, f"made.py:{-line}", line)])
    for _ in range(3):
        tally.trains_elsewhere(0)

    assert {rank for rank, _ in tally.looping} == {1}
    assert len(tally.looping) == 256


def test_waits_for_the_gil_are_counted_by_the_function_and_the_lines_of_its_holder() -> None:
    tally = Tally()
    for lines in ({"page.py:9": "draw", "page.py:3": "json.dumps"}, {"page.py:9": "draw", "page.py:3": ""}, {}):
        tally.gil.add(0, "page.py watch", lines)
    tally.gil.add(0, "page.py watch", {"page.py:3": "json.dumps"})
    tally.gil.add_thread_wait(0)

    assert tally.gil_waits == {
        (0, "page.py watch", ""): 4,
        (0, "page.py watch", "page.py:9"): 2,
        (0, "page.py watch", "page.py:3"): 3,
    }
    assert tally.calls == {(0, "page.py:9"): "draw", (0, "page.py:3"): "json.dumps"}
    assert tally.thread_waits == {0: 1}


def test_waits_of_a_main_thread_that_does_not_train_and_threads_without_end_are_nothing() -> None:
    tally = Tally()
    for number in range(10_000):
        tally.gil.add(number % 2, f"made.py f{number}", {f"made.py:{number}": f"g{number}", "made.py:0": f"g{number}"})
    for _ in range(3):
        tally.trains_elsewhere(0)

    assert {rank for rank, _, _ in tally.gil_waits} == {1}
    assert len(tally.gil_waits) <= 512
    assert len(tally.calls) <= 512


@pytest.mark.parametrize(("again", "told"), [(0, (3, KEEPS_LOGITS)), (2, (5, KEEPS_LOGITS)), (4, (7, RECOMPUTED))])
def test_what_a_trainer_does_by_itself_is_told_at_the_line_of_all_steps(again: int, told: tuple[int, str]) -> None:
    """It has no other line of the program."""
    tally = Tally()
    tally.add(0, "forward", at=LINE, calls="transformers.trainer.train", spans_steps=True)
    for _ in range(3):
        tally.add(0, "forward", at=LINE, calls=KEEPS_LOGITS)
    for _ in range(again):
        tally.add(0, "backward", at=LINE, calls=RECOMPUTED)
    tally.add(0, "forward", at=LINE, calls="json.dump")

    assert (tally.calling, tally.calls) == ({(0, LINE): told[0]}, {(0, LINE): told[1]})
