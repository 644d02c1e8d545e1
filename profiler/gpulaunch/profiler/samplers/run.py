"""Samples the agent's state of the run: goodput, restarts, hangs (run.json beside the segments)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from gpulaunch.profiler.files import read_file
from gpulaunch.profiler.record import GOODPUT_BUCKETS, RESTART_KINDS, Reading, RunState
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals

_VERSION: Final = 1
_WAITING: Final = ("startup", "restart")
_MOST_STALLED: Final = 1024
_LONGEST_S: Final = 1e9  # thirty years; longer is not a valid time of a run


class RunSampler:
    """Reads run.json; if it is missing or cannot be read, there is no state."""

    def __init__(
        self, channel_dir: Path, ledger: MonotonicTotals, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = channel_dir / "run.json"
        self._ledger = ledger
        self._clock = clock

    def read(self, now: float) -> Reading[RunState | None]:
        """Return the run's state; None before the agent has reported any."""
        try:
            said = parse_run(read_file(self._path))
        except FileNotFoundError:
            return Reading(values=None)
        except OSError as error:
            return Reading(values=None, errors=(f"run.json: {error.strerror}",))
        except ValueError as error:
            return Reading(values=None, errors=(f"run.json: {error}",))
        return Reading(values=self._never_falling(said), late_s=self._clock() - now)

    def _never_falling(self, said: RunState) -> RunState:
        """Keep every count at the highest value that was ever reported.

        Steps count as productive until it is known that they must be repeated; then the agent subtracts them, but a
        counter must not fall. It stays unchanged until the repeated steps have made up for it. Time that was reported
        as waiting for the first step, but was work, is not reported again.
        """
        waited = self._highest("waiting", [said.goodput_ns[bucket] for bucket in _WAITING])
        again_ns = sum(waited) - sum(said.goodput_ns[bucket] for bucket in _WAITING)
        told_ns = {**said.goodput_ns, "productive": max(0, said.goodput_ns["productive"] - again_ns)}
        goodput = self._highest("goodput", [told_ns[bucket] for bucket in GOODPUT_BUCKETS])
        hang_suspicions, hangs = self._highest("hangs", [said.hang_suspicions, said.hangs])
        return RunState(
            goodput_ns=dict(zip(GOODPUT_BUCKETS, goodput, strict=True)),
            restarts={kind: self._highest(f"restarts/{kind}", [count])[0] for kind, count in said.restarts.items()},
            hang_suspicions=hang_suspicions,
            hangs=hangs,
            preempted=said.preempted,
            stalled_since_ns=said.stalled_since_ns,
        )

    def _highest(self, account: str, counters: list[int]) -> tuple[int, ...]:
        return self._ledger.total(f"run/{account}", {"": counters}, width=len(counters))


def parse_run(text: bytes) -> RunState:
    """Parse run.json. A missing bucket is 0, an unknown one is left out; an unknown kind is "other".

    Raises:
        ValueError: it is invalid, or of another version.
    """
    try:
        document: Any = json.loads(text)
        version = document["version"]
        if version != _VERSION:
            raise ValueError(f"version {version!r}, this sidecar knows {_VERSION}")
        seconds: Mapping[str, Any] = document["goodput_seconds"]
        restarts: dict[str, int] = {}
        for kind, count in document["restarts"].items():
            known = kind if kind in RESTART_KINDS else "other"
            restarts[known] = restarts.get(known, 0) + _count(count)
        return RunState(
            goodput_ns={bucket: _ns(seconds.get(bucket, 0.0)) for bucket in GOODPUT_BUCKETS},
            restarts=restarts,
            hang_suspicions=_count(document["hang_suspicions"]),
            hangs=_count(document["hangs"]),
            preempted=_count(document["preempted"]) != 0,
            stalled_since_ns=_stalled(document.get("stall")),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"damaged ({type(error).__name__})") from error


def _stalled(stall: Any) -> dict[int, int]:
    return {} if stall is None else {_count(rank): _ns(stall["since_s"]) for rank in stall["ranks"][:_MOST_STALLED]}


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("damaged (not a count)")
    return value


def _ns(seconds: object) -> int:
    if type(seconds) not in (int, float) or not 0 <= seconds < _LONGEST_S:  # type: ignore[operator]
        raise ValueError("damaged (not a number of seconds)")
    return round(seconds * 1e9)  # type: ignore[operator]
