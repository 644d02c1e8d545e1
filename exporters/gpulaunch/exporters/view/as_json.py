"""Converts a view to JSON, for pages, files and other programs, and back.

    {"version": 1, and every field of `model.RunView` under its name}

Enums become their values, tuples become lists. Every number is finite (otherwise null) and has at most 6 digits, times
are to the millisecond; text is valid Unicode.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Final, Union, cast

from gpulaunch.exporters.view.model import VERSION, RunView

_DEEPEST: Final = 12
_LONGEST_TEXT: Final = 8192


def to_json(view: RunView) -> dict[str, Any]:
    """Return a view as plain values that `json.dumps(..., allow_nan=False)` accepts."""
    return {"version": VERSION, **_object(view)}


def from_json(document: Mapping[str, Any]) -> RunView:
    """Return the view of a document. Unknown fields are ignored.

    Raises:
        ValueError: it is not a view, or of another version.
    """
    version = document.get("version")
    if version != VERSION:
        raise ValueError(f"a view of version {version!r}, this gpulaunch knows {VERSION}")
    try:
        view = _read(RunView, document)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"a damaged view: {error}") from None
    return cast("RunView", view)


def _object(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name), each.name) for each in fields(value)}


def _plain(value: Any, name: str = "", depth: int = 0) -> Any:
    if isinstance(value, str):
        return value[:_LONGEST_TEXT].encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if value.is_integer() and abs(value) < 1 << 53:
            return value
        # A timestamp is a large number that needs its last digits.
        return round(value, 3) if name.endswith("_s") else float(f"{value:.6g}")
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return _object(value)
    if depth > _DEEPEST:
        return None
    if isinstance(value, Mapping):
        return {
            str(_plain(str(key))): _plain(each, name if name == "times_s" else str(key), depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each, name, depth + 1) for each in cast("tuple[Any, ...]", value)]
    return _plain(str(value))


def _read(of: Any, value: Any) -> Any:
    """Convert a plain value to a type."""
    origin, args = typing.get_origin(of), typing.get_args(of)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [each for each in args if each is not type(None)][:1]
        return _read(inner if len(args) == 2 and type(None) in args else object, value)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError("a list is missing")
        return tuple(_read(args[0], each) for each in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise TypeError("an object is missing")
        return {str(key): _read(args[1], each) for key, each in value.items()}
    if isinstance(of, type):
        if issubclass(of, Enum):
            return of(value)
        if is_dataclass(of):
            return _record(of, value)
        if of is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if of in (int, str, bool) and type(value) is not of:
            raise TypeError(f"{value!r:.40} is no {of.__name__}")
    return value


def _record(of: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"{of.__name__} is missing")
    told = cast("dict[str, Any]", value)
    hints = typing.get_type_hints(of)
    known: dict[str, Any] = {}
    for each in fields(of):
        if each.name in told:
            known[each.name] = _read(hints[each.name], told[each.name])
        elif each.default is MISSING and each.default_factory is MISSING:
            raise KeyError(each.name)
    return of(**known)
