"""Tracks in the segment which parts of the probe are in service, and runs their once-a-second calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpulaunch.profiler.channel.layout import Hook, TextSlot, Word
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe.user_signals import raised_by_program

_MOST_REASONS: Final = 7


class Service:
    """The parts of one rank's probe."""

    __slots__ = ("_each_second", "_reasons", "writer")

    def __init__(self, writer: SegmentWriter) -> None:
        self.writer = writer
        self._reasons: list[str] = []  # reasons why parts are out of service, newest first
        self._each_second: list[tuple[Hook, Callable[[], None]]] = []

    def armed(self, hook: Hook) -> None:
        """Record in the segment that `hook` is in service."""
        self.writer.words[Word.HOOKS_ARMED] |= hook
        self.writer.words[Word.HOOKS_UNAVAILABLE] &= ~hook

    def unavailable(self, hook: Hook, why: str) -> None:
        """Record in the segment that `hook` is out of service, and why."""
        self.writer.words[Word.HOOKS_ARMED] &= ~hook
        self.writer.words[Word.HOOKS_UNAVAILABLE] |= hook
        reason = f"{hook.name or 'traces, graph'}: {why}"
        if reason not in self._reasons:
            self._reasons = [reason, *self._reasons[:_MOST_REASONS]]
            self.writer.write_text(TextSlot.FAULT, "; ".join(self._reasons))

    def each_second(self, hook: Hook, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called at the first edge, and then at the end of a step about once a second.

        The training thread does it. If it raises, it is not called again, and `hook` is out of service.

        Returns:
            A function that ends it.
        """
        entry = hook, call
        self._each_second.append(entry)
        return lambda: self._cease(entry)

    def call_each(self) -> None:
        """Call them.

        Raises:
            BaseException: raised meanwhile by a signal handler of the program.
        """
        for entry in tuple(self._each_second):
            hook, call = entry
            try:
                call()
            except Exception as error:
                if raised_by_program(error):
                    raise
                self._cease(entry)
                self.unavailable(hook, repr(error))

    def _cease(self, entry: tuple[Hook, Callable[[], None]]) -> None:
        if entry in self._each_second:
            self._each_second.remove(entry)
