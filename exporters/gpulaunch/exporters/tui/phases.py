"""Letters for step phases and goodput buckets: bars are readable without colours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpulaunch.exporters.tui.cells import Line, bar, cells, fit, plain, ratio

LETTERS: Final[Mapping[str, str]] = {
    "data_wait": "D",
    "h2d": "H",
    "forward": "F",
    "backward": "B",
    "comm": "C",
    "optimizer": "O",
    "sync": "S",
    "checkpoint": "K",
    "compile": "M",
    "gc": "G",
    "validation": "V",
    "other": ".",
}
GOODPUT_LETTERS: Final[Mapping[str, str]] = {
    "productive": "P",
    "checkpoint_stall": "K",
    "detection": "D",
    "teardown": "T",
    "restart": "R",
    "lost_work": "L",
    "startup": "S",
}
_NO_LETTER: Final = "?"
"""Letter of a phase from a newer version."""
_NAME_CELLS: Final = 20


def shares_bar(shares: Mapping[str, float], width: int, letters: Mapping[str, str] = LETTERS) -> Line:
    """Draw shares (0 to 1) as one bar, in the given order."""
    parts = [(letters.get(name, _NO_LETTER), _style(name, letters), share) for name, share in shares.items()]
    return bar(parts, width)


def legend(shares: Mapping[str, float], width: int, letters: Mapping[str, str] = LETTERS) -> Line:
    """Say what the letters mean and how much of each there is, the largest first, as far as there is room."""
    spans: list[tuple[str, str]] = []
    room = width
    for name, share in sorted(shares.items(), key=lambda each: -each[1]):
        if share < 0.005:
            break
        told = (
            f"{letters.get(name, _NO_LETTER)}={fit(plain(name), min(_NAME_CELLS, cells(plain(name))))} {ratio(share)}"
        )
        if cells(told) > room:
            break
        spans += [("  " if spans else "", ""), (told, _style(name, letters))]
        room -= cells(told) + 2
    return tuple(spans)


def _style(name: str, letters: Mapping[str, str]) -> str:
    return name if name in letters else ""
