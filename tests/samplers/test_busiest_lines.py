"""The lines of a training loop that take most of the time, from sampled stacks."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.samplers.busiest_lines import busiest_lines, deepest_functions
from gpulaunch.profiler.samplers.folded import Folded

MAIN = "<module> (me/train.py:90)"
LOSS, BACKWARD = "main (me/train.py:40)", "main (me/train.py:43)"
TORCH = "Tensor.backward (torch/_tensor.py:600)"
FIT = "Trainer.fit (lightning/pytorch/trainer/trainer.py:560)"


@pytest.mark.parametrize(
    ("counts", "lines"),
    [
        ({(MAIN, LOSS, "triplets (me/train.py:12)"): 40, (MAIN, BACKWARD, TORCH): 60}, [(43, 0.6), (40, 0.4)]),
        ({(MAIN, LOSS, "a (me/train.py:1)"): 30, (MAIN, LOSS): 30, (MAIN, BACKWARD): 40}, [(40, 0.6), (43, 0.4)]),
        ({(MAIN, LOSS): 10, (MAIN, BACKWARD, TORCH): 80, ("<module> (me/train.py:9)",): 10}, [(43, 0.8)]),
        ({(MAIN, LOSS): 8, (MAIN, BACKWARD): 8}, []),
        ({(MAIN, FIT, "step (me/train.py:5)"): 50, (MAIN, FIT, "save (me/train.py:6)"): 50}, []),
        ({(MAIN,): 100}, [(90, 1.0)]),
        ({(MAIN, LOSS): 95, (MAIN, LOSS, TORCH): 5}, [(40, 1.0)]),
        ({(MAIN, LOSS): 93, (MAIN, LOSS, TORCH): 2, (MAIN, BACKWARD): 5}, [(40, 0.95)]),
        ({(MAIN, BACKWARD, TORCH): 60, (MAIN, BACKWARD, f"{TORCH}2"): 40}, [(43, 1.0)]),
        ({("(elsewhere)",): 100}, []),
        ({}, []),
    ],
    ids=[
        *("two lines", "functions are summed", "rare ones are left out", "few", "a trainer", "one", "it ends there"),
        *("most of it", "torch", "unknown", "none"),
    ],
)
def test_the_lines_of_the_loop_are_those_at_which_stacks_part(
    counts: dict[tuple[str, ...], int], lines: list[tuple[int, float]]
) -> None:
    stacks = Folded()
    for stack, count in counts.items():
        stacks.add("backward", stack, count)
        stacks.add("startup", ("<module> (me/train.py:1)",), 100)

    assert busiest_lines(stacks) == [(f"me/train.py:{line}", pytest.approx(share, abs=0.001)) for line, share in lines]


NET = "Net.forward (me/parts/net.py:7)"
CALL = "Module._call_impl (torch/nn/modules/module.py:1789)"
CONV = "conv2d (torch/nn/functional.py:9)"


@pytest.mark.parametrize(
    ("counts", "lines"),
    [
        ({(MAIN, LOSS, CALL, NET, CALL, CONV): 70, (MAIN, BACKWARD, TORCH): 30}, [("Net.forward", 7), ("main", 43)]),
        ({(MAIN, FIT, CALL, NET): 100}, [("Net.forward", 7)]),
        ({(MAIN, LOSS, CALL, NET): 90, (MAIN, BACKWARD): 10}, [("Net.forward", 7)]),
        (
            {(MAIN, LOSS, NET): 30, (MAIN, LOSS, "Net.forward (me/parts/net.py:9)"): 31, (MAIN, BACKWARD): 39},
            [("Net.forward", 9), ("main", 43)],
        ),
        ({(MAIN, LOSS, CALL, NET): 10}, []),
        ({("(elsewhere)",): 100}, []),
        ({("<module> (<stdin>:3)", TORCH): 100}, [("<module>", 3)]),
        ({(MAIN, LOSS, "read (menu/files.py:3)"): 100}, [("main", 40)]),
    ],
    ids=[
        "the model and its backward",
        "a trainer",
        "rare ones are left out",
        "lines are summed",
        "few",
        "unknown",
        "from stdin",
        "a directory whose name begins alike",
    ],
)
def test_the_deepest_functions_are_the_last_ones_of_the_program(
    counts: dict[tuple[str, ...], int], lines: list[tuple[str, int]]
) -> None:
    stacks = Folded()
    for stack, count in counts.items():
        stacks.add("forward", stack, count)

    assert [(name, int(place.rpartition(":")[2])) for name, place, _ in deepest_functions(stacks)] == lines
