"""Counts stacks in bounded memory, and reads and writes the folded-stacks file.

A stack is a sequence of labels, `name (file:line)`, the outermost frame first. Equal stacks of one phase are one entry
with a count. The file `stacks.folded` has one line for each, as flame graph programs read them:

    <phase>;<label>;<label>;... <count>

Bounded: of each phase only the most frequent stacks are kept; dropped ones are counted in the one stack `(elsewhere)`,
so that every sum stays correct. A label is stored once, regardless of the number of stacks that it is in.
"""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from gpulaunch.profiler.files import regular, write_file
from gpulaunch.profiler.samplers.phases import STACK_PHASES
from gpulaunch.profiler.stack import Frame

STACKS_FILE: Final = "stacks.folded"
ELSEWHERE: Final = "(elsewhere)"
_LEFT_OUT: Final = "(left out)"

_MAX_STACKS: Final = 2000
_MAX_LABELS: Final = 20_000
_OUTER_FRAMES: Final = 64
_INNER_FRAMES: Final = 128
_NAME_CHARS: Final = 80
_LABEL_CHARS: Final = 200
_LARGEST_FILE_BYTES: Final = 64 << 20

# The part of a path before the package, wherever that is installed.
_INSTALLED: Final = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+t?)/")
_START: Final = "/gpulaunch/launcher/loop/"
_TAPS: Final = "/gpulaunch/profiler/probe/"
_RUNPY: Final = ("<frozen runpy>", "/runpy.py")


class Folded:
    """Counted stacks by phase."""

    def __init__(self, *, max_stacks: int = _MAX_STACKS, max_labels: int = _MAX_LABELS) -> None:
        """`max_stacks`: of each phase. `max_labels`: of all together; more of them are `(elsewhere)`."""
        self._max_stacks = max_stacks
        self._max_labels = max_labels
        self._ids: dict[str, int] = {}
        # By phase; a stack is the numbers of its labels, as the bytes of an array.
        self._counts: dict[str, dict[bytes, int]] = {}
        self._samples = Counter[str]()
        self._has_dropped = False

    def add(self, phase: str, labels: Sequence[str], count: int = 1) -> None:
        """Count a stack, the outermost frame first. Labels are not checked: see `labels_of` and `parse_line`."""
        if self._has_dropped and len(self._ids) + len(labels) > self._max_labels:
            self._forget_unused()
        stack = array("I", (self._id(label) for label in labels)).tobytes()
        counts = self._counts.setdefault(phase, {})
        counts[stack] = counts.get(stack, 0) + count
        self._samples[phase] += count
        if len(counts) > self._max_stacks:
            self._drop(counts)

    def samples(self) -> Mapping[str, int]:
        """Samples of each phase, in the order of STACK_PHASES."""
        return {phase: self._samples[phase] for phase in STACK_PHASES if phase in self._samples}

    def stacks(self, phase: str) -> Iterator[tuple[tuple[str, ...], int]]:
        """Every stack of a phase and its count."""
        labels = list(self._ids)
        for stack, count in self._counts.get(phase, {}).items():
            yield tuple(labels[number] for number in array("I", stack)), count

    def save(self, path: Path) -> None:
        """Write all stacks, readable by the owner only; readers see the old file or the new one. Raises OSError."""
        write_file(
            path,
            (
                f"{';'.join((phase, *labels))} {count}\n"
                for phase in self.samples()
                for labels, count in self.stacks(phase)
            ),
        )

    def _id(self, label: str) -> int:
        known = self._ids.get(label)
        if known is not None:
            return known
        if len(self._ids) >= self._max_labels and label != ELSEWHERE:
            return self._id(ELSEWHERE)
        return self._ids.setdefault(label, len(self._ids))

    def _drop(self, counts: dict[bytes, int]) -> None:
        """Keep three quarters, so that it runs again only after a quarter of new stacks."""
        by_count = sorted(counts, key=counts.__getitem__, reverse=True)
        elsewhere = array("I", (self._id(ELSEWHERE),)).tobytes()
        dropped = sum(counts.pop(stack) for stack in by_count[self._max_stacks * 3 // 4 :])
        counts[elsewhere] = counts.get(elsewhere, 0) + dropped
        self._has_dropped = True

    def _forget_unused(self) -> None:
        """Renumber the labels, without those that are in no stack any more."""
        kept = {phase: dict(self.stacks(phase)) for phase in self._counts}
        self._ids = {}
        self._has_dropped = False
        for phase, stacks in kept.items():
            counts = self._counts[phase] = {}
            for labels, count in stacks.items():
                stack = array("I", map(self._id, labels)).tobytes()
                counts[stack] = counts.get(stack, 0) + count  # stacks without a number are merged into "elsewhere"


def load(path: Path, into: Folded) -> Folded:
    """Add the stacks of a file to `into` and return it; invalid lines are skipped. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_FILE_BYTES:
            raise OSError(errno.EFBIG, "too large to be a file of ours")
        for line in file:
            if (stack := parse_line(line)) is not None:
                into.add(*stack)
    return into


def parse_line(line: str) -> tuple[str, tuple[str, ...], int] | None:
    """Parse one line: phase, labels, count; None if it is invalid. Labels are made printable."""
    body, _, count = line.rstrip("\n").rpartition(" ")
    phase, *labels = body.split(";")
    if phase not in STACK_PHASES or not labels or not (count.isascii() and count.isdigit() and len(count) < 16):
        return None
    if int(count) == 0:
        return None
    return phase, tuple(_clean(label) for label in _shortened(labels)), int(count)


def labels_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Convert a stack, deepest frame first, to labels, outermost first: what the user's program does.

    Left out: frames below the program (our start of the rank, runpy), and our taps, which only forward calls. Our code
    that a tap calls stays: it is our overhead and must be visible.
    """
    starts = [index for index, frame in enumerate(frames) if _START in frame.file]
    shown = frames[: starts[0]] if starts and starts[0] else frames
    outside = len(shown)
    while outside > 1 and shown[outside - 1].file.endswith(_RUNPY):
        outside -= 1
    labels: list[str] = []
    in_tap = False
    for frame in reversed(shown[:outside]):
        was_in_tap, in_tap = in_tap, _TAPS in frame.file
        if was_in_tap or not in_tap:
            labels.append(_label(frame))
    return tuple(_shortened(labels))


@lru_cache(4096)
def _label(frame: Frame) -> str:
    return _clean(f"{frame.name[:_NAME_CHARS]} ({_place(frame.file)}:{frame.line})")


def _shortened(labels: Sequence[str]) -> Iterable[str]:
    """Leave out the middle of a deep recursion: its ends are more informative."""
    if len(labels) <= _OUTER_FRAMES + _INNER_FRAMES:
        return labels
    return (*labels[:_OUTER_FRAMES], _LEFT_OUT, *labels[-_INNER_FRAMES:])


def _place(file: str) -> str:
    """Shorten a path to what distinguishes files: from the package on, or the file with its directory."""
    installed = _INSTALLED.match(file)
    return file[installed.end() :] if installed else "/".join(file.rsplit("/", 2)[-2:])


def _clean(label: str) -> str:
    """Make a label safe for a line of the file and for a page: names of functions and files may contain anything."""
    text = "".join(c if c.isprintable() else "?" for c in label[:_LABEL_CHARS])
    return text.replace(";", ",") or "?"
