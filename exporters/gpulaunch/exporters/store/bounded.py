"""Objects that others have filled, made no larger than we want to keep, and of nothing that we cannot compute with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from gpulaunch.exporters.store.limits import MOST_TEXT_BYTES

LARGEST: Final = 1e100
"""No number that we write is larger; sums and products of smaller ones are finite, and a whole one is a float, too."""
_CUT: Final = 300
_DEEPEST: Final = 50
"""Whoever walks through it calls itself at each depth, and Python allows that about a thousand times."""


def sound(value: Any, depth: int = 0) -> Any:
    """Give what JSON was read as, with None for what JSON allows and nothing can be done with.

    That is what is no number (NaN), is too large to be one (1e999, an integer of 400 digits), or lies too deep.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return value if abs(value) <= LARGEST else None  # NaN is not
    if isinstance(value, (dict, list)) and depth >= _DEEPEST:
        return None
    if isinstance(value, dict):
        return {name: sound(each, depth + 1) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [sound(each, depth + 1) for each in value]
    return value


def bounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Give an object that is not too long as JSON: its texts are cut, then its largest parts left out."""
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
