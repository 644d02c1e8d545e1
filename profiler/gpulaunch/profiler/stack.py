"""The stack of a Python thread, as py-spy and faulthandler give it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """One Python frame."""

    name: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One Python thread."""

    name: str
    os_id: int
    """0: unknown."""
    idle: bool
    owns_gil: bool
    frames: tuple[Frame, ...]
    """The deepest frame first."""
