"""Loops over the positions of two dimensions take elements; those over whole parts of tensors do not."""

from __future__ import annotations

import ast
import textwrap

import pytest

from gpulaunch.profiler.samplers.element_loops import loops_over_elements

ADVANTAGES = """
for e in range(ENVS):
    last = 0.0
    for t in reversed(range(HORIZON)):
        delta = rewards[t, e] + GAMMA * values[t + 1, e] * (1 - done[t, e]) - values[t, e]
        last = delta + GAMMA * LAMBDA * (1 - done[t, e]) * last
        advantages[t, e] = last
"""


def told(loop: str) -> dict[int, int]:
    return loops_over_elements(ast.parse(textwrap.dedent(loop)))


def test_advantages_that_are_computed_for_each_step_of_each_environment_are_told_at_the_outer_loop() -> None:
    assert told(ADVANTAGES) == dict.fromkeys((5, 6, 7), 2)


def test_a_table_of_two_sequences_is_told() -> None:
    line = "cost[i + 1, j + 1] = d[i, j] + min(cost[i, j], cost[i, j + 1])"

    assert told(f"for i in range(n):\n    for j in range(m):\n        {line}") == {3: 1}


@pytest.mark.parametrize(
    "line",
    [
        "out[t, e] = net(x[t], y[e])",
        "out[t, e] = x[t, e].mean()",
        "out[t, e] = x[t, e] * weight",
        "out[t, e] = tiles[t * n + e]",
        "out[t, e, :] = x[t, e, :]",
        "out[t] = x[t, 0]",
        "total += x[t, e]",
    ],
    ids=[
        "a pass",
        "a mean of parts",
        "times a tensor",
        "pictures",
        "vectors",
        "one loop",
        "a sum, perhaps of pictures",
    ],
)
def test_a_loop_over_parts_of_tensors_is_not(line: str) -> None:
    assert told(f"for t in range(n):\n    for e in range(m):\n        {line}") == {}
