"""TCP connections of processes: their peers, which shows gloo's groups, and how many bytes they moved."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection

_CONNECTED = frozenset({"01", "02", "03"})
"""ESTABLISHED, SYN_SENT, SYN_RECV; include/net/tcp_states.h."""
_MAPPED = "0000000000000000FFFF0000"
"""The prefix of an IPv4 address in /proc/net/tcp6."""

# sock_diag(7), linux/inet_diag.h: the request for all sockets of a family, and what precedes an answer's attributes.
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_CONNECTION = struct.Struct("=68xI")  # its inode is the last field
_ATTRIBUTE = struct.Struct("=HH")
_INET_DIAG_INFO = 2
_ALL_STATES = 0xFFFFFFFF
_BYTES = struct.Struct("=120xQQ")
"""bytes_acked and bytes_received in struct tcp_info, linux/tcp.h."""


def among_themselves(pids: Collection[int]) -> bool:
    """Whether each TCP connection of these processes is to one of them; False if that cannot be seen."""
    try:
        mine = {inode for pid in pids for inode in sockets_of(pid)}
        ends: dict[tuple[str, str], str] = {}
        for pid in {os.stat(f"/proc/{pid}/ns/net").st_ino: pid for pid in pids}.values():
            ends |= connections(pid)
    except (OSError, IndexError):
        return False
    return all(ends.get((remote, local)) in mine for (local, remote), inode in ends.items() if inode in mine)


def bytes_by_socket() -> dict[str, int]:
    """Bytes sent and received by each TCP socket of this network namespace, by inode; empty if that cannot be read.

    `recv` and `send` are not in /proc/PID/io, which counts `read` and `write` alone.
    """
    found: dict[str, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            for family in (socket.AF_INET, socket.AF_INET6):
                asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _ALL_STATES)
                size = _HEADER.size + len(asked)
                kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + asked)
                while _add_answers(kernel.recv(1 << 16), found):
                    pass
    except (OSError, struct.error):
        return {}
    return found


def _add_answers(data: bytes, found: dict[str, int]) -> bool:
    """Add one datagram of answers; return whether there are more."""
    while data:
        size, kind, *_ = _HEADER.unpack_from(data)
        if kind != _SOCK_DIAG_BY_FAMILY:  # the last, or an error
            return False
        (inode,) = _CONNECTION.unpack_from(data, _HEADER.size)
        at = _HEADER.size + _CONNECTION.size
        while at < size:
            length, attribute = _ATTRIBUTE.unpack_from(data, at)
            if attribute == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES.size:
                found[str(inode)] = sum(_BYTES.unpack_from(data, at + _ATTRIBUTE.size))
            at += max(_ATTRIBUTE.size, (length + 3) & ~3)
        data = data[max(size, _HEADER.size) :]
    return True


def sockets_of(pid: int) -> set[str]:
    """The inodes of its sockets. Raises OSError if they may not be read."""
    found: set[str] = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == "socket":
            found.add(inode.strip("[]"))
    return found


def connections(pid: int) -> dict[tuple[str, str], str]:
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
