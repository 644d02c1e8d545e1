"""The result of a trace, and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.launcher.loop.files import shown
from gpulaunch.profiler.daemon.window import Speed

_KEPT_BYTES: Final = 64 << 20
"""Allocators keep less than this; a rank counts as holding more than before above this..."""
_KEPT_SHARE: Final = 0.10
"""...and more than this share of what it held."""


@dataclass(frozen=True, kw_only=True)
class Rss:
    """Resident memory of a rank's own process; the middle value is the maximum observed."""

    before_bytes: int
    during_bytes: int
    after_bytes: int


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Copies in one direction in the window: the total, and the part that the probe saw."""

    traced_bytes: int
    ledger_bytes: int


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """The result of the trace of one rank."""

    rank: int
    pid: int
    path: str
    """Its path; "" if there is none."""
    trouble: str
    """Why there is none."""
    size_bytes: int
    num_events: int | None
    """None: it was too large to count."""
    first_step: int | None
    num_steps: int
    """Steps completely inside the trace."""
    before: Speed | None
    during: Speed | None
    after: Speed | None
    back: bool | None
    """Whether the rank is as fast as before; None: unknown."""
    rss: Rss | None
    copied: Mapping[str, Copied]
    """By direction; of those in which the GPU copied."""


def as_lines(results: Sequence[TraceResult], *, num_steps: int | None) -> list[str]:
    """Describe the results in lines for people. `num_steps`: how many steps were requested."""
    return [line for each in results for line in _lines(each, num_steps)]


def _lines(each: TraceResult, num_steps: int | None) -> list[str]:
    rank = f"rank {each.rank}"
    if not each.path:
        return [f"{rank}: no trace: {each.trouble}"]
    events = "too large to be read completely" if each.num_events is None else f"{each.num_events} events"
    lines = [
        f"{rank}: {shown(each.path)}: {_bytes(each.size_bytes)}, {events}, {_steps(each)}",
        f"  step {_speed(each.before)} before, {_speed(each.during)} during, {_speed(each.after)} after",
    ]
    if each.rss is not None:
        sizes = (each.rss.before_bytes, each.rss.during_bytes, each.rss.after_bytes)
        lines.append("  memory {} before, {} at most, {} after".format(*map(_bytes, sizes)))
        kept_bytes = each.rss.after_bytes - each.rss.before_bytes
        if kept_bytes > max(_KEPT_BYTES, _KEPT_SHARE * each.rss.before_bytes):
            lines.append(
                f"  warning: {rank} holds {_bytes(kept_bytes)} more than before; a restart of the job frees it"
            )
    for direction, copied in each.copied.items():
        seen, everything = _bytes(copied.ledger_bytes), _bytes(copied.traced_bytes)
        lines.append(f"  copies {direction}: {everything} in the trace, {seen} observed by the probe")
    if each.num_events == 0:
        lines.append(f"  warning: {rank} performed none of the operations to record")
    if num_steps is not None and each.num_steps < num_steps:
        lines.append(f"  warning: only {each.num_steps} of {num_steps} steps fit: recorded, they took longer")
    if each.back is False:
        lines.append(f"  warning: {rank} is still slower than before; a restart of the job helps")
    elif each.back is None:
        lines.append(f"  too few steps to determine whether {rank} is as fast as before")
    return lines


def _steps(each: TraceResult) -> str:
    if each.first_step is None:
        return "no complete step"
    last = each.first_step + each.num_steps - 1
    return f"step {each.first_step}" if each.num_steps == 1 else f"steps {each.first_step} to {last}"


def _speed(speed: Speed | None) -> str:
    return "-" if speed is None else time_of(speed.step_s)


def time_of(seconds: float) -> str:
    """A time in readable units."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
