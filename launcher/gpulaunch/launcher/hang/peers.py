"""With whom processes are connected by TCP, which is how gloo's groups are: from /proc, proc(5)."""

from __future__ import annotations

import os
from collections.abc import Collection

__all__ = ["among_themselves"]

_CONNECTED = frozenset({"01", "02", "03"})
"""ESTABLISHED, SYN_SENT, SYN_RECV; include/net/tcp_states.h."""
_MAPPED = "0000000000000000FFFF0000"
"""An IPv4 address in /proc/net/tcp6 begins so."""


def among_themselves(pids: Collection[int]) -> bool:
    """Whether each TCP connection of these processes is to one of them; False where that cannot be seen."""
    try:
        mine = {inode for pid in pids for inode in _sockets(pid)}
        ends: dict[tuple[str, str], str] = {}
        for pid in {os.stat(f"/proc/{pid}/ns/net").st_ino: pid for pid in pids}.values():
            ends |= _connections(pid)
    except (OSError, IndexError):
        return False
    return all(ends.get((remote, local)) in mine for (local, remote), inode in ends.items() if inode in mine)


def _sockets(pid: int) -> set[str]:
    """The inodes of its sockets."""
    found: set[str] = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == "socket":
            found.add(inode.strip("[]"))
    return found


def _connections(pid: int) -> dict[tuple[str, str], str]:
    """(local, remote) address of the connections in its network namespace, with the inode of the local end."""
    ends: dict[tuple[str, str], str] = {}
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{table}", encoding="ascii") as lines:
                rows = [line.split() for line in lines][1:]
        except FileNotFoundError:  # no IPv6
            continue
        for row in rows:
            if row[3] in _CONNECTED:
                ends[row[1].removeprefix(_MAPPED), row[2].removeprefix(_MAPPED)] = row[9]
    return ends
