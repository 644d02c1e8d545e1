"""Client of torch's worker server: a unix socket per process, if the program runs one, with data about collectives.

A C++ thread answers, for the flight recorder and the wait counters without the GIL: it works on a hung rank. Started
by `torch.distributed.elastic.control_plane.worker_main`, at TORCH_WORKER_SERVER_SOCKET of the rank's environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpulaunch.launcher.hang.values import Recorders

SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
_ANSWER_S = 2.0
_ANSWER_CAP_BYTES = 4 << 20
_MAX_TOLD = 8


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("worker", timeout=_ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_ANSWER_S)
        self.sock.connect(self._path)


def socket_of(pid: int) -> str:
    """Return the path of a rank's worker server. Raises OSError with the reason if it runs none."""
    with open(f"/proc/{pid}/environ", "rb") as environ:
        entries = environ.read().split(b"\0")
    prefix = f"{SOCKET_VARIABLE}=".encode()
    path = next((entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)), "")
    if not path:
        raise OSError(f"the program runs none ({SOCKET_VARIABLE} is not set)")
    return path


def ask(path: str, handler: str) -> bytes:
    """Call one handler. Raises OSError with the reason."""
    connection = _UnixConnection(path)
    try:
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        body = answer.read(_ANSWER_CAP_BYTES)
    except http.client.HTTPException as error:
        raise OSError(f"it answered no HTTP: {error!r}") from None
    except TimeoutError:
        raise OSError("it did not answer in time") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise OSError(f"it has no {handler} (HTTP {answer.status})")
    return body


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """The last collective of each process group that a rank has begun, by torch's flight recorder."""

    enqueued: Mapping[str, int]
    """Number of the last collective, by the name of the process group, which is the same on all ranks."""
    calls: Mapping[str, str]
    """Its operation: `gloo:all_reduce`."""
    newest: str
    """The group of the newest one."""

    @property
    def last(self) -> str:
        """The operation of the newest one."""
        return self.calls[self.newest]


def read_flight_record(pid: int) -> FlightRecord | None:
    """Query a rank's flight recorder; None if it has none or it is empty."""
    try:
        return parse_recorder(ask(socket_of(pid), "fr_trace_json"))
    except (OSError, ValueError):
        return None


def parse_recorder(text: bytes) -> FlightRecord | None:
    """Parse a flight recorder's JSON; None if it has no collective. Raises ValueError."""
    enqueued: dict[str, int] = {}
    calls: dict[str, str] = {}
    newest = ""
    try:
        for entry in json.loads(text).get("entries") or []:
            # `pg_id` and `pg_status` count the groups of one process: the names alone mean the same everywhere.
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            if not entry["is_p2p"] and number >= enqueued.get(group, 0):
                enqueued[group], calls[group], newest = number, str(entry["profiling_name"]), group
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no flight recorder's: {error!r}") from None
    return FlightRecord(enqueued=enqueued, calls=calls, newest=newest) if enqueued else None


def compare_records(all_recorded: Mapping[int, FlightRecord], ranks: Iterable[int]) -> Recorders:
    """Compare the recorders of all these ranks that have one."""
    late: set[int] = set()
    clashing: set[int] = set()
    for group in {group for one in all_recorded.values() for group in one.enqueued}:
        numbers = {rank: one.enqueued[group] for rank, one in all_recorded.items() if group in one.enqueued}
        late |= {rank for rank, number in numbers.items() if number < max(numbers.values())}
        for number in set(numbers.values()):
            calls = {rank: all_recorded[rank].calls[group] for rank in numbers if numbers[rank] == number}
            usual, count = Counter(calls.values()).most_common(1)[0]
            if count < len(calls):
                clashing |= {rank for rank, call in calls.items() if call != usual or 2 * count <= len(calls)}
    newest = {(one.newest, one.enqueued[one.newest], one.last) for one in all_recorded.values()}
    agree = len(newest) == 1 and all(rank in all_recorded for rank in ranks)
    return Recorders(behind=tuple(sorted(late)), clashing=tuple(sorted(clashing)), agree=agree)


def summary(all_recorded: Mapping[int, FlightRecord]) -> str:
    """Say which rank is behind: `flight recorder: rank 3 is at collective 41 (gloo:all_reduce), the others at 42`."""
    late = compare_records(all_recorded, ()).behind
    if not late:
        last = {one.last for one in all_recorded.values()}
        if not all_recorded:
            return ""
        return f"flight recorder: all ranks have begun equally many collectives, the last {' / '.join(sorted(last))}"
    parts: list[str] = []
    for rank in late[:_MAX_TOLD]:
        one = all_recorded[rank]
        for group, number in one.enqueued.items():
            most = max(other.enqueued.get(group, number) for other in all_recorded.values())
            if number < most:
                call = one.calls[group]
                parts.append(f"rank {rank} has begun {number} collectives (the last {call}), others {most}")
    return "flight recorder: " + "; ".join(parts)


def waits_of(pid: int) -> dict[str, Any]:
    """Return those of a rank's wait counters that are active now."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        counters = json.loads(ask(socket_of(pid), "wait_counter_values"))
        return {name: one for name, one in counters.items() if one.get("active_count")}
    return {}
