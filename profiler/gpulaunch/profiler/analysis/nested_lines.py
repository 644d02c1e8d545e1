"""Finds, of lines whose samples include those of the lines that they call, the one that is meant."""

from __future__ import annotations

from collections.abc import Mapping

from gpulaunch.profiler.analysis.thresholds import INNER_LINE


def innermost_line(lines: Mapping[str, int], total: int) -> str:
    """Return the line with the most samples, or the innermost one below it that has nearly as many.

    Args:
        lines: the samples of each line, at least one; a line comes before those that it calls.
        total: all samples that were in any of them.
    """
    names = list(lines)
    longest = max(names, key=lines.__getitem__)
    most = lines[longest]
    # Two lines with more samples together than there are share some: one calls the other. The outer one came first.
    below = names[names.index(longest) :]
    inner = [each for each in below if lines[each] >= INNER_LINE.value * most and lines[each] + most > total]
    return min(reversed(inner), key=lines.__getitem__, default=longest)
