"""Writes completed steps to the segment of a rank."""

from __future__ import annotations

from typing import Final

from gpulaunch.profiler.channel.layout import Word, in_steps
from gpulaunch.profiler.channel.segment_writer import SegmentWriter
from gpulaunch.profiler.probe.account import Record, bucket_of
from gpulaunch.profiler.probe.noted import NotedSteps

_LAST_STEP: Final = in_steps(Word.LAST_STEP_MONOTONIC_NS)


class Publisher:
    """Owns a step machine, and publishes its results."""

    __slots__ = ("_bucket", "_bucket_from", "_bucket_to", "_writer", "machine")

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._bucket = self._bucket_from = self._bucket_to = 0
        self.machine = NotedSteps(self._first)
        self.machine.on_steps = self._several

    def _first(self, count: int, record: Record) -> None:
        """The first step has ended."""
        self.machine.on_step = self._one
        self._writer.words[Word.FIRST_STEP_END_NS] = self.machine.totals[_LAST_STEP]
        self._one(count, record)

    def _one(self, count: int, record: Record) -> None:
        """A step has ended, or several that are reported as one."""
        duration_ns = record[1]
        if not self._bucket_from < duration_ns <= self._bucket_to:  # most steps are in the previous one's
            self._bucket, self._bucket_from, self._bucket_to = bucket_of(duration_ns)
        self._writer.end_step(self.machine.totals, self._bucket, count, record)

    def _several(self, records: list[Record]) -> None:
        """Steps have ended, one after the other."""
        buckets = []
        for record in records:
            duration_ns = record[1]
            if not self._bucket_from < duration_ns <= self._bucket_to:
                self._bucket, self._bucket_from, self._bucket_to = bucket_of(duration_ns)
            buckets.append(self._bucket)
        self._writer.end_plain_steps(self.machine.totals, buckets, records)
