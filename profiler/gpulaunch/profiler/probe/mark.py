"""Optional markers that a training loop can set. Outside a run all of them do nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from gpulaunch.profiler.channel.layout import PHASES
from gpulaunch.profiler.probe.inject import probe_for_marks

Phase = Literal[
    "data_wait",
    "h2d",
    "forward",
    "backward",
    "comm",
    "optimizer",
    "sync",
    "checkpoint",
    "compile",
    "gc",
    "validation",
    "other",
]


def step() -> None:
    """A training step ends here. From the first call on, nothing else ends one."""
    probe = probe_for_marks()
    if probe is not None:
        probe.mark_step()


@contextmanager
def phase(name: Phase) -> Generator[None]:
    """Assign the time of this block to phase `name`, whatever happens in it. An unknown name counts as "other".

    For loops whose phases cannot be detected from outside, such as data without a DataLoader. Not for use inside a
    compiled function.
    """
    probe = probe_for_marks()
    if probe is None:
        yield
        return
    before = probe.mark_phase(1 + PHASES.index(name if name in PHASES else "other"))
    try:
        yield
    finally:
        probe.mark_phase(before)


def note(text: str) -> None:
    """Store `text` (up to 232 bytes) with the rank's metrics. The last note is kept, also after the rank has ended."""
    probe = probe_for_marks()
    if probe is not None:
        probe.note(text)
