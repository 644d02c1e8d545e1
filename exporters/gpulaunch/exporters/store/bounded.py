"""Objects that others have filled, made no larger than we want to keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gpulaunch.exporters.store.limits import MOST_TEXT_BYTES

__all__ = ["bounded", "bounded_json"]

_CUT: Final = 300


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
