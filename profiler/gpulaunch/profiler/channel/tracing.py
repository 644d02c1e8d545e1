"""File names shared by a rank and `gpulaunch trace`, in the directory of the shared-memory segments.

dynolog           the socket that torch's trace client asks; it exists while a trace is requested
dynoconfigclient* the clients' own sockets, created by torch
traces            during a trace: a link to the directory that the traces go to
untraced-<rank>   the pid of this rank, then its reason why it cannot be traced
"""

from __future__ import annotations

import os
from typing import Final

from gpulaunch.profiler.files import write_file

_CLIENT_BYTES: Final = len("/dynoconfigclient") + 36
_MOST_BYTES: Final = 107
"""Capacity of sockaddr_un. torch's client copies its path there without a length check."""
_REASON_BYTES: Final = 512


def socket_path(directory: str) -> str:
    """Path of the socket, under the name that torch's client expects."""
    return os.path.join(directory, "dynolog")


def traces_path(directory: str) -> str:
    """The directory in which ranks write their traces."""
    return os.path.join(directory, "traces")


def fits(directory: str) -> bool:
    """Whether the socket paths of torch's clients fit in this directory."""
    return len(os.fsencode(directory)) + _CLIENT_BYTES <= _MOST_BYTES


def refuse(directory: str, rank: int, why: str) -> None:
    """Record why this process, a rank, cannot be traced. Raises OSError."""
    write_file(_refusal_path(directory, rank), [f"{os.getpid()} {' '.join(why.split())[:_REASON_BYTES]}"])


def refused(directory: str, rank: int, pid: int) -> str:
    """The reason why this process cannot be traced, or ""."""
    try:
        with open(_refusal_path(directory, rank), "rb") as file:
            who, _, why = file.read(_REASON_BYTES).decode("utf-8", "replace").partition(" ")
    except OSError:
        return ""
    return why if who == str(pid) else ""  # else it was the rank of an earlier attempt


def _refusal_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f"untraced-{rank}")
