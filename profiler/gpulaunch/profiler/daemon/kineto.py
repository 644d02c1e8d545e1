"""The daemon's side of torch's trace client: the dynolog protocol as Kineto implements it.

Datagrams on a Unix socket named `dynolog`. Each is a frame, then its content, in native byte order:

    frame   u64 size of the content, 32 bytes its type, padded with zeros
    "ctxt"  client -> daemon   i32 gpu, i32 pid, i64 job     "I am here"; answered by one i32
    "req"   client -> daemon   i32 kinds, i32 n, i64 job, n * i32 pids   "is there something to trace?"; bit 1 of the
                               kinds: its profiler is free to
    "req"   daemon -> client   what to trace, as lines `KEY=value`, or nothing

A client asks when it starts and then every 5 s. It waits 50 ms for the answer, and takes a later one for the answer to
its next request: so an answer is sent at once, or never.

Clients are identified by the credentials that the kernel adds. The pids in the message are what the process believes to
be its own, which in a forked process may be its parent's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gpulaunch.profiler.channel import tracing

ASKS_EVERY_S: Final = 5.0
"""Kineto: kDefaultOnDemandConfigUpdateIntervalSecs."""

WHAT: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("cpu_op", "user_annotation"),
    "cuda": ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cuda_runtime", "cuda_driver"),
    "memcpy": ("gpu_memcpy", "gpu_memset"),
}
"""Kineto's names of the activities to record, by ours."""

_MAX_GPU_BUFFER_MB: Final = 128  # Kineto's own default; what does not fit is left out of the trace
_FRAME: Final = struct.Struct("=Q32s")
_CONTEXT: Final = struct.Struct("=iiq")
_REQUEST: Final = struct.Struct("=iiq")
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_FREE: Final = 2
_LONGEST: Final = 4096
_AT_ONCE: Final = 1024  # datagrams answered per call: a client that floods the socket must not block its owner


@dataclass(frozen=True, kw_only=True)
class ClientRequest:
    """A request of a process: is there something to trace?"""

    pid: int
    free: bool
    """No other trace is active in it, e.g. by its own program."""


class Daemon:
    """The socket in the directory of a run's segments, and its answers."""

    def __init__(self, directory: str) -> None:
        """Bind it; a stale socket is replaced, so there must be no other daemon. Raises OSError."""
        self._directory = directory
        self._path = tracing.socket_path(directory)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            before = os.umask(0o177)
            try:
                self._socket.bind(self._path)
            finally:
                os.umask(before)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """The file descriptor of the socket, for polling."""
        return self._socket.fileno()

    def answer(self, order_for: Callable[[ClientRequest], str]) -> list[int]:
        """Answer all pending requests; never blocks.

        Args:
            order_for: returns the order for a request, "" for nothing to trace.

        Returns:
            The pids of the processes that were sent an order.
        """
        ordered: list[int] = []
        for _ in range(_AT_ONCE):
            try:
                data, ancillary, _, address = self._socket.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:  # nothing more; any other error shows again at the next request
                break
            pid = _sender(ancillary)
            kind, free = parse(data)
            # A sender without an address cannot be answered; and answers go only to clients in our directory.
            if not pid or not isinstance(address, str) or os.path.dirname(address) != self._directory:
                continue
            if kind == "ctxt":
                self._send(address, frame("ctxt", struct.pack("=i", 1)))
            elif kind == "req":
                text = order_for(ClientRequest(pid=pid, free=free))
                if self._send(address, frame("req", text.encode())) and text:
                    ordered.append(pid)
        return ordered

    def _send(self, address: str, data: bytes) -> bool:
        try:
            self._socket.sendto(data, address)
        except OSError:  # it is gone, or does not read its answers
            return False
        return True

    def close(self) -> None:
        """Remove the socket. Requests of clients then fail, silently on their side."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def order(path: str, *, start_ms: int, duration_ms: int, warmup_s: int, what: Sequence[str]) -> str:
    """The answer that requests a trace.

    Args:
        path: where it is written; Kineto puts `_<pid>` before the first ".json" in it. No '=' and no '#': they are
            special in this format.
        start_ms: wall time at which the trace begins.
        duration_ms: its length.
        warmup_s: for this long before the start, GPU activity is recorded and discarded.
        what: names of `WHAT`.
    """
    assert not set("=#\n") & set(path), "the language of orders has no quotes"
    kinds = dict.fromkeys(kind for name in what for kind in WHAT[name])
    lines = {
        "PROFILE_START_TIME": start_ms,
        "ACTIVITIES_LOG_FILE": path,
        "ACTIVITIES_DURATION_MSECS": duration_ms,
        "ACTIVITIES_WARMUP_PERIOD_SECS": warmup_s,
        "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB": _MAX_GPU_BUFFER_MB,
        "ACTIVITY_TYPES": ",".join(kinds),
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def frame(kind: str, content: bytes) -> bytes:
    """A message as it goes over the socket."""
    return _FRAME.pack(len(content), kind.encode()) + content


def parse(data: bytes) -> tuple[str, bool]:
    """Parse a client's message: "ctxt", or "req" and whether its profiler is free; "" for anything else."""
    if len(data) < _FRAME.size:
        return "", False
    size, name = _FRAME.unpack_from(data)
    content = data[_FRAME.size :]
    if size != len(content):
        return "", False
    kind = name.partition(b"\0")[0]
    if kind == b"ctxt" and size == _CONTEXT.size:
        return "ctxt", False
    if kind == b"req" and size >= _REQUEST.size:
        kinds, count, _ = _REQUEST.unpack_from(content)
        if size == _REQUEST.size + 4 * count:
            return "req", bool(kinds & _FREE)
    return "", False


def _sender(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """The pid of a datagram's sender, as reported by the kernel; 0 if it is not."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            pid: int = _CREDENTIALS.unpack_from(data)[0]
            return pid
    return 0
