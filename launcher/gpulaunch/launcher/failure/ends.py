"""How a rank ended, according to the kernel and the rank's own files, and the text for it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from gpulaunch.launcher.failure.errors import RankError

SHM = "/dev/shm"  # noqa: S108 - a mount point to look at, not a place for temporary files

# The meaning of common signals for training jobs; others are only named.
_MEANINGS = {
    "SIGABRT": "aborted by the C library or a C++ runtime: an assertion or an uncaught C++ exception",
    "SIGBUS": f"accessed memory without a backing page: {SHM} is full, or a mapped file was truncated",
    "SIGFPE": "arithmetic error in native code, such as an integer division by zero",
    "SIGHUP": "its terminal or session was closed",
    "SIGILL": "an instruction that this CPU does not support",
    "SIGINT": "interrupted from the keyboard",
    "SIGKILL": "cannot be caught; sent by the kernel's OOM killer, a user or a job manager",
    "SIGPIPE": "wrote to a pipe or socket that has no reader",
    "SIGSEGV": "accessed invalid memory: a fault in native code",
    "SIGTERM": "asked to end by a process other than this launcher",
    "SIGXCPU": "exceeded its CPU time limit",
}


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The end of one rank of one attempt."""

    rank: int
    local_rank: int
    pid: int
    host: str
    code: int | None
    """Exit status; None when a signal ended the rank."""
    signal: int | None
    at_s: float
    """When the kernel reported it, on this host's monotonic clock."""
    wall_time_s: float
    """The same by the wall clock: for people and files."""
    stopped: bool
    """It ended after the launcher had asked it to."""
    error: RankError | None
    tail: tuple[str, ...]
    """The last lines of its stderr, or of its stdout when stderr is empty."""
    fault: str | None
    """What faulthandler wrote: the Python stacks at a deadly signal."""
    evidence: tuple[str, ...]
    """One sentence for each fact from outside the rank, such as a counter of the kernel's OOM killer."""
    hang: str = ""
    """Why the launcher judged that this rank blocked the others, in one sentence; such an end is not `stopped`."""
    hung_s: float | None = None
    """When it judged so, monotonic: later exceptions of other ranks are due to the request to end."""


def signal_name(signum: int) -> str:
    """Return `SIGKILL` for 9; a real-time or unknown signal keeps its number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_end(end: RankEnd) -> str:
    """Return one phrase about how the process ended: `was killed by SIGKILL (9)` or `exited with code 3`."""
    if end.signal is not None:
        return f"was killed by {signal_name(end.signal)} ({end.signal})"
    return "ended in an unknown way" if end.code is None else f"exited with code {end.code}"


def signal_meaning(end: RankEnd) -> str:
    """Return what the signal means, or the signal that a code above 128 means in a shell; "" if unknown."""
    if end.signal is not None:
        return _MEANINGS.get(signal_name(end.signal), "")
    if end.code is not None and 128 < end.code < 128 + signal.NSIG:
        return f"as a shell reports {signal_name(end.code - 128)}"
    return ""
