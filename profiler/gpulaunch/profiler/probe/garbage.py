"""Measures pauses for garbage collection, and finds the lines of the program that request them.

Python reports each collection to `gc.callbacks`. Most are automatic, wherever a Python program creates an object. A
full one is often requested, by `gc.collect()`, and then the line must be known. The frame in which it ended shows the
function, and the function's source shows whether it called it. The source is read later: a signal handler of the
program may raise meanwhile, and Python drops exceptions raised in a collector callback.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
from collections.abc import Mapping
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any, Final

from gpulaunch.profiler.channel.layout import SITE_KINDS, Hook
from gpulaunch.profiler.channel.quantities import Pauses
from gpulaunch.profiler.probe.account import GC
from gpulaunch.profiler.probe.sites import line_of_user
from gpulaunch.profiler.probe.source import call_under_way, parsed
from gpulaunch.profiler.probe.state import Probe
from gpulaunch.profiler.probe.taps import Undo, exclude_from_compile, take_out
from gpulaunch.profiler.probe.training_thread import OFF
from gpulaunch.profiler.probe.user_signals import raised_by_program

_COLLECTIONS: Final = Pauses.gc_collections
_PAUSE: Final = Pauses.gc_ns_total
_KIND: Final = SITE_KINDS.index("gc")
_ALL: Final = 2  # the generation that includes all others
_PLACES: Final = 512  # in functions that contain such a call; each is checked once
_WAITING: Final = 64  # to be checked, of one second

_Names = Mapping[str, Any]


def install(probe: Probe, torch: Any, undo: Undo) -> None:
    """Register for all collections from now on."""
    collections = Collections(probe)
    exclude_from_compile(torch, ours=vars(Collections).values())
    gc.callbacks.append(collections.on_collection)
    undo.append(functools.partial(take_out, gc.callbacks, collections.on_collection))
    undo.append(probe.each_second(Hook.NESTED, collections.look))


class Collections:
    """The collections that Python reported. One may occur within our own code, too; never within another one."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._began_ns = self._nested_before_ns = 0
        # Whether a place requests collections. By id: hashing a code object takes time in proportion to its size; the
        # object is kept, so that its id stays valid.
        self._asks: dict[tuple[int, int], tuple[bool, CodeType]] = {}
        self._waiting: list[tuple[CodeType, int, _Names, str, int]] = []  # the instruction, the line, the duration
        self._rows: dict[str, int] = {}

    def on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """A collection begins or has ended."""
        probe = self._probe
        if probe.thread == OFF:
            return
        try:
            if phase == "start":
                self._began_ns, self._nested_before_ns = monotonic_ns(), probe.machine.nested_ns
            elif self._began_ns:  # else it started before the registration
                began_ns, self._began_ns, now_ns = self._began_ns, 0, monotonic_ns()
                words = probe.writer.words
                words[_COLLECTIONS] += 1
                words[_PAUSE] += now_ns - began_ns
                if probe.is_training():
                    probe.machine.nest(GC, began_ns, now_ns, self._nested_before_ns)
                    if info["generation"] == _ALL:
                        self._note(sys._getframe().f_back, now_ns - began_ns)  # pyright: ignore[reportPrivateUsage]
        except Exception as error:
            probe.fail(error)

    def look(self) -> None:
        """Read the source of the last second's places; raises what a signal handler of the program raised."""
        waiting, self._waiting = self._waiting, []
        for code, last, names, where, blocked_ns in waiting:
            key = (id(code), last)
            if key not in self._asks and len(self._asks) < _PLACES:
                self._asks[key] = _asks(code, last, names), code
            if self._asks.get(key, (False, code))[0]:
                self._enter(where, blocked_ns)

    def _note(self, frame: FrameType | None, blocked_ns: int) -> None:
        """A full collection has ended in `frame`; None: in C code without a Python caller."""
        if frame is None or "collect" not in frame.f_code.co_names:
            return
        code, last, names = frame.f_code, frame.f_lasti, frame.f_globals
        if "gc" not in code.co_names and names.get("collect") is not gc.collect:
            return  # another `collect`, such as that of environments and buffers; or this one under another name
        asks, _ = self._asks.get((id(code), last), (None, code))
        if asks is False:
            return
        try:
            where, _ = line_of_user()  # of this time: a function with such a call may be called from many lines
            if asks:
                self._enter(where, blocked_ns)
            elif len(self._waiting) < _WAITING:
                self._waiting.append((code, last, names, where, blocked_ns))
        except Exception as error:
            if raised_by_program(error):
                raise
            self._probe.unavailable(Hook.NESTED, repr(error))

    def _enter(self, where: str, blocked_ns: int) -> None:
        row = self._rows.get(where)
        if row is None:
            row = self._probe.writer.add_site(_KIND, where)
            if row:
                self._rows[where] = row
        self._probe.writer.site(row, blocked_ns=blocked_ns)


def _asks(code: CodeType, last: int, names: _Names) -> bool:
    """Whether the current call at instruction `last` is `gc.collect()`, or `collect()` of that module."""
    try:
        call = call_under_way(code, last, *parsed(code))
    except (OSError, SyntaxError, ValueError, IndexError, RecursionError) as error:
        if raised_by_program(error):
            raise
        return False
    function = None if call is None else call.func
    # What the function itself has imported is not among its globals.
    if isinstance(function, ast.Name):
        name = function.id
        return names.get(name) is gc.collect or (name == "collect" and name not in names and "gc" in code.co_names)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        name = function.value.id
        return function.attr == "collect" and (names.get(name) is gc or (name == "gc" and name not in names))
    return False
