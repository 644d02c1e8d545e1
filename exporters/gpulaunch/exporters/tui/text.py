"""Text for terminals: escaped, with compact figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from gpulaunch.exporters.view.figures import CELLS, UNKNOWN
from gpulaunch.exporters.view.text import inert

_COLOURS: Final = re.compile(r"\x1b\[[0-9;:]{0,64}m")

seconds, took, size, ratio, figure = CELLS.seconds, CELLS.took, CELLS.size, CELLS.ratio, CELLS.number


def plain(text: object) -> str:
    """Return anything as one line that is safe for a terminal."""
    return inert(str(text))


def without_colours(text: str) -> str:
    """Drop the sequences that only set colours: this is more readable, and hides nothing."""
    return _COLOURS.sub("", text)


def number(value: int | None) -> str:
    """Return a number with all its digits."""
    return UNKNOWN if value is None else str(value)


def place(node: int, host: str) -> str:
    """Return how a node is named: its rank and, where it is known, its host name."""
    return f"node {node} ({plain(host)})" if host else f"node {node}"


def pairs(of: Mapping[str, object]) -> str:
    """Return a mapping as `name=value name=value`, escaped; unknown values are left out."""
    return " ".join(f"{plain(name)}={_value(value)}" for name, value in of.items() if value not in (None, ""))


def measured(figures: Mapping[str, float | str]) -> str:
    """Return the evidence of a finding as `name in words figure; ...`, escaped, in the units of the names."""
    told = [
        (name.replace("_", " "), value[:400]) if isinstance(value, str) else CELLS.measured(name, value)
        for name, value in figures.items()
    ]
    return "; ".join(f"{plain(name)} {plain(value)}" for name, value in told)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        some = [(name, each) for name, each in list(value.items())[:40] if each]
        value = ", ".join(f"{name} {each:.4g}" if isinstance(each, float) else f"{name} {each}" for name, each in some)
    return plain(str(value)[:400])
