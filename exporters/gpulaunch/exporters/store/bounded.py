"""Sanitizes untrusted JSON objects: limits their size and removes values that cannot be used in arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from gpulaunch.exporters.store.limits import MOST_TEXT_BYTES

LARGEST: Final = 1e100
"""The largest number that is stored; sums and products of smaller ones are finite, and an int fits a float."""
_CUT: Final = 300
_DEEPEST: Final = 50
"""Functions that walk the value recurse at each depth, and Python's recursion limit is about a thousand."""


def sound(value: Any, depth: int = 0) -> Any:
    """Return a decoded JSON value, with None for parts that JSON allows but that are unusable.

    These are NaN, numbers that are too large (1e999, an integer of 400 digits), and what is nested too deep.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) <= LARGEST else None  # false for NaN
    if isinstance(value, (dict, list)) and depth >= _DEEPEST:
        return None
    if isinstance(value, dict):
        return {name: sound(each, depth + 1) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [sound(each, depth + 1) for each in value]
    return value


def bounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object limited in its size as JSON: texts are cut, then the largest parts left out."""
    if len(_json(fields)) <= MOST_TEXT_BYTES:
        return dict(fields)
    cut = {name: value[:_CUT] if isinstance(value, str) else value for name, value in fields.items()}
    sizes = {name: len(_json(value)) for name, value in cut.items()}
    while cut and len(_json(cut)) > MOST_TEXT_BYTES:
        del cut[max(cut, key=lambda name: sizes[name])]
    return cut


def bounded_json(fields: Mapping[str, Any]) -> str:
    """The same as JSON."""
    return _json(bounded(fields))


def _json(value: Any) -> str:
    return json.dumps(value, default=str)
