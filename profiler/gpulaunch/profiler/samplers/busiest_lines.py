"""Finds in the sampled stacks of a run which lines of its program the time goes to: of its training loop, and of what
that calls, as deep as the program's own files go."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from gpulaunch.profiler.samplers.folded import Folded
from gpulaunch.profiler.samplers.phases import STARTUP

LEAST_SAMPLES: Final = 20
"""Fewer say little about the shares."""
_SAME: Final = 0.9
"""A line with this share of the samples contains the loop, rather than being one of its lines."""
_TOLD: Final = 0.15
_MOST: Final = 2
_LABEL: Final = re.compile(r"(?P<name>.*) \((?P<place>(?P<file>.+):\d+)\)")


def busiest_lines(stacks: Folded) -> list[tuple[str, float]]:
    """Return the lines of the loop with the largest shares of the samples of all steps, the largest first.

    Beginning at the outermost frame, a line that nearly all samples have in common is followed into what it calls, as
    long as that is in the program's file. Empty: there are few samples, or a package has the loop.

    Args:
        stacks: of all phases.
    """
    samples = _samples_of_steps(stacks)
    total = samples.total()
    if total < LEAST_SAMPLES:
        return []
    script = ""
    last: list[tuple[str, float]] = []
    for depth in range(max(map(len, samples))):
        lines = Counter[str]()
        for labels, count in samples.items():
            if len(labels) > depth:
                lines[labels[depth]] += count
        (label, most), *_ = lines.most_common(1) or [("", 0)]
        found = _LABEL.fullmatch(label)
        script = script or (found["file"] if found else "")
        if most < _SAME * total:
            told = [(place, count / total) for place, count in _told(lines, script) if count >= _TOLD * total]
            return told or last
        if found is None or found["file"] != script:
            return []
        last = [(found["place"], most / total)]
        samples = Counter({labels: count for labels, count in samples.items() if labels[depth : depth + 1] == (label,)})
    return last


def deepest_functions(stacks: Folded) -> list[tuple[str, str, float]]:
    """Return the functions of the program below which only packages are called: the name of each, its busiest line,
    and its share of the samples of all steps, the largest first; only large ones.

    The program is what lies in the directory of its first file.

    Args:
        stacks: of all phases.
    """
    samples = _samples_of_steps(stacks)
    total = samples.total()
    if total < LEAST_SAMPLES:
        return []
    functions: dict[tuple[str, str], Counter[str]] = {}
    for labels, count in samples.items():
        frames = [found for label in labels if (found := _LABEL.fullmatch(label))]
        if frames:
            directory = _directory(frames[0])
            own = [each for each in frames if f"{_directory(each)}/".startswith(f"{directory}/")]
            functions.setdefault((own[-1]["name"], own[-1]["file"]), Counter())[own[-1]["place"]] += count
    busiest = sorted(functions.items(), key=lambda each: -each[1].total())[:_MOST]
    return [
        (name, lines.most_common(1)[0][0], lines.total() / total)
        for (name, _), lines in busiest
        if lines.total() >= _TOLD * total
    ]


def _directory(frame: re.Match[str]) -> str:
    return frame["file"].rpartition("/")[0]


def _samples_of_steps(stacks: Folded) -> Counter[tuple[str, ...]]:
    samples = Counter[tuple[str, ...]]()
    for phase in stacks.samples():
        if phase != STARTUP:
            for labels, count in stacks.stacks(phase):
                samples[labels] += count
    return samples


def _told(lines: Counter[str], script: str) -> Iterator[tuple[str, int]]:
    for label, count in lines.most_common(_MOST):
        found = _LABEL.fullmatch(label)
        if found is not None and found["file"] == script:
            yield found["place"], count
