"""Where a rank and `gpulaunch trace` meet: names in the directory of the shared-memory segments.

dynolog           the socket that torch's own trace client asks; it is there while somebody wants a trace
dynoconfigclient* the clients' own sockets, made by torch
traces            while a trace is made: a link to the directory that the traces go to
untraced-<rank>   why this rank cannot be traced, in its own words, after its pid
"""

from __future__ import annotations

import os
from typing import Final

from gpulaunch.profiler.files import write_file

_CLIENT_BYTES: Final = len("/dynoconfigclient") + 36
_MOST_BYTES: Final = 107
"""What sockaddr_un has room for. torch's client copies its path there without looking."""
_REASON_BYTES: Final = 512


def socket_path(directory: str) -> str:
    """The socket, under the name that torch's client knows."""
    return os.path.join(directory, "dynolog")


def traces_path(directory: str) -> str:
    """The directory in which ranks write their traces."""
    return os.path.join(directory, "traces")


def fits(directory: str) -> bool:
    """Whether the sockets of torch's clients can lie in this directory."""
    return len(os.fsencode(directory)) + _CLIENT_BYTES <= _MOST_BYTES


def refuse(directory: str, rank: int, why: str) -> None:
    """Say why this process, a rank, cannot be traced. Raises OSError."""
    write_file(_refusal_path(directory, rank), [f"{os.getpid()} {' '.join(why.split())[:_REASON_BYTES]}"])


def refused(directory: str, rank: int, pid: int) -> str:
    """Why this process said that it cannot be traced, or ""."""
    try:
        with open(_refusal_path(directory, rank), "rb") as file:
            who, _, why = file.read(_REASON_BYTES).decode("utf-8", "replace").partition(" ")
    except OSError:
        return ""
    return why if who == str(pid) else ""  # else it was the rank of an attempt before


def _refusal_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"untraced-{rank}")
