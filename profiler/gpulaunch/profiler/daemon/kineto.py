"""The other end of torch's trace client: the protocol of the dynolog daemon, as Kineto speaks it.

Datagrams on a Unix socket called `dynolog`. Each is a frame, then its content, in native byte order:

    frame   u64 size of the content, 32 bytes its type, padded with zeros
    "ctxt"  client -> daemon   i32 gpu, i32 pid, i64 job     "I am here"; answered by one i32
    "req"   client -> daemon   i32 kinds, i32 n, i64 job, n * i32 pids   "is there something to trace?"; bit 1 of the
                               kinds: its profiler is free to
    "req"   daemon -> client   what to trace, as lines `KEY=value`, or nothing

A client asks when it starts and then every 5 s. It waits 50 ms for the answer, and takes one that comes later for the
answer to its next question: so an answer is sent at once, or never.

Whoever asks is known by the credentials that the kernel adds. The pids in the message are what the process takes for
its own, which in a forked process may be its parent's.
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
"""Kineto's names of what is recorded, by ours."""

_MAX_GPU_BUFFER_MB: Final = 128  # Kineto's own default; what does not fit is left out of the trace
_FRAME: Final = struct.Struct("=Q32s")
_CONTEXT: Final = struct.Struct("=iiq")
_REQUEST: Final = struct.Struct("=iiq")
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_FREE: Final = 2
_LONGEST: Final = 4096
_AT_ONCE: Final = 1024  # datagrams answered in one go: whoever floods the socket must not keep its owner


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A process asks whether there is something to trace."""

    pid: int
    free: bool
    """Nothing else is being traced in it, by its own program for instance."""


class Daemon:
    """The socket in the directory of a run's segments, and its answers."""

    def __init__(self, directory: str) -> None:
        """Bind it; one that was left behind is replaced, so there must be nobody else. Raises OSError."""
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
        """The socket, to be waited for."""
        return self._socket.fileno()

    def answer(self, order_for: Callable[[Ask], str]) -> list[int]:
        """Answer all who have asked by now; never blocks.

        Args:
            order_for: what the process that asks is to trace, "" for nothing.

        Returns:
            The pids of those to whom an order was sent.
        """
        ordered: list[int] = []
        for _ in range(_AT_ONCE):
            try:
                data, ancillary, _, address = self._socket.recvmsg(_LONGEST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:  # nothing more; what else it may be, the next question will tell
                break
            pid = _sender(ancillary)
            kind, free = parse(data)
            # One without an address cannot be answered; and no answer goes to anything but a client beside us.
            if not pid or not isinstance(address, str) or os.path.dirname(address) != self._directory:
                continue
            if kind == "ctxt":
                self._send(address, frame("ctxt", struct.pack("=i", 1)))
            elif kind == "req":
                text = order_for(Ask(pid=pid, free=free))
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
        """Take the socket away. Clients then ask in vain, which they do in silence."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def order(path: str, *, start_ms: int, duration_ms: int, warmup_s: int, what: Sequence[str]) -> str:
    """What to answer to have a trace made.

    Args:
        path: where it is written; Kineto puts `_<pid>` before the first ".json" in it. No '=' and no '#': they mean
            something in this language.
        start_ms: wall time at which the trace begins.
        duration_ms: how long it is.
        warmup_s: for so long before that GPU activity is recorded and thrown away.
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
    """What a client says: "ctxt", or "req" and whether its profiler is free; "" for what is none of these."""
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
    """The pid of who sent a datagram, by the kernel; 0 where it did not say."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= _CREDENTIALS.size:
            pid: int = _CREDENTIALS.unpack_from(data)[0]
            return pid
    return 0
