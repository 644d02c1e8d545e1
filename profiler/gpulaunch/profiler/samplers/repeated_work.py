"""Finds in the source of a program what another turn of a loop, another pass of a network, or another rank computes,
too."""

from __future__ import annotations

import ast

from gpulaunch.profiler.record.line_calls import (
    FOR_ALL_RANKS,
    PAIRS_OF_ALL_RANKS,
    SAME_IN_LOOP,
    SAME_IN_LOOP_FORWARD,
    SAME_PASSES,
)
from gpulaunch.profiler.samplers.gathered_pairs import lines_of_gathered_pairs
from gpulaunch.profiler.samplers.known_models import Models
from gpulaunch.profiler.samplers.loop_invariants import invariants_of_loops
from gpulaunch.profiler.samplers.rank_slices import lines_for_all_ranks
from gpulaunch.profiler.samplers.same_passes import lines_of_same_passes


def lines_of_repeated_work(tree: ast.Module) -> dict[int, tuple[int, str]]:
    """Return the lines of such statements, and for each the line to tell, and one of `record.line_calls`.

    Args:
        tree: of a file.
    """
    models = Models(tree)
    found = {line: (line, FOR_ALL_RANKS) for line in lines_for_all_ranks(tree)}
    found |= {line: (first, PAIRS_OF_ALL_RANKS) for line, first in lines_of_gathered_pairs(tree).items()}
    found |= {line: (first, SAME_PASSES) for line, first in lines_of_same_passes(tree, models).items()}
    for line, has_gradients in invariants_of_loops(tree, models).items():
        found[line] = line, SAME_IN_LOOP if has_gradients else SAME_IN_LOOP_FORWARD
    return found
