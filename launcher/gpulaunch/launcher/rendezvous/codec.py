"""Frozen dataclasses as JSON values and back, checked type by type: what arrives comes from the network.

Types: bool, int (0 to 2^31 - 1), float (finite or infinite), str (cleaned), Enum (by value), dataclass, tuple[T, ...],
tuple[A, B] and T | None. Unknown fields are ignored, missing ones take their default.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

MAX_TEXT = 500
MAX_ITEMS = 64
"""Of one tuple."""
_MAX_INT = 2**31 - 1


class MessageError(Exception):
    """The input is not a gpulaunch message."""


def clean(text: str) -> str:
    """`text` made safe to show and compare: bounded, and without control characters that move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


def to_plain(value: Any) -> Any:
    """What json can write of a value. Texts and tuples are cut to what the other side accepts."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value[:MAX_ITEMS]]
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """The value of type `kind` that `to_plain` made this of. Raises MessageError for anything else."""
    origin = get_origin(kind)
    if origin is types.UnionType:
        (inner,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else from_plain(inner, value)
    if origin is tuple:
        return _tuple(get_args(kind), value)
    if is_dataclass(kind):
        return _dataclass(kind, value)
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except (ValueError, TypeError) as err:
            raise MessageError(f"no {kind.__name__}") from err
    if kind is float and type(value) is int and abs(value) <= _MAX_INT:
        value = float(value)
    if type(value) is not kind:  # bool is not int here
        raise MessageError(f"{kind.__name__} expected")
    if isinstance(value, str):
        return clean(value)
    if kind is int and not 0 <= value <= _MAX_INT:
        raise MessageError("number out of range")
    if kind is float and value != value:
        raise MessageError("not a number")
    return value


def _tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise MessageError("list expected")
    if kinds[1:] == (...,):
        return tuple(from_plain(kinds[0], item) for item in value)
    if len(value) != len(kinds):
        raise MessageError("list of another length")
    return tuple(from_plain(kind, item) for kind, item in zip(kinds, value, strict=True))


def _dataclass(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise MessageError("object expected")
    given: dict[str, Any] = {}
    for name, (inner, is_required) in _fields_of(kind).items():
        if name in value:
            given[name] = from_plain(inner, value[name])
        elif is_required:
            raise MessageError(f"{name} is missing")
    return kind(**given)


@cache
def _fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> type, and whether it has no default."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }
