"""Converts counted stacks to flame graphs: the boxes of a graph, and a file for the viewer speedscope.

A flame graph shows the stacks of many samples at once: equal callers are merged into one box, as wide as its
number of samples; the horizontal order has no meaning, stacks are sorted by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Stack = tuple[Sequence[str], int]
"""Labels, the outermost frame first, and the number of samples."""

# https://github.com/jlfwong/speedscope/blob/main/src/lib/file-format-spec.ts
_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_PLACE: Final = re.compile(r"(?P<name>.*) \((?P<file>.*):(?P<line>\d{1,9})\)")


@dataclass(frozen=True, kw_only=True)
class Box:
    """One frame in one place of a flame graph."""

    label: str
    depth: int
    """0: outermost."""
    begin: int
    """Number of samples to the left of it."""
    samples: int


def boxes_of(stacks: Iterable[Stack]) -> tuple[Box, ...]:
    """Merge stacks into the boxes of one flame graph: by depth, then from left to right."""
    found: list[Box] = []
    path: list[tuple[str, int]] = []  # the labels of the previous stack, and where each began
    at = 0

    def close(depth: int) -> None:
        while len(path) > depth:
            label, begin = path.pop()
            found.append(Box(label=label, depth=len(path), begin=begin, samples=at - begin))

    for labels, samples in sorted((tuple(labels), samples) for labels, samples in stacks):
        shared = 0
        while shared < min(len(path), len(labels)) and path[shared][0] == labels[shared]:
            shared += 1
        close(shared)
        path.extend((label, at) for label in labels[shared:])
        at += samples
    close(0)
    return tuple(sorted(found, key=lambda box: (box.depth, box.begin)))


def speedscope(profiles: Mapping[str, Iterable[Stack]], *, name: str, exporter: str) -> dict[str, Any]:
    """Return the content of a speedscope file with one profile per name; a sample has weight 1."""
    numbers: dict[str, int] = {}
    shown: list[dict[str, Any]] = []
    for title, stacks in profiles.items():
        samples: list[list[int]] = []
        weights: list[int] = []
        for labels, count in sorted((tuple(labels), count) for labels, count in stacks):
            samples.append([numbers.setdefault(label, len(numbers)) for label in labels])
            weights.append(count)
        total = sum(weights)
        profile = {"type": "sampled", "name": title, "unit": "none", "startValue": 0, "endValue": total}
        shown.append({**profile, "samples": samples, "weights": weights})
    return {
        "$schema": _SCHEMA,
        "name": name,
        "exporter": exporter,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(label) for label in numbers]},
        "profiles": shown,
    }


def _frame(label: str) -> dict[str, Any]:
    place = _PLACE.fullmatch(label)
    if place is None:
        return {"name": label}
    return {"name": place["name"], "file": place["file"], "line": int(place["line"])}
