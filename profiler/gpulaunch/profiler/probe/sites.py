"""Finds the line of the user's program where something happens: the first frame outside torch, gpulaunch and Python.

A place has one row in the segment, and its row is found by what the interpreter has at hand: the code object and where
in it the frame stands. Its text is made once. All of this is bounded: the segment has 95 rows, and what comes when they
are taken goes to row 0, "elsewhere".
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Final

from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe.user_signals import raised_by_program

_NOT_THE_USERS: Final = frozenset({"torch", "gpulaunch", *sys.stdlib_module_names})
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")
_DEEP: Final = 64  # frames looked through; torch's own towers are lower
_SCALER: Final = "torch.amp.grad_scaler"
_KEYS: Final = 512  # places remembered; a line has several if it does several things, or if its code is recreated


def caller(skip: int = 0, *, above: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the user's program on this thread, a library that is not torch being part of it; None if
    there is none (a thread of torch's), or the program cannot help it.

    `logger.info("%f", loss)` waits for the GPU inside `logging`: skipping the standard library leads to the line that
    logs. But `GradScaler.step` must check whether gradients are infinite, in a generator expression of its own: no line
    of the program could avoid that.

    Args:
        skip: frames above the caller of this that need not be looked at, to be quicker.
        above: a frame, to look from its caller on.
    """
    if above is not None:
        frame = above.f_back
    else:
        try:
            frame = sys._getframe(1 + skip)  # pyright: ignore[reportPrivateUsage] - it has no other name
        except ValueError:  # nothing above: C++ called us
            return None
    for _ in range(_DEEP):
        if frame is None:
            return None
        name = frame.f_globals.get("__name__")  # code that torch generates has none
        if type(name) is str and name.partition(".")[0] not in _NOT_THE_USERS:
            return frame
        if name == _SCALER and frame.f_code.co_name == "<genexpr>":
            return None
        frame = frame.f_back
    return None


def line_of_user() -> tuple[str, bool]:
    """The place of the nearest caller that is the program's own; True if a package's is nearer.

    Where the program is nothing but packages, the nearest of those. For what is done a few times: it may walk far.
    """
    nearest = frame = caller()
    while frame is not None:
        if not _within_packages(frame.f_code.co_filename):
            return place_of(frame), frame is not nearest
        frame = caller(above=frame)
    return "" if nearest is None else place_of(nearest), True


def place_of(frame: FrameType) -> str:
    """The place of a frame: `path:line function`."""
    code = frame.f_code
    return f"{path_of(code)}:{frame.f_lineno} {code.co_name}"


def path_of(code: CodeType) -> str:
    """Where code comes from, for people: relative to the working directory, or to where packages are installed."""
    path = code.co_filename
    if path.startswith("<"):
        return path  # "<stdin>"
    installed = _within_packages(path)
    if installed:
        return installed
    try:
        here = os.getcwd() + os.sep
    except OSError as error:  # the directory is gone
        if raised_by_program(error):  # a TimeoutError is an OSError
            raise
        return path
    return path.removeprefix(here)


def _within_packages(path: str) -> str:
    """What follows on the directory that packages are installed in; "" for what is not installed."""
    for packages in _PACKAGES:
        _, found, rest = path.rpartition(packages)
        if found and rest:
            return rest
    return ""


class Sites:
    """The rows of the places that one module of the probe reports."""

    __slots__ = ("_rows", "_texts", "_writer")

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        # By id: to hash a code object takes as long as it is. The object is kept, so that its id stays its own.
        self._rows: dict[tuple[int, int, int], tuple[int, CodeType]] = {}
        self._texts: dict[tuple[int, str], int] = {}

    def row(
        self, kind: int, frame: FrameType | None, tell: Callable[[FrameType], tuple[int, str] | None] | None = None
    ) -> int:
        """The row of the place where `frame` stands.

        Args:
            kind: index in `layout.SITE_KINDS`.
            frame: what `caller` gave.
            tell: asked once about a place that is new; it may give a kind and a text that say more.
        """
        if frame is None:
            return 0
        code = frame.f_code
        key = (kind, id(code), frame.f_lasti)
        known = self._rows.get(key)
        if known is not None:
            return known[0]
        if len(self._rows) >= _KEYS:
            return 0
        told = (tell(frame) if tell is not None else None) or (kind, place_of(frame))
        row = self._texts.get(told)
        if row is None:
            row = self._writer.add_site(*told)
            if row:
                self._texts[told] = row
        self._rows[key] = (row, code)
        return row
