"""Makers of the ends of ranks and of their errors: every field has a dull default, a test names what it is about."""

from __future__ import annotations

from typing import Any

from gpulaunch.launcher.failure.ends import RankEnd
from gpulaunch.launcher.failure.errors import RankError

GLOO_ECHO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:4518. This is typically caused by a remote worker crashing."
)


def rank_error(kind: str, message: str, *, at: float | None = None, traceback: str | None = None) -> RankError:
    """An exception; `at`: when it was raised, monotonic; `traceback`: None for one frame of train.py."""
    if traceback is None:
        frames = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n'
        traceback = f"{frames}{kind}: {message}\n"
    return RankError(type=kind, message=message, traceback=traceback, at_monotonic_s=at, at_wall_s=1_700_000_000.0)


def rank_end(rank: int = 0, **fields: Any) -> RankEnd:
    """The end of a rank: exit code 1, or the signal among `fields`."""
    values: dict[str, Any] = {
        "rank": rank,
        "local_rank": rank,
        "pid": 4000 + rank,
        "host": "node1",
        "code": None if fields.get("signal") else 1,
        "signal": None,
        "at_s": 110.0,
        "wall_time_s": 1_700_000_010.0,
        "stopped": False,
        "error": None,
        "tail": (),
        "fault": None,
        "evidence": (),
    }
    return RankEnd(**{**values, **fields})


def echo_end(rank: int = 0, at: float = 110.5) -> RankEnd:
    """An end that only says that a peer is gone; 0.1 s between the exception and the death."""
    return rank_end(rank, at_s=at + 0.1, error=rank_error("RuntimeError", GLOO_ECHO, at=at))
